"""The simulator itself: a problem made ready once, then any number of plans timed, sized and scored by
compiled event loops. `engine.simulate` is the front door. It imports `jit`, but not `bounds`.
"""
