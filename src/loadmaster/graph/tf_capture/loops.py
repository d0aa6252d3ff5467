"""Loops and branches: one op each, with the work of what they run.

A loop's work is that of its body times its turns, where the number of turns is known (the length of a
sequence); lists of tensors that it fills, one element each turn, are its activations and have their bytes.
"""

from dataclasses import dataclass
from typing import Any

from tensorflow.python.framework import function_def_to_graph

import tensorflow as tf
from loadmaster.graph.tf_capture.op_work import elements, op_bytes, op_flops, tensor_bytes

LOOPS = ("While", "StatelessWhile")
BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")


@dataclass(frozen=True, slots=True)
class LoopWork:
    """What a loop or a branch does in a step."""

    flops: float
    bytes_moved: int
    output_bytes: tuple[int, ...]
    turns: int | None  # None: not known, counted once; of a branch 1


def is_control_flow(op: Any) -> bool:
    """Whether it runs functions of its own."""
    return op.type in LOOPS or op.type in BRANCHES


def loop_work(op: Any, library: dict[str, Any], lists: dict[str, int]) -> LoopWork:
    """The work of a loop or branch; `lists` has the bytes of tensor lists by their tensors' names."""
    if op.type in BRANCHES:
        return _branch_work(op, library)
    turns = _find_turns(op)
    body = _open_function(op.get_attr("body").name, library, [tensor.shape for tensor in op.inputs])
    flops, moved = _work_of(body, library)
    sizes = [_output_bytes(tensor, lists) for tensor in op.outputs]
    pushed = _pushed_bytes(body)
    for at, tensor in enumerate(op.outputs):
        if tensor.dtype == tf.variant:
            given = lists.get(op.inputs[at].name, 0)
            sizes[at] = max(given, pushed.get(at, 0) * (turns or 1))
    return LoopWork(flops * (turns or 1), moved * (turns or 1), tuple(sizes), turns)


def list_bytes(op: Any) -> int:
    """The bytes of the tensor list that an op gives."""
    if op.type == "TensorListFromTensor":
        return tensor_bytes(op.inputs[0])
    if op.type == "TensorListReserve":
        shape, number = tf.get_static_value(op.inputs[0]), tf.get_static_value(op.inputs[1])
        if shape is None or number is None or not getattr(shape, "shape", ()) or (shape < 0).any():
            return 0
        return int(shape.prod()) * int(number) * int(op.get_attr("element_dtype").size)
    return 0


def _branch_work(op: Any, library: dict[str, Any]) -> LoopWork:
    """The dearer branch."""
    names = (
        [op.get_attr(name).name for name in ("then_branch", "else_branch")]
        if "If" in op.type
        else [branch.name for branch in op.get_attr("branches")]
    )
    shapes = [tensor.shape for tensor in op.inputs[1:]]
    works = [_work_of(_open_function(name, library, shapes), library) for name in names]
    flops, moved = max(works)
    return LoopWork(flops, moved, tuple(map(tensor_bytes, op.outputs)), 1)


def _output_bytes(tensor: Any, lists: dict[str, int]) -> int:
    return lists.get(tensor.name, tensor_bytes(tensor))


def _find_turns(op: Any) -> int | None:
    """The length of the lists that a loop reads or fills, or a constant bound."""
    lengths = []
    for tensor in op.inputs:
        maker = tensor.op
        if maker.type == "TensorListFromTensor" and maker.inputs[0].shape.rank:
            lengths.append(maker.inputs[0].shape[0])
        elif maker.type == "TensorListReserve":
            number = tf.get_static_value(maker.inputs[1])
            lengths.append(None if number is None else int(number))
        elif maker.type in LOOPS and tensor.dtype == tf.variant:
            lengths.append(_find_turns(maker))
    known = [int(length) for length in lengths if length is not None and int(length) > 0]
    if known:
        return max(known)
    bounds = [
        tf.get_static_value(tensor)
        for tensor in op.inputs
        if tensor.dtype == tf.int32 and tensor.shape.rank == 0
    ]
    counts = [int(value) for value in bounds if value is not None and int(value) > 0]
    return max(counts) if counts else None


def _open_function(name: str, library: dict[str, Any], shapes: list[Any]) -> Any:
    return function_def_to_graph.function_def_to_graph(library[name], input_shapes=shapes)


def _work_of(graph: Any, library: dict[str, Any]) -> tuple[float, int]:
    flops, moved = 0.0, 0
    for op in graph.get_operations():
        if is_control_flow(op):
            inner = loop_work(op, library, {})
            flops, moved = flops + inner.flops, moved + inner.bytes_moved
        else:
            flops, moved = flops + op_flops(op), moved + op_bytes(op)
    return flops, moved


def _pushed_bytes(body: Any) -> dict[int, int]:
    """Bytes added to each list in a turn, by the loop's variable."""
    found = {}
    for at, tensor in enumerate(body.outputs):
        maker = tensor.op
        while maker.type == "Identity":
            maker = maker.inputs[0].op
        if maker.type in ("TensorListPushBack", "TensorListSetItem"):
            element = maker.inputs[1 if maker.type == "TensorListPushBack" else 2]
            found[at] = elements(element) * int(element.dtype.size or 0)
    return found
