"""Problem x Plan -> Timeline, and what no plan can beat."""
