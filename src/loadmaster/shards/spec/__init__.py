"""What the user says and what a study relies on: `trial.Trial`, and the protocols `engine.Engine` and
`engine.Runner`. The lowest room of `shards`: it imports `core` and nothing else of it.
"""
