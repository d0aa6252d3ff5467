"""A test for each graph format: every field by hand, and every way a file can be wrong."""
