"""One folder of tests for each room of the program."""
