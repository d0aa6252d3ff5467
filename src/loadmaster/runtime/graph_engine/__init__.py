"""Runs a plan op by op: the model's export graph is rewritten with copies between devices, ordered, and
called in place of `forward`. `engine.GraphEngine` is the front door. It may
import `spill`, `transport` and what lies below the runtime, but no other room of it.
"""
