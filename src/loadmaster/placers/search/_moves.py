"""Random moves of units tried by replay until one is better, compiled.

Shares of proposals: 12 % let an op start sooner or later, 23 % move a row of neighbours, 5 % a module, 45 %
one unit, 15 % swap two units. Four in five begin at a unit of the critical chain; seven in ten go to the
device of a neighbour.
"""

from typing import Any, NamedTuple

import numpy as np

from loadmaster.placers.search._replay import NONE, Tape, Weights, replay
from loadmaster.simulator.events.kernel import ProblemArrays
from loadmaster.simulator.jit import kernel

MOST_MOVED = 64
_ORDER, _ROW, _MODULE, _ONE = 0.12, 0.35, 0.40, 0.85  # up to here a draw means that kind of move
_CRITICAL, _NEAR = 0.8, 0.7
_LONGEST_ROW = 4
_FARTHEST = 200.0  # places in the order


class Cast(NamedTuple):
    """Units and their neighbours, modules, and what they hold."""

    unit_ptr: Any  # [U + 1] into unit_op
    unit_op: Any  # [N]
    near_ptr: Any  # [U + 1] into near
    near: Any  # units that exchange tensors
    module: Any  # [U] or NONE
    module_ptr: Any  # [M + 1] into module_unit
    module_unit: Any
    fits: Any  # [U, D]
    held_bytes: Any  # [U]
    room_bytes: Any  # [D]


class Move(NamedTuple):
    """The last move tried, to be undone or kept."""

    unit: Any  # [MOST_MOVED] units moved
    device: Any  # [MOST_MOVED] where they were
    marked: Any  # [N] scratch: ops that move, all False between moves


def blank_move(num_ops: int) -> Move:
    """No move yet."""
    return Move(
        np.zeros(MOST_MOVED, dtype=np.int32),
        np.zeros(MOST_MOVED, dtype=np.int32),
        np.zeros(num_ops, dtype=np.bool_),
    )


@kernel
def critical_units(fixed: ProblemArrays, tape: Tape, unit: Any, found: Any) -> Any:
    """Units of the chain of ops that the end of the step waits for, into `found`; how many."""
    in_ptr, in_use, use_tensor, tensor_op = fixed.in_ptr, fixed.in_use, fixed.use_tensor, fixed.tensor_op
    o, count = int(np.argmax(tape.end_s)), 0
    while o != NONE:
        if count == 0 or found[count - 1] != unit[o]:
            found[count] = unit[o]
            count += 1
        after = tape.before[o]
        latest = tape.end_s[after] if after != NONE else -1.0
        if latest < tape.start_s[o]:  # it waited for an input
            for read in range(in_ptr[o], in_ptr[o + 1]):
                maker = tensor_op[use_tensor[in_use[read]]]
                if after == tape.before[o] or tape.end_s[maker] > latest:
                    after, latest = maker, tape.end_s[maker]
        o = after
    return count


@kernel
def first_effect_s(
    fixed: ProblemArrays, cast: Cast, tape: Tape, move: Move, num_moved: int, most_s: Any
) -> Any:
    """The first instant at which moving these units can matter; negative: the start.

    That is when a producer of theirs ends and its output is sent, or not sent, elsewhere. A source that takes
    no time and moves with all its consumers does not count.
    """
    in_ptr, in_use, use_tensor, tensor_op = fixed.in_ptr, fixed.in_use, fixed.use_tensor, fixed.tensor_op
    out_ptr, out_tensor, use_ptr, use_op = fixed.out_ptr, fixed.out_tensor, fixed.use_ptr, fixed.use_op
    first = np.inf
    for m in range(num_moved):
        u = move.unit[m]
        for at in range(cast.unit_ptr[u], cast.unit_ptr[u + 1]):
            o = cast.unit_op[at]
            if in_ptr[o] == in_ptr[o + 1]:
                if most_s[o] > 0.0:
                    return -1.0
                for out in range(out_ptr[o], out_ptr[o + 1]):
                    t = out_tensor[out]
                    for use in range(use_ptr[t], use_ptr[t + 1]):
                        if not move.marked[use_op[use]]:
                            return -1.0
            for read in range(in_ptr[o], in_ptr[o + 1]):
                maker = tensor_op[use_tensor[in_use[read]]]
                idle = in_ptr[maker] == in_ptr[maker + 1] and most_s[maker] == 0.0
                if not (idle and move.marked[maker]):
                    first = min(first, tape.end_s[maker])
    return first if first < np.inf else -1.0


@kernel
def snapshot_before(at_s: Any, instant_s: float) -> Any:
    """The last snapshot before an instant; 0 = the start."""
    for k in range(len(at_s) - 1, 0, -1):
        if at_s[k] < instant_s:
            return k
    return 0


@kernel
def undo_move(cast: Cast, move: Move, num_moved: int, device: Any) -> None:
    """Put moved units back."""
    for m in range(num_moved):
        u = move.unit[m]
        for at in range(cast.unit_ptr[u], cast.unit_ptr[u + 1]):
            device[cast.unit_op[at]] = move.device[m]


