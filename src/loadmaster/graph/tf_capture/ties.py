"""Ties: ops that must share a device, or whose numbers change when they do not.

resources and variants   whoever touches a variable, table or tensor list is where it lives
colocation               `_class` of a node names another one
stateful ops             printing, random numbers with a state, calls of Python: together, in their own order
what oneDNN merges       Conv2D with BiasAdd, the filter's gradient with BiasAddGrad, Pad with Conv2D: merged
                         where they share a device, and rounded otherwise where they do not
constants                with their only reader
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

_HELD = (tf.resource, tf.variant)
_CONVOLUTIONS = (
    "Conv2D",
    "Conv3D",
    "DepthwiseConv2dNative",
    "_FusedConv2D",
    "_MklNativeFusedConv2D",
    "_FusedDepthwiseConv2dNative",
)
_FILTER_GRADIENTS = ("Conv2DBackpropFilter", "Conv3DBackpropFilterV2")
_STATELESS_ENOUGH = ("Placeholder", "VarHandleOp", "NoOp")


class _Sets:
    """Disjoint sets of names."""

    def __init__(self) -> None:
        self._above: dict[str, str] = {}

    def find(self, name: str) -> str:
        while self._above.setdefault(name, name) != name:
            self._above[name] = name = self._above[self._above[name]]
        return name

    def join(self, one: str, other: str) -> None:
        self._above[self.find(one)] = self.find(other)


def find_ties(ops: Sequence[Any], joined: Sequence[tuple[str, str]] = ()) -> dict[str, int]:
    """The group of each op that is not alone; `joined` are ties known from elsewhere."""
    sets, names = _Sets(), {op.name for op in ops}
    for one, other in joined:
        sets.join(one, other)
    stateful = ""
    for op in ops:
        for tensor in op.inputs:
            if tensor.dtype in _HELD:
                sets.join(op.name, tensor.op.name)
        for place in op.colocation_groups():
            other = place.decode().removeprefix("loc:@")
            if other in names:
                sets.join(op.name, other)
        for other in _merged_with(op):
            sets.join(op.name, other.name)
        if op.op_def.is_stateful and op.type not in _STATELESS_ENOUGH and not _touches_resource(op):
            sets.join(op.name, stateful or op.name)
            stateful = op.name
        if op.type == "Const":
            users = {user.name for tensor in op.outputs for user in tensor.consumers()}
            if len(users) == 1:
                sets.join(op.name, users.pop())
    members: dict[str, list[str]] = {}
    for op in ops:
        members.setdefault(sets.find(op.name), []).append(op.name)
    several = [group for group in members.values() if len(group) > 1]
    return {name: number for number, group in enumerate(several) for name in group}


def _touches_resource(op: Any) -> bool:
    return any(tensor.dtype in _HELD for tensor in (*op.inputs, *op.outputs))


def _merged_with(op: Any) -> list[Any]:
    if op.type == "BiasAdd" and op.inputs[0].op.type in _CONVOLUTIONS:
        return [op.inputs[0].op]
    if op.type in _FILTER_GRADIENTS:
        return [user for user in op.inputs[2].consumers() if user.type == "BiasAddGrad"]
    if op.type in _CONVOLUTIONS and op.inputs[0].op.type in ("Pad", "PadV2"):
        return [op.inputs[0].op]
    if (
        op.type in ("Mul", "Maximum") and len(op.inputs) == 2
    ):  # LeakyRelu, Sigmoid x Mul are merged by oneDNN too
        return [tensor.op for tensor in op.inputs if tensor.op.type == "Sigmoid"]
    return []
