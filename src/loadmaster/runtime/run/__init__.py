"""Runs a saved plan and sets what was measured beside the prediction: `launch.run_plan` is the front door,
the top of the runtime. It may import every other room of the runtime, and nothing above it.
"""