@kernel
def choose_units(rng: Any, cast: Cast, move: Move, device: Any, u: int, kind: float) -> Any:
    """`u` alone, with a row of neighbours, or with its module, all on its device; into `move`; how many."""
    unit_ptr, unit_op, near_ptr, near = cast.unit_ptr, cast.unit_op, cast.near_ptr, cast.near
    here = device[unit_op[unit_ptr[u]]]
    move.unit[0] = u
    count, at = 1, u
    if kind < _ROW:
        for _ in range(1 + int(rng.random() * _LONGEST_ROW)):
            degree = near_ptr[at + 1] - near_ptr[at]
            if degree == 0:
                break
            at = near[near_ptr[at] + int(rng.random() * degree)]
            known = device[unit_op[unit_ptr[at]]] != here
            for m in range(count):
                known = known or move.unit[m] == at
            if known:
                break
            move.unit[count] = at
            count += 1
    elif kind < _MODULE and cast.module[u] != NONE:
        for index in range(cast.module_ptr[cast.module[u]], cast.module_ptr[cast.module[u] + 1]):
            x = cast.module_unit[index]
            if x != u and device[unit_op[unit_ptr[x]]] == here and count < MOST_MOVED - 1:
                move.unit[count] = x
                count += 1
    return count


@kernel
def climb(
    rng: Any,
    fixed: ProblemArrays,
    weights: Weights,
    cast: Cast,
    links: int,
    device: Any,
    key: Any,
    tape: Tape,
    move: Move,
    used_bytes: Any,
    most_s: Any,
    critical: Any,
    num_tries: int,
    limit_s: float,
) -> Any:
    """Try moves until one takes less than `limit_s`; it is left applied to `device` and `key`.

    Returns its seconds (inf: none was better), tries made, and the last snapshot before it matters.
    """
    unit_ptr, unit_op, near_ptr, near = cast.unit_ptr, cast.unit_op, cast.near_ptr, cast.near
    fits, held, room = cast.fits, cast.held_bytes, cast.room_bytes
    in_ptr, in_use, use_tensor, tensor_op = fixed.in_ptr, fixed.in_use, fixed.use_tensor, fixed.tensor_op
    num_units, num_devices = len(fits), fits.shape[1]
    for tried in range(num_tries):
        u = int(rng.random() * num_units)
        if rng.random() < _CRITICAL:
            u = critical[int(rng.random() * len(critical))]
        kind = rng.random()
        here = device[unit_op[unit_ptr[u]]]
        count, keyed, old_key, first_s = 0, NONE, 0.0, -1.0
        if kind < _ORDER:
            keyed = unit_op[unit_ptr[u] + int(rng.random() * (unit_ptr[u + 1] - unit_ptr[u]))]
            old_key = key[keyed]
            step = 1.0 + _FARTHEST * rng.random() ** 3
            key[keyed] = old_key - step if rng.random() < _NEAR else old_key + step
            for read in range(
                in_ptr[keyed], in_ptr[keyed + 1]
            ):  # before all its inputs are made it cannot start
                first_s = max(first_s, tape.end_s[tensor_op[use_tensor[in_use[read]]]])
        else:
            degree, v, target = near_ptr[u + 1] - near_ptr[u], NONE, here
            if degree > 0 and rng.random() < _NEAR:
                v = near[near_ptr[u] + int(rng.random() * degree)]
                target = device[unit_op[unit_ptr[v]]]
            if target == here:
                target = int(rng.random() * num_devices)
            if target == here:
                continue
            count = choose_units(rng, cast, move, device, u, kind)
            other = NONE
            if kind >= _ONE:  # swap with a unit there: mostly one near the neighbour it goes to
                other = int(rng.random() * num_units)
                if v != NONE and rng.random() < _NEAR:
                    other = near[near_ptr[v] + int(rng.random() * (near_ptr[v + 1] - near_ptr[v]))]
                if device[unit_op[unit_ptr[other]]] != target or not fits[other, here]:
                    other = NONE
            more, allowed = 0.0, True
            for m in range(count):
                more += held[move.unit[m]]
                allowed = allowed and fits[move.unit[m], target]
            if other != NONE:
                more -= held[other]
                move.unit[count] = other
                count += 1
            if not allowed or (more > 0.0 and used_bytes[target] + more > room[target]):
                continue
            for m in range(count):
                x = move.unit[m]
                move.device[m] = device[unit_op[unit_ptr[x]]]
                for at in range(unit_ptr[x], unit_ptr[x + 1]):
                    device[unit_op[at]] = here if x == other else target
                    move.marked[unit_op[at]] = True
            first_s = first_effect_s(fixed, cast, tape, move, count, most_s)
            for m in range(count):
                for at in range(unit_ptr[move.unit[m]], unit_ptr[move.unit[m] + 1]):
                    move.marked[unit_op[at]] = False
        begin = snapshot_before(tape.at_s, first_s)
        seconds = replay(fixed, weights, links, device, key, tape, begin, limit_s)
        if seconds < limit_s:
            return seconds, tried + 1, begin
        undo_move(cast, move, count, device)
        if keyed != NONE:
            key[keyed] = old_key
    return np.inf, num_tries, 0
