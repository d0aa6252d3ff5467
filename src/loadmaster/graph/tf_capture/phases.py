"""Phases: which ops of a step are forward, backward and update, and which forward op a backward op mirrors.

backward   the tape names what it makes 'gradient_tape/...' (tf.gradients: 'gradients/...')
update     writes to a variable what depends on a gradient; and all that only such ops need
forward    the rest
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from loadmaster.core.graph import Phase

GRADIENTS = frozenset({"gradient_tape", "gradients"})


def find_phases(ops: Sequence[Any], writes: Mapping[str, bool]) -> dict[str, Phase]:
    """The phase of each op of a graph in topological order; `writes`: whether it changes a variable."""
    backward = {op.name for op in ops if is_gradient(op.name)}
    after: set[str] = set()  # depends on a gradient, and is none itself
    varies: set[str] = set()  # is no constant, nor computed from constants alone
    carries: set[str] = set()  # has a gradient: the tape's sizes and axes may be the forward pass's as well
    for op in ops:
        before = {one.name for one in inputs_of(op, writes)}
        if (not op.inputs and op.type != "Const") or before & varies:
            varies.add(op.name)
        if op.name in backward and op.name in varies and any(map(_is_float, op.outputs)):
            carries.add(op.name)
        if op.name not in backward and (before & carries or before & after):
            after.add(op.name)
    updates = _find_updates(ops, writes, after)
    phases: dict[str, Phase] = {}
    users: dict[str, list[str]] = {}
    for op in ops:
        for one in inputs_of(op, writes):
            users.setdefault(one.name, []).append(op.name)
    for op in reversed(ops):
        later = {phases[user] for user in users.get(op.name, ())}
        if op.name in backward:
            phases[op.name] = Phase.BACKWARD
        elif op.name in updates or later == {Phase.UPDATE}:
            phases[op.name] = Phase.UPDATE
        elif op.name in after and Phase.BACKWARD in later:  # between two ops of the tape: a sum of gradients
            phases[op.name] = Phase.BACKWARD
        elif op.name in after and later and Phase.FORWARD not in later:
            phases[op.name] = Phase.UPDATE
        else:
            phases[op.name] = Phase.FORWARD
    return phases


def _is_float(tensor: Any) -> bool:
    return tensor.dtype.is_floating or tensor.dtype.is_complex or tensor.dtype == tf.variant


def inputs_of(op: Any, writes: Mapping[str, bool]) -> list[Any]:
    """The ops that an op depends on: through tensors, or through a variable that was written before."""
    return [*(tensor.op for tensor in op.inputs), *writers_before(op, writes)]


def writers_before(op: Any, writes: Mapping[str, bool]) -> list[Any]:
    """Ops that change a variable and that an op must wait for, also through NoOps."""
    found, stack = [], list(op.control_inputs)
    while stack:
        one = stack.pop()
        if one.type == "NoOp":
            stack += one.control_inputs
        elif writes.get(one.name):
            found.append(one)
    return found


def _find_updates(ops: Sequence[Any], writes: Mapping[str, bool], after: set[str]) -> set[str]:
    """Writes of what depends on a gradient, and all other writes to the same variables (weight decay)."""
    found = {op.name for op in ops if op.name in after and writes[op.name]}
    changed = {
        tensor.name for op in ops if op.name in found for tensor in op.inputs if tensor.dtype == tf.resource
    }
    return found | {
        op.name
        for op in ops
        if writes[op.name]
        and any(tensor.name in changed for tensor in op.inputs if tensor.dtype == tf.resource)
    }


def is_gradient(name: str) -> bool:
    """Whether the tape named it."""
    return not GRADIENTS.isdisjoint(name.split("/")[:-1])


def find_mirrors(ops: Sequence[Any], phases: Mapping[str, Phase]) -> dict[str, str]:
    """The forward op of a backward op, where names and tensors tell."""
    forward = {op.name: op for op in ops if phases[op.name] == Phase.FORWARD}
    within: dict[str, list[Any]] = {}
    for op in forward.values():
        within.setdefault(op.name.rpartition("/")[0], []).append(op)
    found: dict[str, str] = {}
    for op in ops:
        if phases[op.name] != Phase.BACKWARD or not is_gradient(op.name):
            continue
        scope = "/".join(part for part in op.name.split("/")[:-1] if part not in GRADIENTS)
        mirror = _find_mirror(op, scope, forward, within)
        if mirror is not None:
            found[op.name] = mirror
    return found


def _find_mirror(
    op: Any, scope: str, forward: Mapping[str, Any], within: Mapping[str, list[Any]]
) -> str | None:
    """Named by the scope itself; of the op's kind; or the one whose tensors it reads."""
    if scope in forward:
        return scope
    near = within.get(scope, []) or within.get(scope.rpartition("/")[0], [])
    kinds = [other for other in near if op.type.startswith(other.type) and op.type != other.type]
    if kinds:
        return str(kinds[-1].name)
    read = {tensor.name for tensor in op.inputs}
    for other in reversed(near):
        if read & {tensor.name for tensor in (*other.outputs, *other.inputs)}:
            return str(other.name)
    fused = [other for other in near if other.type.startswith("_Fused")]
    return str(fused[0].name) if fused else None
