"""The ways a training step is run so that `record` can watch it: `request` checks what `capture` was asked
and tries export, trace and estimate in turn; `training_step` runs weights, forward, loss, backward and
updates by one of them. The others say what is refused, which sizes a graph holds for, and what an
optimizer's update needs. Start with `request`. It stands on `record`.
"""
