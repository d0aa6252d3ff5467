"""Runs a plan op by op: the model's export graph is rewritten with copies between devices, ordered, and
called in place of `forward`. `engine.Engine` is the front door. Above `spill` and `transport`; it may also
import `modules`, `graph` and `core`, but no other room of the runtime.
"""
