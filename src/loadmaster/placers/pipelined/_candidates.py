"""Candidates: which devices in which order, how many replicas and which schedule; and the plan of each."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from loadmaster.core.arrays import Floats, Ints
from loadmaster.core.pipelines.in_flight import find_mirrored_ops
from loadmaster.core.pipelines.order import (
    GPIPE,
    INTERLEAVED,
    ONE_F_ONE_B,
    ZERO_BUBBLE,
    in_flight_of,
    make_order,
)
from loadmaster.core.pipelines.schedule import AUTO, Schedule
from loadmaster.core.plan import Pipeline, Plan
from loadmaster.core.problem import Problem
from loadmaster.placers.pipelined._line import Line

_MOST_PERMUTED = 4  # devices whose every order is tried
_SLOW = 0.02  # a device this much slower than the fastest is not worth a stage


@dataclass(frozen=True, slots=True)
class Candidate:
    """Everything that a step of micro-batches is made of."""

    devices: tuple[tuple[int, ...], ...]  # [R][ranks]
    microbatches: tuple[int, ...]  # [R]
    schedule: str
    stages_per_rank: int = 1
    border: tuple[int, ...] = ()  # [S + 1]
    recompute: tuple[bool, ...] = ()  # [S]

    @property
    def num_stages(self) -> int:
        """S."""
        return len(self.devices[0]) * self.stages_per_rank

    @property
    def stage_devices(self) -> Ints:
        """[R, S]."""
        return np.tile(np.array(self.devices, dtype=np.int32), (1, self.stages_per_rank))

    @property
    def in_flight(self) -> tuple[int, ...]:
        """[S] of the replica with most micro-batches."""
        order = make_order(self.schedule, self.num_stages, max(self.microbatches), self.stages_per_rank)
        return in_flight_of(order, self.num_stages)


def make_plan(line: Line, chosen: Candidate) -> Plan:
    """The plan of a candidate whose borders are known."""
    problem, num = line.problem, chosen.num_stages
    border = np.array(chosen.border)
    stage = (np.searchsorted(border, line.segment, side="right") - 1).astype(np.int32)
    devices = chosen.stage_devices
    again = find_mirrored_ops(problem.graph) & np.array(chosen.recompute)[stage]
    kind = problem.cluster.kind[devices[0]]
    at = np.arange(num)
    forward = (line.forward_s[border[1:]] - line.forward_s[border[:-1]])[at, kind]
    backward = (line.backward_s[border[1:]] - line.backward_s[border[:-1]])[at, kind]
    several = len(devices) > 1
    pipeline = Pipeline(
        stage=stage,
        replicas=np.full(num, len(devices), dtype=np.int32),
        num_microbatches=sum(chosen.microbatches),
        schedule=chosen.schedule,
        in_flight=np.array(chosen.in_flight, dtype=np.int32),
        stage_s=np.maximum(forward * (1 + np.array(chosen.recompute)) + backward, 0.0),
        rank=tuple(s % len(chosen.devices[0]) for s in range(num)) if chosen.stages_per_rank > 1 else (),
        replica_device=tuple(map(tuple, devices.tolist())) if several else (),
        replica_microbatches=chosen.microbatches if several else (),
    )
    return Plan(
        device=devices[0, stage].astype(np.int32),
        priority=np.arange(problem.graph.num_ops, dtype=np.int32),
        recompute=again,
        pipeline=pipeline,
    )


def device_speeds(line: Line) -> Floats:
    """[D] steps a second of each device, 0 where it cannot run everything."""
    kind = line.problem.cluster.kind
    seconds = (line.forward_s[-1] + line.backward_s[-1])[kind]
    speeds: Floats = 1.0 / np.maximum(seconds, 1e-30)
    return speeds


def schedules_asked(problem: Problem) -> list[tuple[str, int]]:
    """(schedule, stages per rank) that a problem allows, 1F1B first where it may be."""
    asked = problem.schedule
    assert isinstance(asked, Schedule)
    if asked.name != AUTO:
        return [(asked.name, asked.stages_per_rank)]
    return [(ONE_F_ONE_B, 1), (GPIPE, 1), (ZERO_BUBBLE, 1), (INTERLEAVED, 2), (INTERLEAVED, 3)]


def list_layouts(line: Line, *, replicas: bool) -> Iterator[tuple[tuple[int, ...], ...]]:
    """[R][ranks] devices worth a try: the fastest few, in several orders, alone and as replicas."""
    speed = device_speeds(line)
    ranked = sorted(range(len(speed)), key=lambda d: (-speed[d], d))
    useful = [d for d in ranked if speed[d] >= _SLOW * speed[ranked[0]]] or ranked[:1]
    seen: set[tuple[tuple[int, ...], ...]] = set()
    for count in range(1, len(useful) + 1):
        for order in _list_orders(line.problem, useful[:count], speed):
            yield from _fresh(seen, line.problem, (tuple(order),))
    if not replicas:
        return
    for count in range(2, len(useful) + 1):
        for number in range(2, count + 1):
            if count % number == 0:
                for rows in _list_replicas(line.problem, useful[:count], number):
                    yield from _fresh(seen, line.problem, rows)


def _fresh(
    seen: set[tuple[tuple[int, ...], ...]], problem: Problem, rows: tuple[tuple[int, ...], ...]
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """The layout, unless one was that differs in equal devices of one host only."""
    cluster = problem.cluster
    alike = tuple(
        tuple(
            (int(cluster.kind[d]) << 20) + int(cluster.host[d]) if problem.pinned.max() < 0 else d
            for d in row
        )
        for row in rows
    )
    memory = tuple(tuple(int(cluster.usable_bytes[d]) for d in row) for row in rows)
    key = (*alike, *memory)
    if key not in seen:
        seen.add(key)
        yield rows


def _list_orders(problem: Problem, chosen: Sequence[int], speed: Floats) -> Iterator[Sequence[int]]:
    cluster = problem.cluster
    if len(chosen) <= _MOST_PERMUTED:
        yield from itertools.permutations(sorted(chosen))
        return
    room = cluster.usable_bytes
    yield sorted(chosen)
    yield sorted(chosen, key=lambda d: (-speed[d], d))
    yield sorted(chosen, key=lambda d: (speed[d], d))
    yield sorted(chosen, key=lambda d: (int(cluster.host[d]), -speed[d], d))
    yield sorted(chosen, key=lambda d: (-int(cluster.host[d]), speed[d], d))
    yield sorted(chosen, key=lambda d: (-int(room[d]), d))


def _list_replicas(
    problem: Problem, chosen: Sequence[int], number: int
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Equal stages of replicas on devices alike; or each replica on neighbours."""
    each = len(chosen) // number
    yield tuple(tuple(chosen[s * number + r] for s in range(each)) for r in range(number))
    yield tuple(tuple(chosen[(each - 1 - s) * number + r] for s in range(each)) for r in range(number))
    near = sorted(chosen, key=lambda d: (int(problem.cluster.host[d]), d))
    yield tuple(tuple(near[r * each : (r + 1) * each]) for r in range(number))


def share_microbatches(line: Line, devices: Sequence[Sequence[int]], total: int) -> tuple[int, ...]:
    """How many micro-batches each replica takes: in proportion to its speed, at least one."""
    speed = device_speeds(line)
    pace = [min(speed[d] for d in row) * len(row) for row in devices]
    counts = [1] * len(devices)
    for _ in range(total - len(devices)):
        ahead = [(counts[r] + 1) / pace[r] for r in range(len(devices))]
        counts[ahead.index(min(ahead))] += 1
    return tuple(counts)


def with_schedule(chosen: Candidate, schedule: str, stages_per_rank: int) -> Candidate:
    """The same devices under another schedule; borders have to be found again if stages are more."""
    same = chosen.stages_per_rank == stages_per_rank
    recompute = chosen.recompute if schedule != ZERO_BUBBLE else (False,) * len(chosen.recompute)
    return replace(
        chosen,
        schedule=schedule,
        stages_per_rank=stages_per_rank,
        border=chosen.border if same else (),
        recompute=recompute if same else (),
    )
