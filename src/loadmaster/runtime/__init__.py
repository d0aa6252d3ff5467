"""A plan on real devices: the user's own training loop, with the same numbers. Needs the extra `[torch]`."""
