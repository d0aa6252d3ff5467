"""Signatures of TensorFlow ops: what `cost` needs to time one on its own.

    tf.MatMul.default float32[8,16] float32[16,4] transpose_b=True
    tf.Sum.default float32[8,16] (0,) keep_dims=False

Whole numbers that are known (a shape, axes) are written as they are: the op could not run with others.
"""

from typing import Any

import tensorflow as tf
from loadmaster.graph.tf_capture.loops import is_control_flow
from loadmaster.graph.tf_capture.op_work import has_free_shape

_MOST_VALUES = 16
_LONGEST = 1900


def op_signature(op: Any) -> str:
    """The signature of an op; '' where it cannot run on its own."""
    if op.op_def.is_stateful or is_control_flow(op) or op.type.startswith("_"):
        return ""
    words = []
    for tensor in (*op.inputs, *op.outputs):
        if tensor.dtype in (tf.resource, tf.variant, tf.string) or has_free_shape(tensor):
            return ""
    for tensor in op.inputs:
        word = _value_word(tensor) if tensor.dtype in (tf.int32, tf.int64) else ""
        words.append(word or _tensor_word(tensor))
    for attr in op.op_def.attr:
        text = _attr_word(op, attr)
        if text is None:
            return ""
        if text:
            words.append(text)
    found = " ".join([f"tf.{op.type}.default", *words])
    return found if len(found) < _LONGEST else ""


def input_signature(tensor: Any) -> str:
    """What an argument is."""
    return f"tf.input.default {_tensor_word(tensor)}"


def _tensor_word(tensor: Any) -> str:
    return f"{tensor.dtype.name}[{','.join(map(str, tensor.shape.as_list()))}]"


def _value_word(tensor: Any) -> str:
    value = tf.get_static_value(tensor)
    if value is None or value.size > _MOST_VALUES:
        return ""
    numbers = ",".join(str(int(number)) for number in value.ravel().tolist())
    kind = tensor.dtype.name
    return f"({kind},{len(value.shape)}{',' * bool(numbers)}{numbers})"


def _attr_word(op: Any, attr: Any) -> str | None:
    """'' for what the inputs say already, None for what cannot be written."""
    if attr.type in ("type", "list(type)"):
        if attr.name in ("DstT", "dtype", "out_type", "output_type", "T"):
            kind = op.get_attr(attr.name)
            return f"{attr.name}={kind.name}" if hasattr(kind, "name") and attr.name != "T" else ""
        return ""
    if attr.name in ("N", "num") and attr.type == "int" and attr.name not in _ints_needed(op):
        return ""
    value = op.get_attr(attr.name)
    if isinstance(value, bytes):
        text = value.decode(errors="replace")
        return f"{attr.name}={text}" if text.replace("_", "").isalnum() else None if text else ""
    if isinstance(value, bool | int | float):
        return f"{attr.name}={value}"
    if isinstance(value, list) and all(isinstance(part, int) for part in value):
        return f"{attr.name}=({','.join(map(str, value))})" if value else ""
    return None


def _ints_needed(op: Any) -> tuple[str, ...]:
    return ("num",) if op.type == "Unpack" else ()
