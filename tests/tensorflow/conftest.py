"""TensorFlow's tests run in a process of their own, with three logical CPUs."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import pytest

import tensorflow as tf

NUM_DEVICES = 3
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * NUM_DEVICES
)
tf.config.experimental.enable_op_determinism()  # else two unplaced runs differ, too


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    tf.keras.utils.set_random_seed(7)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keras hands its variables to NumPy 2 in the old way."""
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"))
