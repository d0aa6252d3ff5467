"""What no plan can beat: lower bounds of the objective, and proofs that nothing fits.

Every bound comes from the original graph or a relaxation of it, so it holds for every plan:

* critical path: the longest chain of ops, each at its fastest allowed device, transfers free;
* path with transfers: the same, but who changes the device pays for the transfer (`travel.py`);
* largest unit: ops that must share a device run there one after the other;
* work: all units spread at will over all engines, split into fractions, transfers free;
* memory: the same, but no class of devices may hold more than its memory at the end of the step.

Work and memory are one linear programme, solved in `relaxation.py`. `step_programme.py` holds a larger one,
which takes seconds: paths, work, transfers and memory together. `docs/bounds.md` proves them all.
"""

import itertools

import numpy as np

from loadmaster.core.arrays import Bools, Ints, Longs, sorted_unique
from loadmaster.core.graph import NO_STORAGE, Graph, Phase, held_bytes, home_bytes, units
from loadmaster.core.problem import Objective, Problem, allowed_devices
from loadmaster.core.run import Bound
from loadmaster.core.units import format_bytes
from loadmaster.graph.measures import longest_path
from loadmaster.simulator.bounds.relaxation import Classes, relaxed_bound_s
from loadmaster.simulator.bounds.travel import compute_travel

_MANY_SETS = 10
_MOST_DIGITS = 7


def lower_bound(problem: Problem) -> Bound:
    """The best of the bounds, with its name, or the proof that nothing fits."""
    unit, num_units = units(problem.graph)
    allowed = allowed_devices(problem, unit, num_units)
    reason = proof_of_infeasibility(problem, unit, allowed)
    fastest = np.where(allowed[unit], problem.device_compute_s, np.inf).min(axis=1)
    if reason:
        return Bound(0.0, "none", reason)
    classes = _build_classes(problem, unit, num_units, allowed)
    found = [("largest unit", float(classes.seconds.min(axis=1).max()))]
    if problem.objective == Objective.STEP:
        found.append(("critical path", float(longest_path(problem.graph, fastest).max())))
        found.append(("issue", float(problem.costs.issue_s.sum())))
        found.append(("path with transfers", compute_travel(problem).bound_s))
    for name, with_memory in (("work", False), ("memory", True)):
        if _relaxation_limit_s(classes, with_memory=with_memory) > max(seconds for _, seconds in found):
            found.append((name, relaxed_bound_s(classes, with_memory=with_memory)))
    name, seconds = max(found, key=lambda item: item[1])
    # Sums in another order than the simulator's may differ in the last bits; stay below it.
    return Bound(float(seconds) * (1.0 - 1e-12), name)


def _relaxation_limit_s(classes: Classes, *, with_memory: bool) -> float:
    """What the relaxation is not above, by two ways of spreading that fit. Often saves solving it."""
    if with_memory and (classes.memory_bytes >= classes.held_bytes.sum()).all():
        return 0.0  # memory adds nothing
    mixed = _even_split_s(classes, with_memory=with_memory)
    choice, num = classes.seconds.argmin(axis=1), len(classes.count)
    held = np.bincount(choice, classes.held_bytes, num)
    if with_memory and (held > classes.memory_bytes).any():
        return mixed
    return min(mixed, float((np.bincount(choice, classes.seconds.min(axis=1), num) / classes.count).max()))


def _even_split_s(classes: Classes, *, with_memory: bool) -> float:
    """Seconds when every unit is split alike: a class takes what it does in T, or what it holds."""
    pace = classes.count / np.maximum(classes.seconds.sum(axis=0), 1e-300)  # share of everything a second
    total = float(classes.held_bytes.sum())
    most = np.minimum(classes.memory_bytes / total, 1.0) if with_memory and total > 0 else np.ones(len(pace))
    order = np.argsort(most / np.maximum(pace, 1e-300))  # which class is full first
    full = 0.0
    for at, c in enumerate(order):
        rest = float(pace[order[at:]].sum())
        if rest <= 0:
            break
        seconds = (1.0 - full) / rest
        if seconds * pace[c] <= most[c]:
            return seconds
        full += float(most[c])
    return np.inf


