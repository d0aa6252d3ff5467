"""Each algorithm on examples worked out by hand, and the published ones."""
