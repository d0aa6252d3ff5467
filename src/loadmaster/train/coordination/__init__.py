"""A study while it runs: which trial a device takes next, checkpoints, searchers, callbacks and the result.
`coordinator.Coordinator` is the front door. It may import `workers`, `disk` and what lies below `train`, but
not `execute`: what trains is an `Engine`.
"""
