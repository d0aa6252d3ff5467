"""Problem -> Placement; one file per algorithm, file name = algorithm name."""
