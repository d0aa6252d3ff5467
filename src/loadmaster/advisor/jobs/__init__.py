"""What is decided about, and on what: jobs, their scaling curves, the state of a cluster, a decision.

Front doors: `curve.ScalingCurve`, `job.Job`, `state.ClusterState`. Nouns only; `planned_curve` asks the
planner.
"""
