"""Plans on real devices: the numbers of the unplaced model, under every engine."""
