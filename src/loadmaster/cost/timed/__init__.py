"""Ops, copies and whole steps timed on the devices of this machine. `bench` is the front door. It may import
what stands beside it in `cost` but for `measure` and `cost_request`, which ask it.
"""