def proof_of_infeasibility(problem: Problem, unit: Ints, allowed: Bools) -> str:
    """Why no plan can fit, with both numbers, or '' where no proof is found."""
    graph, cluster = problem.graph, problem.cluster
    usable = cluster.usable_bytes
    need = unit_need_bytes(graph, unit, len(allowed))
    room = np.where(allowed, usable, -1).max(axis=1)
    big = np.flatnonzero(need > room)
    if len(big):
        u = int(big[(need - room)[big].argmax()])
        op = graph.op_name[int(np.flatnonzero(unit == u)[0])]
        return (
            f"op {op!r} and the ops that belong with it need {format_bytes(need[u])} on one device,"
            f" the largest allowed has {format_bytes(room[u])} ({format_bytes(need[u] - room[u])} short):"
            " use a smaller batch or a larger device"
        )
    return _prove_no_room(problem, unit, allowed) or _prove_no_room_for_copies(problem, unit, len(allowed))


def _prove_no_room(problem: Problem, unit: Ints, allowed: Bools) -> str:
    """Why units that may use certain devices only do not fit there at the end of the step, or ''."""
    graph, names = problem.graph, problem.cluster.device_name
    rows, of_unit = allowed[:1], np.zeros(len(allowed), dtype=np.int64)
    if not allowed.all():
        rows, of_unit = np.unique(allowed, axis=0, return_inverse=True)
    held = np.zeros(len(rows), dtype=np.int64)
    np.add.at(held, of_unit.reshape(-1)[unit], held_bytes(graph))
    worst, text = 0, ""
    for devices in _list_unions(rows[held > 0]):
        need = int(held[~(rows & ~devices).any(axis=1)].sum())
        have = sum(problem.cluster.usable_bytes[devices].tolist())
        if need - have > worst:
            worst = need - have
            some = not devices.all()
            where = ", ".join(names[d] for d in np.flatnonzero(devices))
            holds, has = _format_distinct_sizes(need, have)
            text = (
                f"{f'the ops that may run on {where} only' if some else 'all ops together'} hold"
                f" {holds} at the end of the step, {'those' if some else 'all'} devices have"
                f" {has} ({format_bytes(worst)} short): use a smaller batch"
                f"{', other pins' if some else ''} or one more device"
            )
    return text


def _list_unions(rows: Bools) -> list[Bools]:
    """Every union of a few sets of devices; of many only the sets themselves and all of them."""
    if len(rows) > _MANY_SETS:
        return [*rows, rows.any(axis=0)]
    picks = itertools.product((False, True), repeat=len(rows))
    return [np.asarray(rows[list(pick)].any(axis=0)) for pick in picks if any(pick)]


def _prove_no_room_for_copies(problem: Problem, unit: Ints, num_units: int) -> str:
    """Why units that share kept tensors do not fit on the many devices that they take, or ''.

    A kept tensor stays, whole, on every device that it reaches. Join two units where one uses a kept tensor
    of the other, and let there be C components. A plan that uses m devices joins them the same way: a copy of
    a tensor joins its home to the device it was sent to, and the units of a component are all joined. So the
    m devices fall into at most C parts, and m parts become C by m - C joints at least: there are m - C
    copies or more, all different as pairs (tensor, device), each of them beside all that units hold.
    No m devices have more memory than the m largest. If no m leaves enough, no plan fits.
    """
    graph, num_devices = problem.graph, problem.cluster.num_devices
    rooms = list(itertools.accumulate(sorted(problem.cluster.usable_bytes.tolist(), reverse=True)))
    tensor, user = _find_shared_tensors(graph, unit, num_units)
    sizes = _smallest_copies(graph, tensor, num_devices - 1)
    held = int(held_bytes(graph).sum())
    if held + sum(sizes) <= rooms[-1]:
        return ""  # nor are there more copies with more than one component; spares counting them
    parts = _num_components(unit[graph.tensor_op[tensor]], user, num_units)
    needs = [held + sum(sizes[: max(used - parts, 0)]) for used in range(1, num_devices + 1)]
    lacks = [need - room for need, room in zip(needs, rooms, strict=True)]
    lack, used = min(zip(lacks, range(1, num_devices + 1), strict=True))
    if lack <= 0:
        return ""
    need, have = _format_distinct_sizes(needs[used - 1], rooms[used - 1])
    copies = f"copy at least {used - parts} kept tensors, and " if used > parts else ""
    return (
        f"all ops together hold {format_bytes(held)} at the end of the step; on {used} of {num_devices}"
        f" devices they {copies}need {need} where there are {have}; on any other number of devices they"
        f" lack no less ({format_bytes(lack)} short): use a smaller batch or one more device"
    )


