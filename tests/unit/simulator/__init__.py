"""The simulator by hand: timelines, memory, lower bounds, steady states."""
