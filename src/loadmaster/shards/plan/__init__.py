"""Where to cut a model, what stays on the device, who steps it, and what a step then takes: rates of a
machine, sizes, layouts and forecasts. `partition.make_plan` is the front door. The top room of `shards`: it
may import all the others.
"""
