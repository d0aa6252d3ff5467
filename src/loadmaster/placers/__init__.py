"""Problem -> Placement. One file is one algorithm, and its name is the algorithm's name; `registry.placer` is
the front door. Placers stand on the simulator; they know neither the runtime nor the report nor the shards.
"""
