"""Steps of micro-batches by their definition: an evaluator and a brute force apart from the code.

Written from "Steps of micro-batches" in docs/simulator.md for chains of layers, in plain loops: the
schedules are written down again, and an action starts when its rank is free and its input is there.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from loadmaster.core.cluster import Cluster
from loadmaster.core.graph import Graph, Phase
from loadmaster.core.problem import Problem
from loadmaster.graph.build import GraphBuilder
from tests.builders import problem_of, star_cluster


@dataclass(frozen=True)
class Layer:
    """One layer: seconds on a device of pace 1, bytes of its output, of what it keeps, of its weight."""

    forward: float
    backward: float
    sent: int = 0
    kept: int = 0
    weight: int = 0
    update: float = 0.0


def layers_graph(layers: Sequence[Layer]) -> Graph:
    """A chain of layers with weights, gradients and updates."""
    builder = GraphBuilder("layers", capture="built")
    forward, out, kept, gradient = [], [], [], []
    weight = []
    for i, layer in enumerate(layers):
        param = builder.op(f"w{i}", phase=Phase.PARAM, group=i, resident_bytes=layer.weight)
        weight.append(builder.tensor(param, layer.weight))
        forward.append(builder.op(f"f{i}", group=i, module=f"h.{i}", flops=1.0))
        builder.use(weight[i], forward[i])
        out.append(builder.tensor(forward[i], layer.sent))
        kept.append(builder.tensor(forward[i], layer.kept))
        if i:
            builder.use(out[i - 1], forward[i])
    for i in reversed(range(len(layers))):
        op = builder.op(f"b{i}", phase=Phase.BACKWARD, mirror=forward[i], group=i, flops=1.0)
        builder.use(kept[i], op)
        if i + 1 < len(layers):
            builder.use(gradient[-1], op)
        gradient.append(builder.tensor(op, layers[i].sent))
        made = builder.tensor(op, layers[i].weight)
        update = builder.op(f"u{i}", phase=Phase.UPDATE, group=i)
        builder.use(made, update)
        builder.use(weight[i], update)
    return builder.build()


def layers_problem(
    layers: Sequence[Layer],
    pace: Sequence[float],
    asked: str,
    *,
    cluster: Cluster | None = None,
    memory: int = 10**12,
) -> Problem:
    """Layers on devices of which device d takes `pace[d]` times as long; transfers never wait."""
    graph = layers_graph(layers)
    found = cluster or star_cluster(len(pace), memory=memory, latency=0.0)
    found = with_kinds(found)
    once = {"w": lambda x: 0.0, "f": lambda x: x.forward, "b": lambda x: x.backward, "u": lambda x: x.update}
    seconds = [once[name[0]](layers[int(name[1:])]) for name in graph.op_name]
    times = np.array(seconds)[:, None] * np.array(pace)[None, :]
    return problem_of(graph, found, times, links="parallel", pipeline=asked)


def with_kinds(cluster: Cluster) -> Cluster:
    """Every device of a kind of its own."""
    num = cluster.num_devices
    return replace(
        cluster,
        kind=np.arange(num),
        kind_name=tuple(f"k{d}" for d in range(num)),
        flops_per_s=np.repeat(cluster.flops_per_s[:1], num, axis=0),
        memory_bytes_per_s=np.repeat(cluster.memory_bytes_per_s[:1], num),
        overhead_s=np.zeros(num),
        on_host=np.zeros(num, dtype=np.bool_),
    )


def actions(schedule: str, stages: int, batches: int) -> list[list[tuple[str, int]]]:
    """What each stage does, one stage a rank: written from the drawings, not from the code."""
    if schedule == "gpipe":
        return [[(work, m) for work in "fb" for m in range(batches)] for _ in range(stages)]
    lists = []
    for s in range(stages):
        ahead = min(stages - s, batches)
        todo = [("f", m) for m in range(ahead)]
        for m in range(batches):
            todo.append(("b", m))
            if ahead + m < batches:
                todo.append(("f", ahead + m))
        lists.append(todo)
    return lists


def step_seconds(
    schedule: str,
    batches: int,
    f: Sequence[float],
    b: Sequence[float],
    u: Sequence[float],
    send: Sequence[float],
) -> float:
    """The end of a step: f, b, u seconds of each stage, send[s] over the border after stage s, each way."""
    todo = actions(schedule, len(f), batches)
    end: dict[tuple[str, int, int], float] = {}
    free, at = [0.0] * len(f), [0] * len(f)
    arrived: dict[tuple[str, int, int], float] = {}
    while any(at[s] < len(todo[s]) for s in range(len(f))):
        for s in range(len(f)):
            while at[s] < len(todo[s]):
                work, m = todo[s][at[s]]
                if work == "f":
                    need = 0.0 if s == 0 else arrived.get(("f", s, m))
                elif s == len(f) - 1:
                    need = end.get(("f", s, m))
                else:
                    need = arrived.get(("b", s, m))
                if need is None:
                    break
                done = max(free[s], need) + (f[s] if work == "f" else b[s])
                end[work, s, m] = free[s] = done
                at[s] += 1
                other = s + 1 if work == "f" else s - 1
                if 0 <= other < len(f):
                    arrived[work, other, m] = done + send[min(s, other)]
    return max(free[s] + u[s] for s in range(len(f)))


@dataclass(frozen=True)
class Shape:
    """One pipeline out of all: devices of stages, borders, schedule."""

    devices: tuple[int, ...]
    border: tuple[int, ...]
    schedule: str


def every_shape(num_layers: int, num_devices: int, schedules: Sequence[str]) -> Iterator[Shape]:
    """Every order of every set of devices, every cut, every schedule."""
    for stages in range(1, min(num_layers, num_devices) + 1):
        for devices in itertools.permutations(range(num_devices), stages):
            for cut in itertools.combinations(range(1, num_layers), stages - 1):
                for schedule in schedules:
                    yield Shape(devices, (0, *cut, num_layers), schedule)


def shape_seconds(shape: Shape, layers: Sequence[Layer], pace: Sequence[float], batches: int) -> float:
    """A shape's step where links take no time."""
    total = stage_seconds(layers, shape.border, [pace[d] for d in shape.devices])
    return step_seconds(shape.schedule, batches, *total, [0.0] * len(shape.devices))


