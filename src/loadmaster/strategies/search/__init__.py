"""Searches, one file each; the file's name is the search's. They stand on the evaluator alone."""
