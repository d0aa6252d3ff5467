"""Weights: the variables of a step, and which of them are an optimizer's slots beside a weight.

A weight is read by the forward pass and changed by the update. What only the update reads and changes, for
one weight and with its shape, is that weight's slot (a momentum): it lives beside it, as resident bytes of
one op. What several weights share (a learning rate, a step count) is an op of its own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from loadmaster.core.graph import Phase
from loadmaster.graph.tf_capture.phases import inputs_of

READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp")


def writes_variable(op: Any) -> bool:
    """Whether an op changes a variable."""
    handles = [tensor for tensor in op.inputs if tensor.dtype == tf.resource]
    return bool(handles) and op.op_def.is_stateful and op.type not in READS


def find_slots(ops: Sequence[Any], handles: Mapping[str, Any], phases: Mapping[str, Phase]) -> dict[str, str]:
    """The weight of each slot, by the nodes of their handles."""
    touched: dict[str, list[Any]] = {name: [] for name in handles}
    for op in ops:
        for tensor in op.inputs:
            if tensor.dtype == tf.resource and tensor.op.name in touched:
                touched[tensor.op.name].append(op)
    in_update = {
        name
        for name, users in touched.items()
        if users and all(phases[op.name] == Phase.UPDATE for op in users)
    }
    trained = {
        name
        for name, users in touched.items()
        if name not in in_update
        and any(phases[op.name] == Phase.UPDATE and writes_variable(op) for op in users)
    }
    reach = _slots_behind(ops, in_update, phases)
    owners: dict[str, set[str]] = {name: set() for name in in_update}
    for weight in trained:
        for op in touched[weight]:
            if phases[op.name] == Phase.UPDATE and writes_variable(op):
                for slot in reach[op.name]:
                    owners[slot].add(weight)
    found = {}
    for slot, weights in owners.items():
        alike = [weight for weight in weights if handles[weight] == handles[slot]]
        if len(weights) == 1 and alike and _is_changed(touched[slot]):
            found[slot] = alike[0]
    return found


def _is_changed(users: Sequence[Any]) -> bool:
    return any(writes_variable(op) for op in users)


def _slots_behind(
    ops: Sequence[Any], slots: set[str], phases: Mapping[str, Phase]
) -> dict[str, frozenset[str]]:
    """Which slots the inputs of each op of the update come from."""
    reach: dict[str, frozenset[str]] = {}
    writes = {op.name: writes_variable(op) for op in ops}
    for op in ops:
        found: frozenset[str] = frozenset()
        if phases[op.name] == Phase.UPDATE:
            for one in inputs_of(op, writes):
                name = one.name
                found |= frozenset({name}) if name in slots else reach.get(name, frozenset())
        reach[op.name] = found
    return reach
