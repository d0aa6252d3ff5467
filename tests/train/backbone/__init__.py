"""Many trials on one frozen model."""
