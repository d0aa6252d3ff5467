"""Runs a plan for a model that cannot be exported: functions run on the device of their module, by hooks.
`engine.HookEngine` is the front door. It may import `graph_engine`, `spill`, `transport` and what lies below
the runtime.
"""
