"""Models cut into shards under a memory cap: described, sized, planned, forecast. Trains nothing. [torch]"""
