"""Policies: given a job and the state of a cluster, how many devices and which. One file is one policy.

Front door: `registry.policy(name)`. A policy with a `rule` can also be replayed by the compiled engine.
May import `jobs`, `environments` and, for learned ones, `learned`.
"""
