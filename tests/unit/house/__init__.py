"""What holds for the repository itself: docs, import contracts, skips, what strategies draw."""
