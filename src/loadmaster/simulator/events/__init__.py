"""Events: one plan replayed op by op, its times and its memory.

The front door is `engine`; `throughput` has the steady state of a pipeline, `peak_check` the rules that a
plan must obey with simulated peaks. The room may import `simulator.jit`, `cost.transfer` and `core`.
"""
