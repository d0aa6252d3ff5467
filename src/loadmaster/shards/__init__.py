"""Models cut into shards under a memory cap: described (`spec`), built and profiled (`model`), given a device
(`device`) and laid out (`plan`). It trains nothing; `train` does that. `plan.partition.make_plan` is the
front door. It may import the simulator and what lies below it, but neither placers nor the runtime. [torch]
"""
