"""A plan on real devices, in the user's own training loop, with the same numbers as before.
`place_request.place_model` is the front door (`lm.place`), and `run.launch.run_plan` runs a saved plan. It
may import the simulator and what lies below it; it knows no placer. Needs the extra `[torch]`.
"""
