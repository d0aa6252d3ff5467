"""What survives a kill: the journal, checkpoints, frozen weights, and what is deleted."""
