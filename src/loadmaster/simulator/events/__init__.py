"""Events: one plan replayed op by op, its times and its memory.

The front door is `engine`; `throughput` has the steady state of a pipeline. The room may import
`simulator.jit`, `cost.transfer` and `core`.
"""