def stage_seconds(
    layers: Sequence[Layer], border: Sequence[int], pace: Sequence[float]
) -> tuple[list[float], list[float], list[float]]:
    """Forward, backward and update seconds of each stage, stage s on a device of `pace[s]`."""
    spans = [layers[i:j] for i, j in itertools.pairwise(border)]
    return (
        [sum(x.forward for x in own) * p for own, p in zip(spans, pace, strict=True)],
        [sum(x.backward for x in own) * p for own, p in zip(spans, pace, strict=True)],
        [sum(x.update for x in own) * p for own, p in zip(spans, pace, strict=True)],
    )


def best_seconds(
    layers: Sequence[Layer], pace: Sequence[float], batches: int, schedules: Sequence[str]
) -> float:
    """The best step without replicas."""
    return min(
        shape_seconds(shape, layers, pace, batches)
        for shape in every_shape(len(layers), len(pace), schedules)
    )


def best_replicated_seconds(
    layers: Sequence[Layer], pace: Sequence[float], batches: int, schedules: Sequence[str]
) -> float:
    """The best step of any replicas of a pipeline, all cut alike, each on devices of its own."""
    best = best_seconds(layers, pace, batches, schedules)
    devices = range(len(pace))
    for stages in range(1, len(layers) + 1):
        for number in range(2, min(len(pace) // stages, batches) + 1):
            for order in itertools.permutations(devices, stages * number):
                rows = [order[r * stages : (r + 1) * stages] for r in range(number)]
                if list(rows) != sorted(rows):
                    continue
                for cut in itertools.combinations(range(1, len(layers)), stages - 1):
                    border = (0, *cut, len(layers))
                    for counts in _splits(batches, number):
                        for schedule in schedules:
                            ends = [
                                shape_seconds(Shape(tuple(row), border, schedule), layers, pace, count)
                                for row, count in zip(rows, counts, strict=True)
                            ]
                            best = min(best, max(ends))
    return best


def _splits(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in _splits(total - first, parts - 1):
            yield (first, *rest)
