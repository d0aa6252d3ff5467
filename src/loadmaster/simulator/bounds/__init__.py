"""Lower bounds of the objective and proofs that nothing fits: what no plan can beat.
`lower_bounds.lower_bound` is the front door. It imports `jit`, but not `events`, so that a bound never rests
on the simulator that it bounds.
"""
