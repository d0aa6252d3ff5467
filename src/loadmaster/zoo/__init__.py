"""Small reference models of our own, and named models of `transformers`; needs the extra `[torch]`."""
