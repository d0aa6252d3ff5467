"""A trial's model as a chain of blocks: built, taken apart, checked and profiled on fake tensors, before
anything is laid out in memory. The front door is `build_trial` in `built_model`. It may import
`shards.spec`, `modules` and `core`; neither the devices nor the plan of shards.
"""
