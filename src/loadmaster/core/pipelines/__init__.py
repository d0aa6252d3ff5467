"""Pipelines of micro-batches as nouns: schedules as users write them, the order in which each rank works, and
what its stages hold meanwhile. `schedule` is the front door. Arithmetic only: nothing is simulated or run.
"""
