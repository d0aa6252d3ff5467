"""Whether a model fits, what it holds at the worst moment, and what would make it fit. `fit.assess_fit` is
the front door. It may import placers, the simulator and what lies below them.
"""
