"""Weights that stay in host memory and are copied to a device just before they are read, with their gradients
on the way back. `weight_loads.Spill` is the front door. It may import `transport` and what lies below the
runtime.
"""
