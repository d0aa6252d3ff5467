"""Small models with a batch each, and ways to train them unplaced and placed."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

import loadmaster as lm
import tensorflow as tf
from loadmaster.core.graph import Graph, units
from loadmaster.graph.tf_capture.request import CapturedStep, capture_step
from loadmaster.graph.tf_capture.steps import make_step
from loadmaster.runtime.tensorflow.place_request import place_captured
from loadmaster.runtime.tensorflow.placed_model import PlacedFunction

DEVICES = "cpu#0-1GB, cpu#1-1GB, cpu#2-1GB"
NUM_STEPS = 5
layers = tf.keras.layers


def _labels(rng: Any, batch: int) -> Any:
    return rng.integers(0, 10, batch).astype(np.int32)


def mlp() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    model = tf.keras.Sequential(
        [
            tf.keras.Input((24,)),
            layers.Dense(32, activation="gelu"),
            layers.Dense(32, activation="relu"),
            layers.Dense(10),
        ]
    )
    return model, (rng.standard_normal((16, 24)).astype(np.float32), _labels(rng, 16))


def resnet() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    given = tf.keras.Input((8, 8, 3))
    x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(8, 3, padding="same")(given)))
    y = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(8, 3, padding="same", use_bias=False)(x)))
    y = layers.BatchNormalization()(layers.Conv2D(8, 3, padding="same", activation="relu")(y))
    x = layers.GlobalAveragePooling2D()(layers.ReLU()(layers.Add()([x, y])))
    model = tf.keras.Model(given, layers.Dense(10)(x))
    return model, (rng.standard_normal((8, 8, 8, 3)).astype(np.float32), _labels(rng, 8))


def lstm() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    model = tf.keras.Sequential(
        [tf.keras.Input((6,), dtype="int32"), layers.Embedding(20, 8), layers.LSTM(12), layers.Dense(10)]
    )
    return model, (rng.integers(0, 20, (8, 6)).astype(np.int32), _labels(rng, 8))


def transformer() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    given = tf.keras.Input((6,), dtype="int32")
    x = layers.Embedding(20, 16)(given)
    normal = layers.LayerNormalization()(x)
    x = layers.Add()([x, layers.MultiHeadAttention(2, 8, dropout=0.1)(normal, normal)])
    hidden = layers.Dropout(0.1)(layers.Dense(32, activation="gelu")(layers.LayerNormalization()(x)))
    x = layers.Add()([x, layers.Dense(16)(hidden)])
    model = tf.keras.Model(given, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))
    return model, (rng.integers(0, 20, (8, 6)).astype(np.int32), _labels(rng, 8))


MODELS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "mlp": mlp,
    "resnet": resnet,
    "lstm": lstm,
    "transformer": transformer,
}
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: tf.keras.optimizers.SGD(0.1),
    "adam": lambda: tf.keras.optimizers.Adam(0.01),
}


def build(model: str, optimizer: str = "sgd") -> tuple[Any, Any]:
    """A compiled model with the weights of one seed, and its batch."""
    tf.keras.utils.set_random_seed(7)
    made, batch = MODELS[model]()
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(optimizer=OPTIMIZERS[optimizer](), loss=loss, jit_compile=False)
    return made, batch


def train_unplaced(model: Any, batch: Any, steps: int = NUM_STEPS) -> list[bytes]:
    """The loss of each step, as TensorFlow runs it."""
    step = tf.function(lambda x, y: model.train_step((x, y)))
    return [step(*map(tf.constant, batch))["loss"].numpy().tobytes() for _ in range(steps)]


def train_placed(placed: Any, batch: Any, steps: int = NUM_STEPS) -> list[bytes]:
    return [placed.train_on(*batch)["loss"].numpy().tobytes() for _ in range(steps)]


def weights_of(model: Any) -> list[bytes]:
    return [value.numpy().tobytes() for value in (*model.variables, *model.optimizer.variables)]


def random_devices(graph: Graph, seed: int, num_devices: int) -> Any:
    """A device for each unit; every device is used."""
    rng = np.random.default_rng(seed)
    unit, number = units(graph)
    chosen = rng.integers(0, num_devices, number)
    chosen[rng.permutation(number)[:num_devices]] = np.arange(num_devices)
    return chosen.astype(np.int32)[unit]


def place_randomly(captured: CapturedStep, seed: int, devices: str = DEVICES) -> Any:
    """A captured step on a random plan."""
    made: PlacedFunction = place_captured(captured, random_plan(captured.graph, seed, devices))
    return made


def random_plan(graph: Graph, seed: int, devices: str = DEVICES) -> Any:
    """A Placement that has a random device for each unit."""
    problem = lm.problem(graph, devices)
    first = lm.plan(problem, algorithm="single_device", budget="1x").plan
    assert first is not None
    device = random_devices(graph, seed, problem.cluster.num_devices)
    return lm.plan(problem, algorithm=dataclasses.replace(first, device=device))


def capture(model: Any, batch: Any) -> CapturedStep:
    return capture_step(make_step(model, batch))
