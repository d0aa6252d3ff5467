"""Settings: a problem changed as a user words it, for `whatif` and for the changes that `explain` tries.

    gpu1.memory=24GB  gpu1.reserve=1GiB  gpu1.speed=2x       a device (speed: twice as fast at every op)
    gpu0-gpu1.rate=32GB  gpu0-gpu1.rate=2x  gpu0-gpu1.latency=5us    all links between two devices, both ways
    'pcie4 host0->gpu1'.rate=2x                              one link, by its name

A value with x is a factor of what is there. Devices are added as `cluster` words and hang on buses of their
own. A batch, a length, an optimizer or a precision needs the source again: a captured graph remembers it.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from loadmaster.capacity.clusters import with_devices
from loadmaster.cluster.parse import parse_cluster
from loadmaster.core.arrays import Ints
from loadmaster.core.cluster import NO_LINK, UNLIMITED_BYTES, Cluster
from loadmaster.core.errors import InputError, ProblemError, UnknownNameError
from loadmaster.core.plan import Plan
from loadmaster.core.problem import FREE, Origin, Problem
from loadmaster.core.question import Question
from loadmaster.core.run import ignore_progress
from loadmaster.core.units import parse_bytes, parse_seconds
from loadmaster.cost.roofline import roofline_costs
from loadmaster.graph.origin import origin_of
from loadmaster.questions.problem import build_problem

_FACTOR = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*[x×]\s*")
_OF_DEVICE = ("memory", "reserve", "speed")
_OF_LINK = ("rate", "latency")
_NO_DEVICE = -1


@dataclass(frozen=True, slots=True)
class Settings:
    """What is to be different; empty: nothing."""

    sets: tuple[str, ...] = ()  # 'gpu1.memory=24GB'
    add: tuple[str, ...] = ()  # '1xA100-80GB'
    remove: tuple[str, ...] = ()  # devices
    batch: int | None = None
    seq: int | None = None
    optimizer: str | None = None
    precision: str | None = None

    @property
    def needs_source(self) -> bool:
        """Whether the model has to be captured again."""
        return any(each is not None for each in (self.batch, self.seq, self.optimizer, self.precision))

    def __str__(self) -> str:
        """In the words of the command line."""
        words = [
            *self.sets,
            *(f"add {each}" for each in self.add),
            *(f"remove {each}" for each in self.remove),
        ]
        for name in ("batch", "seq", "optimizer", "precision"):
            value = getattr(self, name)
            words += [f"{name}={value}"] if value is not None else []
        return ", ".join(words) or "as it is"


@dataclass(frozen=True, slots=True, eq=False)
class Changed:
    """A changed problem, and which of its devices an old one is."""

    problem: Problem
    device_of: Ints  # [old D] or -1
    notes: tuple[str, ...]

    def carry(self, old: Problem, plan: Plan) -> Plan | None:
        """An old plan in the changed problem; None where its ops or its devices are gone."""
        if self.problem.graph.op_name != old.graph.op_name:
            return None
        device = self.device_of[plan.device]
        if (device == _NO_DEVICE).any():
            return None
        return replace(plan, device=device)


def change_problem(
    problem: Problem, settings: Settings, *, progress: Callable[[str, float], None] = ignore_progress
) -> Changed:
    """The problem with everything as the settings say."""
    notes: list[str] = []
    if settings.needs_source:
        problem, told = _capture_again(problem, settings, progress)
        notes += told
    device_of = np.arange(problem.cluster.num_devices, dtype=np.int32)
    for text in settings.sets:
        problem = _set(problem, text)
    for name in settings.remove:
        problem, kept = _remove(problem, name)
        device_of = np.where(device_of == kept, _NO_DEVICE, device_of - (device_of > kept)).astype(np.int32)
    for text in settings.add:
        problem, told = _add(problem, text)
        notes += told
    return Changed(problem, device_of, tuple(notes))


# ---- a value of a device or a link


def _set(problem: Problem, text: str) -> Problem:
    left, equals, value = text.rpartition("=")
    target, dot, field = left.strip().strip("'\"").rpartition(".")
    target = target.strip().strip("'\"")
    if not (equals and dot and target and field and value.strip()):
        raise InputError(f"{text!r} sets nothing; write for example gpu1.memory=24GB or gpu0-gpu1.rate=2x")
    cluster = problem.cluster
    if target in cluster.device_name:
        return _set_device(problem, cluster.device_name.index(target), field, value.strip(), text)
    links = _find_links(cluster, target)
    if not links:
        raise UnknownNameError("device or link", target, (*cluster.device_name, *cluster.link_name))
    return replace(problem, cluster=_set_links(cluster, links, field, value.strip(), text))


def _set_device(problem: Problem, device: int, field: str, value: str, text: str) -> Problem:
    cluster = problem.cluster
    if field == "speed":
        return _set_speed(problem, device, _parse_factor(value, text))
    if field not in _OF_DEVICE:
        raise UnknownNameError("setting of a device", field, _OF_DEVICE)
    column = (cluster.memory_bytes if field == "memory" else cluster.reserve_bytes).copy()
    factor = _FACTOR.fullmatch(value)
    new = float(column[device]) * float(factor[1]) if factor else parse_bytes(value)
    if value.lower() == "unlimited":
        new = UNLIMITED_BYTES
    column[device] = int(min(new, UNLIMITED_BYTES))
    changed = (
        replace(cluster, memory_bytes=column) if field == "memory" else replace(cluster, reserve_bytes=column)
    )
    return replace(problem, cluster=changed)


def _parse_factor(value: str, text: str) -> float:
    match = _FACTOR.fullmatch(value)
    if match is None or float(match[1]) <= 0:
        raise InputError(f"{text!r}: a speed is a factor; write for example gpu1.speed=2x")
    return float(match[1])


def _set_speed(problem: Problem, device: int, factor: float) -> Problem:
    """A kind of its own for the device, so much faster at every op."""
    cluster, costs, at = problem.cluster, problem.costs, int(problem.cluster.kind[device])
    kind = cluster.kind.copy()
    kind[device] = len(cluster.kind_name)
    faster = replace(
        cluster,
        kind=kind,
        kind_name=(*cluster.kind_name, f"{cluster.kind_name[at]} x{factor:g}"),
        flops_per_s=np.concatenate([cluster.flops_per_s, cluster.flops_per_s[at : at + 1] * factor]),
        memory_bytes_per_s=np.append(cluster.memory_bytes_per_s, cluster.memory_bytes_per_s[at] * factor),
        overhead_s=np.append(cluster.overhead_s, cluster.overhead_s[at] / factor),
        on_host=np.append(cluster.on_host, cluster.on_host[at]),
    )
    column = costs.compute_s[:, at : at + 1] / factor
    return replace(
        problem,
        cluster=faster,
        costs=replace(costs, compute_s=np.concatenate([costs.compute_s, column], axis=1)),
    )


def _find_links(cluster: Cluster, target: str) -> list[int]:
    """One link by name, or all on the routes between two devices, both ways."""
    if target in cluster.link_name:
        return [at for at, name in enumerate(cluster.link_name) if name == target]
    for at in range(1, len(target)):
        pair = target[:at], target[at + 1 :]
        if target[at] == "-" and all(name in cluster.device_name for name in pair):
            i, j = (cluster.device_name.index(name) for name in pair)
            both = np.concatenate([cluster.route[i, j], cluster.route[j, i]])
            return sorted(set(both[both != NO_LINK].tolist()))
    return []


def _set_links(cluster: Cluster, links: list[int], field: str, value: str, text: str) -> Cluster:
    if field not in _OF_LINK:
        raise UnknownNameError("setting of a link", field, _OF_LINK)
    column = (cluster.link_bytes_per_s if field == "rate" else cluster.link_latency_s).copy()
    factor = _FACTOR.fullmatch(value)
    if factor:
        column[links] = column[links] * float(factor[1])
    else:
        column[links] = (
            float(parse_bytes(value.removesuffix("/s"))) if field == "rate" else parse_seconds(value)
        )
    if field == "rate" and (column[links] <= 0).any():
        raise InputError(f"{text!r}: a rate is above 0")
    if field == "rate":
        return replace(cluster, link_bytes_per_s=column)
    return replace(cluster, link_latency_s=column)


# ---- devices more or fewer


def _add(problem: Problem, text: str) -> tuple[Problem, list[str]]:
    extra = parse_cluster(text)
    before = problem.cluster
    cluster = with_devices(before, extra)
    kinds = len(before.kind_name)
    costs, notes = problem.costs, list[str]()
    if len(cluster.kind_name) > kinds:
        guess = roofline_costs(problem.graph, cluster).compute_s[:, kinds:]
        costs = replace(costs, compute_s=np.concatenate([costs.compute_s, guess], axis=1))
        new = ", ".join(cluster.kind_name[kinds:])
        if (costs.origin == Origin.MEASURED).any():
            notes.append(f"times on {new} are estimates from its peak rates, the others are measured")
        elif (costs.origin == Origin.GIVEN).any():
            notes.append(f"times on {new} are estimates from its peak rates, the others are the source's own")
    return replace(problem, cluster=cluster, costs=costs), notes


def _remove(problem: Problem, name: str) -> tuple[Problem, int]:
    cluster = problem.cluster
    if name not in cluster.device_name:
        raise UnknownNameError("device", name, cluster.device_name)
    if cluster.num_devices == 1:
        raise ProblemError(f"{name} is the only device; nothing is left without it")
    gone = cluster.device_name.index(name)
    if (problem.pinned == gone).any():
        raise ProblemError(f"ops are pinned to {name}; it cannot be removed")
    keep = np.flatnonzero(np.arange(cluster.num_devices) != gone)
    smaller = replace(
        cluster,
        name=f"{cluster.name} without {name}",
        device_name=tuple(cluster.device_name[at] for at in keep),
        kind=cluster.kind[keep],
        host=cluster.host[keep],
        engine=cluster.engine[keep],
        memory_bytes=cluster.memory_bytes[keep],
        reserve_bytes=cluster.reserve_bytes[keep],
        route=cluster.route[np.ix_(keep, keep)],
    )
    pinned = np.where(problem.pinned > gone, problem.pinned - 1, problem.pinned)
    return replace(problem, cluster=smaller, pinned=np.where(problem.pinned == FREE, FREE, pinned)), gone


# ---- the source again


def _capture_again(
    problem: Problem, settings: Settings, progress: Callable[[str, float], None]
) -> tuple[Problem, list[str]]:
    origin = origin_of(problem.graph)
    if origin is None:
        raise InputError(
            f"graph {problem.graph.name!r} does not say what it was captured from, so that batch, seq,"
            " optimizer"
            " and precision cannot be changed; plan the source itself: loadmaster plan SOURCE --batch N"
        )
    source, asked = origin
    fields: dict[str, Any] = {
        name: asked.get(name) for name in ("batch", "seq", "optimizer", "target", "assume", "accumulation")
    }
    fields |= {"precision": asked.get("precision", "fp32"), "capture_path": asked.get("path")}
    for name in ("batch", "seq", "optimizer", "precision"):
        if getattr(settings, name) is not None:
            fields[name] = getattr(settings, name)
    measured = bool((problem.costs.origin == Origin.MEASURED).any())
    if fields["batch"] is not None and fields["batch"] < 1:
        raise InputError(f"batch is {fields['batch']}; give a whole number >= 1")
    progress(f"capturing {source}", 0.0)
    question = Question(
        source,
        problem.cluster,
        problem.objective,
        links=problem.links,
        split=problem.split,
        load=problem.load,
        pipeline=problem.pipeline,
        costs="measured" if measured else "roofline",
        **fields,
    )
    found = build_problem(question, progress=progress)
    return _with_pins(problem, found), []


def _with_pins(old: Problem, new: Problem) -> Problem:
    """Pins go with the names of ops."""
    if (old.pinned == FREE).all():
        return new
    at = {name: int(where) for name, where in zip(old.graph.op_name, old.pinned, strict=True)}
    pinned = np.array([at.get(name, FREE) for name in new.graph.op_name], dtype=np.int32)
    return replace(new, pinned=pinned)
