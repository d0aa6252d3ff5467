"""Problem x Plan -> Timeline, and what no plan can beat. `events.engine.simulate` and
`bounds.lower_bounds.lower_bound` are the front doors; `jit` compiles kernels for everyone above. It may
import `cost` and what lies below it.
"""
