"""Plans and timelines, questioned."""
