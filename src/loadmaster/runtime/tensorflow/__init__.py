"""TensorFlow runtime: a plan on logical devices, in `model.fit` or the user's own loop. [tensorflow]

Front door: `place_request`, with the same functions as `runtime.place_request`. `devices` finds or makes
TensorFlow's devices, `variables` moves weights, `placed_step` is the step on its plan, `placed_model` the
Keras model around it, `watched_step` reads back where ops ran, `run_plan` is `lm.run`.
"""
