"""Variables: the user's own variables on the devices of their plan.

A variable of TensorFlow cannot move. A new one is made on the device, and the user's object takes its
handle: the model, the optimizer, checkpoints and SavedModels keep the objects they know. Functions that
were traced before hold the old handle, which is destroyed, so that they fail instead of training a copy
that nobody sees.
"""

from typing import Any

import tensorflow as tf


def move_variable(variable: Any, where: str) -> None:
    """Let a variable live on a device from now on."""
    wanted = tf.DeviceSpec.from_string(f"/job:localhost/replica:0/task:0/device:{where}").to_string()
    if variable.device == wanted:
        return
    made = copy_variable(variable, where)
    with tf.init_scope(), tf.device(where):
        old = variable.handle
        variable._handle = made.handle
        tf.raw_ops.DestroyResourceOp(resource=old, ignore_lookup_error=True)


def copy_variable(variable: Any, where: str) -> Any:
    """A new variable of the same value on a device."""
    with tf.init_scope(), tf.device(where):
        return tf.Variable(
            variable.read_value(), trainable=variable.trainable, dtype=variable.dtype, shape=variable.shape
        )
