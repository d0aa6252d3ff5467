"""Models cut into shards: blocks, memory under a cap, updates on the host, the forecast of a step."""
