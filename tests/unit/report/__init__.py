"""What is drawn of plans and timelines."""
