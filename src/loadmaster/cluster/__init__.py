"""How a cluster is named, described and probed."""