def _find_shared_tensors(graph: Graph, unit: Ints, num_units: int) -> tuple[Longs, Longs]:
    """Distinct pairs (kept tensor that takes memory, unit of others that uses it)."""
    tensor, user = graph.use_tensor, unit[graph.use_op]
    takes = graph.keep[tensor] & (graph.tensor_storage[tensor] != NO_STORAGE)
    takes &= user != unit[graph.tensor_op[tensor]]
    pair = sorted_unique(tensor[takes].astype(np.int64) * num_units + user[takes])
    return pair // num_units, pair % num_units


def _smallest_copies(graph: Graph, tensor: Longs, most: int) -> list[int]:
    """Bytes of the smallest copies that there may be: as many of a tensor as units of others use it."""
    shared, times = np.unique(tensor, return_counts=True)
    small = np.argsort(graph.tensor_bytes[shared], kind="stable")[:most]
    copies = np.repeat(graph.tensor_bytes[shared[small]], np.minimum(times[small], most))
    sizes: list[int] = copies[:most].tolist()
    return sizes


def _format_distinct_sizes(need: int, have: int) -> tuple[str, str]:
    """Two sizes in words, with as many digits as tell them apart."""
    for digits in range(1, _MOST_DIGITS):
        texts = format_bytes(need, digits=digits), format_bytes(have, digits=digits)
        if texts[0] != texts[1]:
            return texts
    return f"{need:,} B", f"{have:,} B"


def _num_components(one: Ints, other: Longs, num_units: int) -> int:
    """Into how many parts units fall when each pair is joined."""
    from scipy.sparse import csr_array  # slow to load and seldom needed
    from scipy.sparse.csgraph import connected_components

    joined = csr_array((np.ones(len(one), dtype=np.int32), (one, other)), shape=(num_units, num_units))
    return int(connected_components(joined, directed=False, return_labels=False))


def unit_need_bytes(graph: Graph, unit: Ints, num_units: int) -> Longs:
    """[units] bytes that must be on a unit's device at some moment, whatever the plan.

    While an op runs: the unit's residents, the op's workspace, its outputs and its inputs. A weight of
    another unit is a copy, or resident: whatever is less.
    """
    resident = np.zeros(num_units, dtype=np.int64)
    np.add.at(resident, unit, graph.resident_bytes)
    running = graph.workspace_bytes.copy()
    np.add.at(running, graph.tensor_op, home_bytes(graph))
    tensor = graph.use_tensor
    maker = graph.tensor_op[tensor]
    at_home = unit[maker] == unit[graph.use_op]  # then a weight is resident, a view needs its base's bytes
    outputs = np.bincount(graph.tensor_op, minlength=graph.num_ops)
    away = np.where(
        graph.phase[maker] == Phase.PARAM,
        np.minimum(graph.tensor_bytes[tensor], graph.resident_bytes[maker] // outputs[maker]),
        graph.tensor_bytes[tensor],
    )
    size = np.where(at_home, home_bytes(graph)[tensor], away)
    size = np.where(graph.tensor_storage[tensor] == tensor, size, 0)
    np.add.at(running, graph.use_op, size)
    need = resident.copy()
    np.maximum.at(need, unit, resident[unit] + running)
    held = np.zeros(num_units, dtype=np.int64)
    np.add.at(held, unit, held_bytes(graph))
    return np.maximum(need, held)


def _build_classes(problem: Problem, unit: Ints, num_units: int, allowed: Bools) -> Classes:
    """Engines with the same kinds of devices are one class; a unit pinned to one may use its class."""
    cluster = problem.cluster
    _, engine = np.unique(cluster.engine, return_inverse=True)
    kinds = np.zeros((engine.max() + 1, len(cluster.kind_name)), dtype=np.bool_)
    kinds[engine, cluster.kind] = True
    _, class_of_engine = np.unique(kinds, axis=0, return_inverse=True)
    class_of_device = class_of_engine.reshape(-1)[engine]
    num_classes = int(class_of_device.max()) + 1
    by_kind = np.zeros((num_units, len(cluster.kind_name)))
    np.add.at(by_kind, unit, problem.costs.compute_s)
    seconds = np.full((num_units, num_classes), np.inf)
    memory = np.zeros(num_classes)
    for d in range(cluster.num_devices):
        c = class_of_device[d]
        here = np.where(allowed[:, d], by_kind[:, cluster.kind[d]], np.inf)
        seconds[:, c] = np.minimum(seconds[:, c], here)
        memory[c] += float(cluster.usable_bytes[d])
    held = np.zeros(num_units)
    np.add.at(held, unit, held_bytes(problem.graph).astype(np.float64))
    count = np.bincount(class_of_engine.reshape(-1), minlength=num_classes).astype(np.float64)
    return Classes(count, memory, seconds, held)
