"""One file a verb: its options, its call into the api, its output."""
