"""Steps: what one step of a TensorFlow source is: a function of tensors, with example inputs.

Keras model, compiled, with (x, y)      model.train_step((x, y)), also one of the user's own
Keras model with x                      model(x, training=False)
tf.function or plain function           called as it is
SavedModel folder                       its signature 'serving_default', or the only one it has
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import tensorflow as tf
from loadmaster.core.errors import InputError
from loadmaster.core.raised import shorten_error

SERVING = "serving_default"
ORIGINAL = "_loadmaster_original"  # of a Keras model's train_step that was replaced by a placed one


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A step that can be traced."""

    function: Callable[..., Any]
    args: tuple[Any, ...]  # nests of tensors, arrays or tf.TensorSpec
    name: str
    model: Any = None  # the Keras model, where there is one
    autograph: bool = True
    trains: bool = False  # a Keras training step


def make_step(model: Any, args: Any) -> Step:
    """The step of a model or function on example inputs."""
    if is_keras_model(model):
        return _keras_step(model, args)
    refuse_xla(model)
    given = args if isinstance(args, tuple) else (args,)
    name = str(getattr(model, "__name__", None) or getattr(model, "name", None) or type(model).__name__)
    if isinstance(model, tf.types.experimental.PolymorphicFunction):
        autograph = bool(getattr(model, "_autograph", True))
        return Step(model.python_function, _check_inputs(given), name, autograph=autograph)
    if not callable(model):
        raise InputError(f"a {type(model).__name__} is not a model; give a Keras model or a tf.function")
    return Step(model, _check_inputs(given), name)


def is_keras_model(model: Any) -> bool:
    """Whether it is a Keras 3 model."""
    return isinstance(model, tf.keras.Model)


def refuse_xla(model: Any) -> None:
    """Refuse what XLA compiles as a whole: its ops have no devices of their own."""
    compiled = getattr(model, "jit_compile", False) if is_keras_model(model) else _is_jit(model)
    if compiled is True:
        name = getattr(model, "name", None) or type(model).__name__
        raise InputError(
            f"{name!r} is compiled by XLA as one piece (jit_compile=True), so its ops cannot be placed one by"
            " one; use jit_compile=False (model.compile(..., jit_compile=False); where there is a GPU, Keras"
            " chooses XLA by default)"
        )


def _is_jit(function: Any) -> bool:
    return bool(getattr(function, "_jit_compile", False))


def _keras_step(model: Any, args: Any) -> Step:
    refuse_xla(model)
    if (
        tf.distribute.has_strategy()
        or type(model.distribute_strategy).__name__ != "_DefaultDistributionStrategy"
    ):
        raise InputError(
            "the model was made under a tf.distribute strategy, which has devices of its own; make it outside"
            " of strategy.scope()"
        )
    name = str(model.name)
    if isinstance(args, tuple) and len(args) == 1 and not model.compiled:
        args = args[0]
    if model.compiled and isinstance(args, tuple) and len(args) >= 2:
        original = getattr(model.train_step, ORIGINAL, model.train_step)
        data = _check_inputs(args)
        return Step(lambda data: original(data), (data,), name, model, autograph=False, trains=True)
    if isinstance(args, tuple) and len(args) >= 2:
        raise InputError(
            f"model {name!r} has no optimizer and loss yet: call model.compile(optimizer, loss) to plan a"
            " training step of (x, y), or give the inputs alone (several as a list or dict) for inference"
        )
    if args is None or (isinstance(args, tuple) and not args):
        raise InputError(f"model {name!r} needs example inputs: give (x, y), or x alone for inference")
    args = args[0] if isinstance(args, tuple) else args
    return Step(lambda x: model(x, training=False), (_check_inputs(args),), name, model, autograph=False)


def _check_inputs(args: Any) -> Any:
    """Dense tensors of known dtypes only."""
    return tf.nest.map_structure(_check_input, args)


def _check_input(value: Any) -> Any:
    if isinstance(value, tf.RaggedTensor | tf.SparseTensor | tf.RaggedTensorSpec | tf.SparseTensorSpec):
        kind = "ragged" if "Ragged" in type(value).__name__ else "sparse"
        remedy = "x.to_tensor()" if kind == "ragged" else "tf.sparse.to_dense(x)"
        raise InputError(f"an input is a {kind} tensor, whose size is not known; give a dense one: {remedy}")
    if isinstance(value, tf.TensorSpec) and not value.shape.is_fully_defined():
        raise InputError(
            f"an input is {tf.as_dtype(value.dtype).name}{value.shape}, whose size is not known; give all"
        )
    if isinstance(value, tf.TensorSpec) or tf.is_tensor(value) or value is None:
        return value
    if isinstance(value, tf.data.Dataset):
        raise InputError("an input is a dataset; give one batch of it: next(iter(dataset))")
    array = np.asarray(value)
    if array.dtype == object:
        raise InputError(f"an input is a {type(value).__name__}, not a tensor; give arrays or tensors")
    if isinstance(value, float) or (isinstance(value, list) and array.dtype == np.float64):
        array = array.astype(np.float32)  # as tf.constant has it
    return array


def specs_of(args: Any) -> Any:
    """The same nest with a TensorSpec for each tensor."""

    def spec(value: Any) -> Any:
        if isinstance(value, tf.TensorSpec) or value is None:
            return value
        tensor = value if tf.is_tensor(value) else np.asarray(value)
        return tf.TensorSpec(tensor.shape, tensor.dtype)

    return tf.nest.map_structure(spec, args)


def load_saved_model(folder: str, batch: int | None) -> tuple[Any, tuple[Any, ...], str]:
    """The function of a SavedModel's signature, specs of its inputs, and a name."""
    try:
        loaded = tf.saved_model.load(folder)
    except Exception as problem:  # a folder from elsewhere
        raise InputError(f"{folder} is not a SavedModel that can be read: {shorten_error(problem)}") from None
    signatures: Mapping[str, Any] = loaded.signatures
    if not signatures:
        raise InputError(f"{folder} has no signature; export it with one, e.g. model.export(folder)")
    chosen = signatures.get(SERVING)
    if chosen is None:
        if len(signatures) > 1:
            raise InputError(f"{folder} has signatures {', '.join(signatures)} and none is called {SERVING}")
        chosen = next(iter(signatures.values()))
    specs = dict(chosen.structured_input_signature[1])

    def serve(inputs: Mapping[str, Any]) -> Any:
        return chosen(**inputs)

    serve.loaded = loaded  # type: ignore[attr-defined]  # keeps its variables
    title = Path(folder).resolve().name
    serve.__name__ = title
    return serve, ({name: fill_batch(spec, batch) for name, spec in specs.items()},), title


def fill_batch(spec: Any, batch: int | None) -> Any:
    """A spec whose free axes are a batch (the first) and 1 (others)."""
    free = [
        size if size is not None else (batch or 8) if axis == 0 else 1 for axis, size in enumerate(spec.shape)
    ]
    return tf.TensorSpec(free, spec.dtype, spec.name)
