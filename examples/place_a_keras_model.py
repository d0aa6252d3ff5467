"""A Keras model trains on two logical CPUs by a plan; its losses are those of the unplaced model."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

import loadmaster as lm
import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)


def build() -> tf.keras.Model:
    tf.keras.utils.set_random_seed(0)
    layers = [
        tf.keras.Input((64,)),
        *(tf.keras.layers.Dense(64, "relu") for _ in range(3)),
        tf.keras.layers.Dense(1),
    ]
    model = tf.keras.Sequential(layers)
    model.compile(optimizer="adam", loss="mse", jit_compile=False)
    return model


rng = np.random.default_rng(0)
x, y = rng.standard_normal((64, 64), np.float32), rng.standard_normal((64, 1), np.float32)
unplaced = build().fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history["loss"]

# Neither device alone has room for weights and optimizer state, so the plan must use both.
placed = lm.place(
    build(), (x[:16], y[:16]), devices="cpu#0-190kB, cpu#1-190kB", budget="50x", costs="roofline"
)
losses = placed.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history["loss"]
print(placed.explain())
print(f"same losses as the unplaced model: {losses == unplaced}")
