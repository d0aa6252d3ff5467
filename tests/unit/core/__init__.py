"""The nouns, their files, checks and units."""
