"""Diff: two plans of one model side by side, also when their graphs were captured from different code.

Ops are matched by name; those that are left by module, phase, kind and place in the order; then by what they
do: phase, kind, flops and bytes, in order. What has no partner is counted.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np

from loadmaster.core.answers.outcomes import DeviceDifference, Difference, MovedModule
from loadmaster.core.arrays import Floats
from loadmaster.core.graph import Graph, Phase
from loadmaster.core.placement import Placement
from loadmaster.core.problem import Problem
from loadmaster.core.timeline import SpanKind, Timeline
from loadmaster.review.explain import sent_bytes
from loadmaster.review.look import shown_plan
from loadmaster.review.steps import has_steps, op_seconds
from loadmaster.simulator.events.engine import prepare
from loadmaster.simulator.pipelines.unrolled import simulate_step

NO_PARTNER = -1


def compare_plans(one: Placement, other: Placement, names: tuple[str, str] = ("a", "b")) -> Difference:
    """What changed from one plan to the other."""
    before, after = _run(one), _run(other)
    partner, how = match_ops(one.problem.graph, other.problem.graph)
    known = np.flatnonzero(partner != NO_PARTNER)
    first, second = _name_devices(one), _name_devices(other)
    moved = [op for op in known.tolist() if first[op] != second[partner[op]]]
    sizes = (one.problem.graph.num_ops, other.problem.graph.num_ops)
    notes = []
    if len(known) < max(sizes):
        notes.append(
            f"{sizes[0] - len(known)} ops of {names[0]} and {sizes[1] - len(known)} of {names[1]} have"
            " no partner"
        )
    notes += _list_other_questions(one.problem, other.problem)
    return Difference(
        names=names,
        time_s=(_time(one, before.timeline), _time(other, after.timeline)),
        fits=(one.fits, other.fits),
        sent_bytes=(before.sent_bytes, after.sent_bytes),
        num_ops=sizes,
        num_matched=len(known),
        how_matched=tuple(how.items()),
        num_moved=len(moved),
        modules=_group_moved(one.problem.graph, before.op_s, moved, first, second, partner.tolist()),
        devices=_compare_devices(one, other, before.timeline, after.timeline),
        notes=tuple(notes),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """A plan simulated: its step, and how long every op of the model takes in it."""

    timeline: Timeline
    sent_bytes: int
    op_s: Floats  # [N]


def _name_devices(placement: Placement) -> list[str]:
    """Where each op runs; all devices of it where its stage has replicas."""
    names = placement.problem.cluster.device_name
    return [" + ".join(names[d] for d in row) for row in shown_plan(placement).copies.T.tolist()]


def _run(placement: Placement) -> _Run:
    problem, plan = placement.problem, shown_plan(placement)
    if has_steps(problem, plan):
        timeline, flat = simulate_step(problem, plan)
        return _Run(timeline, sent_bytes(flat.problem, timeline), op_seconds(problem, plan).sum(axis=1))
    timeline = prepare(problem).timeline(plan)
    return _Run(timeline, sent_bytes(problem, timeline), _op_seconds(problem.graph, timeline))


def _time(placement: Placement, timeline: Timeline) -> float:
    return placement.score_s if placement.score_s is not None else timeline.step_s


def match_ops(
    one: Graph, other: Graph
) -> tuple["np.ndarray[tuple[int], np.dtype[np.int64]]", dict[str, int]]:
    """[N] the partner of every op of one graph in the other, and how many were found in which way."""
    partner = np.full(one.num_ops, NO_PARTNER, dtype=np.int64)
    taken = np.zeros(other.num_ops, dtype=np.bool_)
    ways: dict[str, Callable[[Graph], Callable[[int], Hashable]]] = {
        "by name": lambda graph: lambda op: graph.op_name[op],
        "by module and kind": lambda graph: (
            lambda op: (graph.module[op], int(graph.phase[op]), graph.op_kind[op])
        ),
        "by what they do": _work_key,
    }
    found: dict[str, int] = {}
    for name, key in ways.items():
        mine, theirs = key(one), key(other)
        left: dict[Hashable, list[int]] = defaultdict(list)
        for op in np.flatnonzero(~taken)[::-1].tolist():
            left[theirs(op)].append(op)
        for op in np.flatnonzero(partner == NO_PARTNER).tolist():
            waiting = left.get(mine(op))
            if waiting:
                partner[op] = waiting.pop()
                taken[partner[op]] = True
                found[name] = found.get(name, 0) + 1
    return partner, found


def _work_key(graph: Graph) -> Callable[[int], Hashable]:
    made = np.bincount(graph.tensor_op, graph.tensor_bytes.astype(np.float64), minlength=graph.num_ops)

    def key(op: int) -> Hashable:
        return (
            int(graph.phase[op]),
            float(graph.flops[op]),
            int(graph.resident_bytes[op]),
            int(made[op]),
            graph.op_kind[op],
        )

    return key


def _group_moved(
    graph: Graph,
    seconds: Floats,
    moved: list[int],
    first: list[str],
    second: list[str],
    partner: list[int],
) -> tuple[MovedModule, ...]:
    """Moved ops by module; modules whose whole subtree moved alike are one row."""
    rows: dict[str, list[int]] = defaultdict(list)
    for op in moved:
        path = graph.module[op]
        if not path and graph.phase[op] in (Phase.PARAM, Phase.UPDATE):
            path = graph.op_name[op].rpartition(".")[0]
        rows[path].append(op)
    merged = _merge_paths(graph, rows, first, second, partner)
    found = [
        MovedModule(
            module=path or "(no module)",
            before=tuple(sorted({first[op] for op in ops})),
            after=tuple(sorted({second[partner[op]] for op in ops})),
            num_ops=len(ops),
            seconds=float(seconds[ops].sum()),
            resident_bytes=int(graph.resident_bytes[ops].sum()),
        )
        for path, ops in merged.items()
    ]
    return tuple(sorted(found, key=lambda row: (-row.seconds, row.module)))


def _merge_paths(
    graph: Graph, rows: dict[str, list[int]], first: list[str], second: list[str], partner: list[int]
) -> dict[str, list[int]]:
    """Climb to the parent while all ops below it moved from one device to one other."""
    total: dict[str, int] = defaultdict(int)
    for path in graph.module:
        words = path.split(".") if path else []
        for depth in range(1, len(words) + 1):
            total[".".join(words[:depth])] += 1
    below: dict[str, list[int]] = defaultdict(list)
    for path, ops in rows.items():
        words = path.split(".") if path else []
        for depth in range(1, len(words) + 1):
            below[".".join(words[:depth])] += ops

    def whole(path: str) -> bool:
        ops = below.get(path, [])
        ways = {(first[op], second[partner[op]]) for op in ops}
        return len(ops) == total[path] and len(ways) == 1

    merged: dict[str, list[int]] = {}
    for path, ops in rows.items():
        words = path.split(".") if path else []
        top = next(
            (".".join(words[:depth]) for depth in range(1, len(words) + 1) if whole(".".join(words[:depth]))),
            path,
        )
        merged[top] = below[top] if top and whole(top) else ops
    return merged


def _op_seconds(graph: Graph, timeline: Timeline) -> Floats:
    seconds = np.zeros(graph.num_ops)
    compute = timeline.kind == SpanKind.COMPUTE
    np.add.at(seconds, timeline.item[compute], (timeline.end_s - timeline.start_s)[compute])
    return seconds


def _compare_devices(
    one: Placement, other: Placement, before: Timeline, after: Timeline
) -> tuple[DeviceDifference, ...]:
    sides = [_describe_devices(one, before), _describe_devices(other, after)]
    names = dict.fromkeys([*sides[0], *sides[1]])
    nothing = (None, None, None)
    found = []
    for name in names:
        (busy, peak, ops), (busy2, peak2, ops2) = (side.get(name, nothing) for side in sides)
        found.append(DeviceDifference(name, (busy, busy2), (peak, peak2), (ops, ops2)))
    return tuple(found)


def _describe_devices(placement: Placement, timeline: Timeline) -> dict[str, tuple[float, int, int]]:
    counts = shown_plan(placement).count_ops(len(timeline.device_name))
    columns = (timeline.device_name, timeline.busy_s.tolist(), placement.peak_bytes.tolist(), counts.tolist())
    return {name: (busy, peak, ops) for name, busy, peak, ops in zip(*columns, strict=True)}


def _list_other_questions(one: Problem, other: Problem) -> list[str]:
    """In what the two questions differ, apart from the plan."""
    found = []
    for field in ("objective", "links", "split", "pipeline"):
        mine, theirs = getattr(one, field), getattr(other, field)
        if mine != theirs:
            found.append(f"{field}: {mine or 'none'} before, {theirs or 'none'} after")
    if one.cluster.digest != other.cluster.digest:
        found.append(f"devices: {one.cluster.name} before, {other.cluster.name} after")
    if one.graph.digest != other.graph.digest:
        found.append("the graphs differ")
    if one.costs.digest != other.costs.digest and one.graph.digest == other.graph.digest:
        found.append("the times of ops differ")
    return found
