"""Actions: what may be chosen for a group: devices, how they share its work, and how gradients meet.

Device sets are generated: each device, each kind, each host, prefixes by speed, unions of up to four
classes of like devices, and all. A state of a search is one action for each group; `strategy_of` makes
the noun of it.
"""

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from loadmaster.core.arrays import Floats, Ints
from loadmaster.core.cluster import Cluster
from loadmaster.core.graph import Phase
from loadmaster.core.problem import Problem
from loadmaster.core.strategy import Mode, OpGroup, Strategy, Sync
from loadmaster.strategies.splitting.forms import Splits
from loadmaster.strategies.splitting.semantics import find_semantics

MOST_CLASSES = 4
MOST_SETS = 48


@dataclass(frozen=True, slots=True)
class Action:
    """A way to run one group."""

    devices: tuple[int, ...]
    mode: Mode
    sync: Sync = Sync.NONE
    server: int = -1


def device_classes(cluster: Cluster) -> list[tuple[int, ...]]:
    """Devices of one kind and memory, whatever their host, slowest rate last."""
    found: dict[tuple[int, int], list[int]] = {}
    for d in range(cluster.num_devices):
        found.setdefault((int(cluster.kind[d]), int(cluster.memory_bytes[d])), []).append(d)
    return [tuple(devices) for _, devices in sorted(found.items(), key=lambda item: item[1][0])]


def device_sets(cluster: Cluster, seconds: Floats) -> list[tuple[int, ...]]:
    """Sets worth a try; `seconds` [D] of the whole step on each device orders them by speed."""
    classes = device_classes(cluster)
    found: dict[tuple[int, ...], None] = {tuple(range(cluster.num_devices)): None}
    for size in range(len(classes), 0, -1) if len(classes) <= MOST_CLASSES else (1,):
        for chosen in combinations(classes, size):
            found[tuple(sorted(d for one in chosen for d in one))] = None
    for host in sorted(set(cluster.host.tolist())):
        found[tuple(np.flatnonzero(cluster.host == host).tolist())] = None
        for one in classes:
            inside = tuple(d for d in one if cluster.host[d] == host)
            if inside:
                found[inside] = None
    order = np.argsort(seconds, kind="stable").tolist()
    count = 1
    while count < cluster.num_devices:
        found[tuple(sorted(order[:count]))] = None
        count *= 2
    singles = [(d,) for d in order]
    several = [devices for devices in found if len(devices) > 1]
    return [*several[: max(MOST_SETS - len(singles), 8)], *singles]


def list_actions(problem: Problem) -> tuple[Action, ...]:
    """Every action: sets of several devices replicate, by sum or server, or duplicate; single ones place."""
    finite = np.where(np.isfinite(problem.costs.compute_s), problem.costs.compute_s, np.inf)
    total = np.where(np.isinf(finite).any(axis=0), np.inf, finite.sum(axis=0))[problem.cluster.kind]
    trains = bool((problem.graph.phase == Phase.UPDATE).any())
    actions: list[Action] = []
    for devices in device_sets(problem.cluster, total):
        if len(devices) == 1:
            actions.append(Action(devices, Mode.PLACE))
            continue
        actions.append(Action(devices, Mode.REPLICATE, Sync.ALLREDUCE if trains else Sync.NONE))
        if trains:
            server = min(devices, key=lambda d: (total[d], d))
            actions.append(Action(devices, Mode.REPLICATE, Sync.PS, server))
        actions.append(Action(devices, Mode.DUPLICATE))
    return tuple(actions)


def strategy_of(
    problem: Problem,
    splits: Splits,
    group_of: Ints,
    chosen: list[Action],
    rows: dict[tuple[int, ...], tuple[int, ...]],
    factors: frozenset[int],
    name: str,
) -> Strategy:
    """The noun: groups with their rows, those of equal actions joined; devices without rows are left out."""
    joined: dict[tuple[Action, tuple[int, ...]], list[int]] = {}
    for g, action in enumerate(chosen):
        joined.setdefault((action, rows.get(action.devices, ())), []).append(g)
    groups = []
    for (action, given), members in joined.items():
        ops = np.flatnonzero(np.isin(group_of, members)).astype(np.int32)
        groups.append(_group(action, given, ops, splits.batch, factors))
    made = Strategy(
        name=name,
        graph_digest=problem.graph.digest,
        cluster_digest=problem.cluster.digest,
        batch=splits.batch,
        groups=tuple(groups),
    )
    semantics = find_semantics(made, splits)
    return Strategy(name, made.graph_digest, made.cluster_digest, made.batch, made.groups, semantics)


def _group(action: Action, given: tuple[int, ...], ops: Ints, batch: int, factors: frozenset[int]) -> OpGroup:
    if action.mode == Mode.PLACE:
        return OpGroup(ops, action.devices, (batch,), Mode.PLACE)
    if action.mode == Mode.DUPLICATE:
        return OpGroup(ops, action.devices, (batch,) * len(action.devices), Mode.DUPLICATE)
    used = [(d, r) for d, r in zip(action.devices, given, strict=True) if r > 0]
    devices, rows = tuple(d for d, _ in used), tuple(r for _, r in used)
    if len(devices) == 1:
        return OpGroup(ops, devices, rows, Mode.PLACE)
    server = action.server if action.server in devices else (devices[0] if action.sync == Sync.PS else -1)
    mine = tuple(op for op in ops.tolist() if op in factors) if action.sync == Sync.ALLREDUCE else ()
    return OpGroup(ops, devices, rows, Mode.REPLICATE, action.sync, server, mine)
