"""The arithmetic on sizes that exporters leave in ONNX files, worked out so that shapes become known.

onnx's own inference follows such arithmetic only part of the way. Here the small tensors that ops make of
sizes are computed, by the standard's rules; whatever is large, odd or not understood stays unknown.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
MOST_ELEMENTS = 1024
_TROUBLE = (ArithmeticError, IndexError, KeyError, MemoryError, TypeError, ValueError, AttributeError)


def evaluate_sizes(
    onnx: Any, nodes: Sequence[Any], shapes: Mapping[str, Any], known: Mapping[str, Array]
) -> dict[str, Array]:
    """What more is known, by name: `shapes` are the fixed shapes, `known` the values so far."""
    found: dict[str, Array] = {}
    for node in nodes:
        if len(node.output) != 1 or node.output[0] in known or node.domain not in ("", "ai.onnx"):
            continue
        value = _evaluate_node(
            onnx, node, shapes, {**_select_inputs(node, known), **_select_inputs(node, found)}
        )
        if value is not None and value.size <= MOST_ELEMENTS and value.dtype.kind in "biuf":
            found[node.output[0]] = value
    return found


def _select_inputs(node: Any, values: Mapping[str, Array]) -> dict[str, Array]:
    return {name: values[name] for name in node.input if name in values}


def _evaluate_node(
    onnx: Any, node: Any, shapes: Mapping[str, Any], values: Mapping[str, Array]
) -> Array | None:
    """What a node makes, or None."""
    if node.op_type not in _KNOWN:
        return None
    try:
        attributes = {entry.name: onnx.helper.get_attribute_value(entry) for entry in node.attribute}
        if node.op_type in ("Shape", "Size"):
            shape = shapes.get(node.input[0])
            return None if shape is None else _eval_shape(node.op_type, shape, attributes)
        if node.op_type == "Constant":
            return _eval_constant(onnx, attributes)
        if any(name and name not in values for name in node.input):
            return None
        given = [values[name] if name else None for name in node.input]
        with np.errstate(all="ignore"):
            return _RULES[node.op_type](given, {**attributes, "onnx": onnx})
    except _TROUBLE:
        return None


def _eval_shape(kind: str, shape: Sequence[int], attributes: Mapping[str, Any]) -> Array:
    if kind == "Size":
        return np.array(math.prod(shape), dtype=np.int64)
    return np.array(shape[attributes.get("start", 0) : attributes.get("end")], dtype=np.int64)


def _eval_constant(onnx: Any, attributes: Mapping[str, Any]) -> Array | None:
    if "value" in attributes:
        tensor = attributes["value"]
        small = math.prod(tensor.dims) <= MOST_ELEMENTS and tensor.data_location != onnx.TensorProto.EXTERNAL
        return np.asarray(onnx.numpy_helper.to_array(tensor)) if small else None
    for name, kind in (("value_int", np.int64), ("value_ints", np.int64), ("value_float", np.float32)):
        if name in attributes:
            return np.array(attributes[name], dtype=kind)
    return None


def _axes_of(given: Sequence[Any], attributes: Mapping[str, Any]) -> Sequence[int] | None:
    """Axes as an input (newer opsets) or an attribute."""
    if len(given) > 1 and given[1] is not None:
        return [int(axis) for axis in given[1].reshape(-1)]
    return attributes.get("axes")


def _eval_unsqueeze(given: Sequence[Any], attributes: Mapping[str, Any]) -> Array:
    axes = _axes_of(given, attributes) or []
    return np.asarray(np.expand_dims(given[0], tuple(axes)))


def _eval_squeeze(given: Sequence[Any], attributes: Mapping[str, Any]) -> Array:
    axes = _axes_of(given, attributes)
    return np.asarray(np.squeeze(given[0], None if axes is None else tuple(axes)))


def _eval_slice(given: Sequence[Any], attributes: Mapping[str, Any]) -> Array:
    starts = given[1] if len(given) > 1 else np.array(attributes["starts"])
    ends = given[2] if len(given) > 2 else np.array(attributes["ends"])
    axes = given[3] if len(given) > 3 and given[3] is not None else attributes.get("axes", range(len(starts)))
    steps = given[4] if len(given) > 4 and given[4] is not None else [1] * len(starts)
    cut = [slice(None)] * given[0].ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if step < 1:
            raise ValueError("backwards")
        cut[int(axis)] = slice(int(start), int(end), int(step))
    return np.asarray(given[0][tuple(cut)])


def _eval_cast(given: Sequence[Any], attributes: Mapping[str, Any]) -> Array:
    kind = attributes["onnx"].helper.tensor_dtype_to_np_dtype(attributes["to"])
    return np.asarray(given[0].astype(kind))


def _eval_constant_of_shape(given: Sequence[Any], attributes: Mapping[str, Any]) -> Array | None:
    shape = tuple(int(length) for length in given[0])
    if math.prod(shape) > MOST_ELEMENTS:
        return None
    tensor = attributes.get("value")
    one = np.zeros(1, np.float32) if tensor is None else attributes["onnx"].numpy_helper.to_array(tensor)
    return np.full(shape, one.reshape(-1)[0])


def _eval_expand(given: Sequence[Any], _: Mapping[str, Any]) -> Array | None:
    shape = np.broadcast_shapes(given[0].shape, tuple(int(length) for length in given[1]))
    return np.broadcast_to(given[0], shape).copy() if math.prod(shape) <= MOST_ELEMENTS else None


def _eval_reshape(given: Sequence[Any], attributes: Mapping[str, Any]) -> Array:
    shape = [int(length) for length in given[1]]
    if not attributes.get("allowzero"):
        shape = [given[0].shape[at] if length == 0 else length for at, length in enumerate(shape)]
    return np.asarray(given[0].reshape(shape))


def _eval_range(given: Sequence[Any], _: Mapping[str, Any]) -> Array | None:
    start, limit, step = (part.reshape(-1)[0].item() for part in given)
    if step == 0 or abs((limit - start) / step) > MOST_ELEMENTS:
        return None
    return np.arange(start, limit, step, dtype=given[0].dtype)


def _eval_div(given: Sequence[Any], _: Mapping[str, Any]) -> Array:
    """Integers are cut off towards zero."""
    a, b = given
    if a.dtype.kind == "f":
        return np.asarray(a / b)
    return np.asarray(np.sign(a) * np.sign(b) * (abs(a) // abs(b))).astype(a.dtype)


def _eval_reduce_prod(given: Sequence[Any], attributes: Mapping[str, Any]) -> Array:
    axes = _axes_of(given, attributes)
    keep = bool(attributes.get("keepdims", 1))
    return np.asarray(np.prod(given[0], axis=None if axes is None else tuple(axes), keepdims=keep))


def _eval_concat(given: Sequence[Any], attributes: Mapping[str, Any]) -> Array:
    return np.concatenate(given, axis=attributes["axis"])


def _wrap_numpy_function(function: Any) -> Callable[[Sequence[Any], Mapping[str, Any]], Array]:
    return lambda given, _: np.asarray(function(*given))


_RULES: dict[str, Callable[[Sequence[Any], Mapping[str, Any]], Array | None]] = {
    "Identity": lambda given, _: np.asarray(given[0]),
    "Gather": lambda given, a: np.asarray(np.take(given[0], given[1], axis=a.get("axis", 0))),
    "Concat": _eval_concat,
    "Unsqueeze": _eval_unsqueeze,
    "Squeeze": _eval_squeeze,
    "Slice": _eval_slice,
    "Cast": _eval_cast,
    "ConstantOfShape": _eval_constant_of_shape,
    "Expand": _eval_expand,
    "Reshape": _eval_reshape,
    "Range": _eval_range,
    "Div": _eval_div,
    "ReduceProd": _eval_reduce_prod,
    **{
        name: _wrap_numpy_function(function)
        for name, function in {
            "Add": np.add,
            "Sub": np.subtract,
            "Mul": np.multiply,
            "Neg": np.negative,
            "Abs": np.abs,
            "Min": np.minimum,
            "Max": np.maximum,
            "Mod": np.mod,
            "Floor": np.floor,
            "Ceil": np.ceil,
            "Sqrt": np.sqrt,
            "Equal": np.equal,
            "Less": np.less,
            "Greater": np.greater,
            "LessOrEqual": np.less_equal,
            "GreaterOrEqual": np.greater_equal,
            "And": np.logical_and,
            "Or": np.logical_or,
            "Not": np.logical_not,
            "Where": np.where,
        }.items()
    },
}
_KNOWN = {"Shape", "Size", "Constant", *_RULES}
