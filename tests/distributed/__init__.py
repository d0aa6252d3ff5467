"""Plans over processes: real processes on loopback."""
