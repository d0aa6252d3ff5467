"""Framework: which framework a model belongs to, found without importing any framework."""

import sys
from typing import Any

_TENSORFLOW = ("tensorflow", "keras")
_PLACED = "loadmaster.runtime.tensorflow."  # what was placed already is told so in TensorFlow's own room


def is_tensorflow_model(model: Any) -> bool:
    """Whether it is a Keras model on TensorFlow, a `tf.function`, or a function that names a step for it."""
    if "tensorflow" not in sys.modules:
        return False
    own = model if isinstance(model, type) else type(model)
    if own.__module__.startswith(_PLACED):
        return True
    kinds = {kind.__module__.partition(".")[0] for kind in own.__mro__}
    if "torch" in kinds:
        return False
    return not kinds.isdisjoint(_TENSORFLOW) or _is_plain_function(model)


def _is_plain_function(model: Any) -> bool:
    """A function whose module uses TensorFlow."""
    names = getattr(model, "__globals__", {})
    used = {getattr(value, "__name__", "") for value in names.values() if type(value).__name__ == "module"}
    return (
        callable(model)
        and not isinstance(model, type)
        and any(name.partition(".")[0] in _TENSORFLOW for name in used)
    )
