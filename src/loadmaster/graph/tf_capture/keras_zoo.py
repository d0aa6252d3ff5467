"""Keras zoo: models of `keras.applications` by name, and small ones, with example inputs."""

from collections.abc import Callable
from typing import Any

import numpy as np

import tensorflow as tf
from loadmaster.core.errors import InputError, UnknownNameError
from loadmaster.core.raised import shorten_error

DEFAULT_BATCH = 8
_SEQ = 32
_TOKENS = 1000
_CLASSES = 10
_OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: tf.keras.optimizers.SGD(1e-2),
    "momentum": lambda: tf.keras.optimizers.SGD(1e-2, momentum=0.9),
    "adam": lambda: tf.keras.optimizers.Adam(1e-3),
    "adamw": lambda: tf.keras.optimizers.AdamW(1e-3),
    "adafactor": lambda: tf.keras.optimizers.Adafactor(1e-3),
}


def keras_example(name: str, *, batch: int | None, optimizer: str | None) -> tuple[Any, tuple[Any, Any]]:
    """A compiled model and a batch (x, y) for it."""
    chosen = optimizer or "adamw"
    if chosen.lower() not in _OPTIMIZERS:
        raise UnknownNameError("optimizer", chosen, _OPTIMIZERS)
    size = batch or DEFAULT_BATCH
    if name in _SMALL:
        model, x = _SMALL[name](size)
    else:
        model, x = _application(name, size)
    classes = int(model.output_shape[-1])
    y = np.arange(size, dtype=np.int32) % classes
    logits = name in _SMALL
    model.compile(
        optimizer=_OPTIMIZERS[chosen.lower()](),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=logits),
        jit_compile=False,
    )
    return model, (x, y)


def _application(name: str, batch: int) -> tuple[Any, Any]:
    known = {
        entry: build
        for entry, build in vars(tf.keras.applications).items()
        if callable(build) and entry[:1].isupper()
    }
    build = known.get(name) or {entry.lower(): found for entry, found in known.items()}.get(name.lower())
    if build is None:
        raise UnknownNameError("Keras model", name, [*_SMALL, *known])
    try:
        model = build(weights=None)
    except Exception as problem:
        raise InputError(f"keras:{name} cannot be built: {shorten_error(problem)}") from problem
    shape = [1 if size is None else size for size in model.input_shape[1:]]
    return model, _draw(batch, *shape)


def _draw(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def _tokens(batch: int) -> Any:
    return np.random.default_rng(0).integers(0, _TOKENS, (batch, _SEQ), dtype=np.int32)


def _mlp(batch: int) -> tuple[Any, Any]:
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [
            tf.keras.Input((256,)),
            layers.Dense(512, activation="relu"),
            layers.Dense(512, activation="relu"),
            layers.Dense(_CLASSES),
        ],
        name="mlp",
    )
    return model, _draw(batch, 256)


def _lstm(batch: int) -> tuple[Any, Any]:
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [
            tf.keras.Input((_SEQ,), dtype="int32"),
            layers.Embedding(_TOKENS, 64),
            layers.LSTM(128),
            layers.Dense(_CLASSES),
        ],
        name="lstm",
    )
    return model, _tokens(batch)


def _transformer(batch: int) -> tuple[Any, Any]:
    layers = tf.keras.layers
    given = tf.keras.Input((_SEQ,), dtype="int32")
    x = layers.Embedding(_TOKENS, 64)(given)
    for _ in range(2):
        normal = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, 16)(normal, normal)])
        hidden = layers.Dense(256, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(64)(hidden)])
    out = layers.Dense(_CLASSES)(layers.GlobalAveragePooling1D()(x))
    return tf.keras.Model(given, out, name="transformer"), _tokens(batch)


_SMALL: dict[str, Callable[[int], tuple[Any, Any]]] = {
    "mlp": _mlp,
    "lstm": _lstm,
    "transformer": _transformer,
}
