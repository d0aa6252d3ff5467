"""Device maps: Hugging Face's dict of modules and devices, from a plan and into one.

    {"transformer.wte": 0, "transformer.h.0": 0, "transformer.h.1": "cpu", "lm_head": "cpu"}

A map is coarser than a plan: a module is where its weights are, or most of its ops. GPUs are numbers, the
host is "cpu". A logical device is written as the device it is a part of, its limit is lost; a reader may name
devices as the cluster does ('cpu#1') as well.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from loadmaster.core.cluster import Cluster
from loadmaster.core.errors import PlanError
from loadmaster.core.graph import NO_MIRROR, Graph, Phase, units

if TYPE_CHECKING:
    from loadmaster.core.arrays import Ints

_GPU = re.compile(r"(?:gpu|cuda:)([0-9]+)")
LOSS = "loss"  # the module of ops that are not the model's own
DeviceMap = dict[str, int | str]


def make_device_map(graph: Graph, device: "Ints", cluster: Cluster) -> DeviceMap:
    """The devices of all modules with weights; a subtree that is on one device is one entry."""
    votes: dict[str, Counter[int]] = {}
    for op in _weight_ops(graph):
        bytes_there = max(1, int(graph.resident_bytes[op]))
        module = graph.op_name[op].rpartition(".")[0]
        votes.setdefault(module, Counter())[int(device[op])] += bytes_there
    if not votes:
        raise PlanError(f"graph {graph.name!r} has no weights of modules, so it has no device map")
    inner = {head for module in graph.module for head in _path_prefixes(module)[:-1]}
    bare: dict[str, Counter[int]] = {}  # modules with ops only: a tied weight has its other name there
    for op in np.flatnonzero(graph.phase == Phase.FORWARD).tolist():
        module = graph.module[op]
        if module and module not in inner and module not in votes and module != LOSS:
            bare.setdefault(module, Counter())[int(device[op])] += 1
    own = {module: count.most_common(1)[0][0] for module, count in (votes | bare).items()}
    own = dict(sorted(own.items(), key=_module_sort_key(graph)))
    names = [_external_device_name(cluster, at) for at in range(cluster.num_devices)]
    return {path: names[at] for path, at in _merge_subtrees(own, graph).items()}


def _module_sort_key(graph: Graph) -> Callable[[tuple[str, int]], list[tuple[int, int]]]:
    """A key for (module, device): parts of a module by their numbers, else as they first run."""
    first: dict[str, int] = {}
    reads = zip(graph.tensor_op[graph.use_tensor].tolist(), graph.use_op.tolist(), strict=True)
    of_weight = {graph.op_name[maker].rpartition(".")[0]: op for maker, op in reversed([*reads])}
    ran = {graph.module[op]: op for op in reversed(np.flatnonzero(graph.phase == Phase.FORWARD).tolist())}
    for module, op in (*of_weight.items(), *ran.items()):
        for path in _path_prefixes(module):
            first[path] = min(op, first.get(path, op))

    def key(item: tuple[str, int]) -> list[tuple[int, int]]:
        ends = [(path.rpartition(".")[2], path) for path in _path_prefixes(item[0])]
        return [
            (0, int(end)) if end.isdecimal() else (1, first.get(path, graph.num_ops)) for end, path in ends
        ]

    return key


def _merge_subtrees(own: Mapping[str, int], graph: Graph) -> dict[str, int]:
    """As few entries as cover every weight: a path whose whole subtree agrees stands for it.

    A module with weights of its own beside those of parts elsewhere is written weight by weight.
    """
    below: dict[str, set[int]] = {}
    for module, at in own.items():
        for path in _path_prefixes(module):
            below.setdefault(path, set()).add(at)
    found: dict[str, int] = {}
    weights = [graph.op_name[op] for op in _weight_ops(graph)]
    for module, at in own.items():
        whole = next((path for path in _path_prefixes(module) if len(below[path]) == 1), None)
        if whole is not None:
            found[whole] = at
            continue
        found |= {name: at for name in weights if name.rpartition(".")[0] == module}
    return found


def _weight_ops(graph: Graph) -> list[int]:
    """The ops that are weights and buffers."""
    found: list[int] = np.flatnonzero(graph.phase == Phase.PARAM).tolist()
    return [op for op in found if graph.op_kind[op] != "constant"]


def _external_device_name(cluster: Cluster, at: int) -> int | str:
    """What others call a device: a GPU's number, or 'cpu'."""
    if cluster.on_host[cluster.kind[at]]:
        return "cpu"
    head = cluster.device_name[at].split("/")[-1].partition("#")[0]
    match = _GPU.fullmatch(head)
    return int(match[1]) if match else head


def devices_of(device_map: Mapping[str, int | str], graph: Graph, cluster: Cluster) -> "Ints":
    """[N] the device of every op under a map; what it does not name goes with the ops around."""
    if not isinstance(device_map, Mapping) or not device_map:
        raise PlanError(f"a device map is a dict of modules and devices, not {device_map!r}")
    where = {str(path): _find_device(cluster, value, str(path)) for path, value in device_map.items()}
    known, runs = (
        {path for name in (*graph.module, *graph.op_name) for path in _path_prefixes(name)},
        {*graph.module},
    )
    unknown = sorted(  # a part that runs no op (a dropout inside of attention) is no mistake
        path for path in where if path not in known and path.rpartition(".")[0] not in runs
    )
    if unknown:
        raise PlanError(f"the device map names {unknown[0]!r}, which graph {graph.name!r} does not have")
    device = np.full(graph.num_ops, -1, dtype=np.int32)
    for op in range(graph.num_ops):
        weight = graph.phase[op] in (Phase.PARAM, Phase.UPDATE)
        path = graph.op_name[op] if weight else graph.module[op]
        device[op] = next((where[head] for head in reversed(_path_prefixes(path)) if head in where), -1)
    uncovered = [op for op in range(graph.num_ops) if graph.op_kind[op] == "param" and device[op] < 0]
    if uncovered:
        raise PlanError(
            f"the device map does not mention weight {graph.op_name[uncovered[0]]!r}; add its module"
        )
    return _align_groups(graph, _fill_from_neighbours(graph, device))


def _path_prefixes(path: str) -> list[str]:
    """'a.b.c' -> '', 'a', 'a.b', 'a.b.c'."""
    parts = path.split(".") if path else []
    return [".".join(parts[:depth]) for depth in range(len(parts) + 1)]


def _find_device(cluster: Cluster, value: object, path: str) -> int:
    """The device of a cluster that a map's value means."""
    text = str(value)
    if text in cluster.device_name:
        return cluster.device_name.index(text)
    names = [_external_device_name(cluster, at) for at in range(cluster.num_devices)]
    wanted = int(text.removeprefix("cuda:")) if text.removeprefix("cuda:").isdecimal() else text
    found = [at for at, name in enumerate(names) if name == wanted]
    if len(found) == 1:
        return found[0]
    has = ", ".join(cluster.device_name)
    if found:
        raise PlanError(
            f"the device map has {path!r} on {text!r}, which {has} are parts of; name one of them"
        )
    hint = "; what was to be on disk can be on the host" if text == "disk" else ""
    raise PlanError(f"the device map has {path!r} on {text!r}, the devices are {has}{hint}")


def _fill_from_neighbours(graph: Graph, device: "Ints") -> "Ints":
    """Ops that no entry covers are where their mirror, or their first input, is."""
    device = device.copy()
    first = np.full(graph.num_ops, -1, dtype=np.int64)
    for tensor, op in zip(graph.use_tensor.tolist(), graph.use_op.tolist(), strict=True):
        maker = int(graph.tensor_op[tensor])
        if first[op] < 0 or (graph.phase[first[op]] == Phase.PARAM != graph.phase[maker]):
            first[op] = maker
    for op in range(graph.num_ops):
        if device[op] < 0 and graph.mirror[op] != NO_MIRROR:
            device[op] = device[graph.mirror[op]]
        if device[op] < 0 and first[op] >= 0:
            device[op] = device[first[op]]
    for op in range(graph.num_ops - 1, -1, -1):  # inputs: where they are first read
        if device[op] < 0:
            readers = graph.use_op[graph.tensor_op[graph.use_tensor] == op]
            device[op] = device[int(readers.min())] if len(readers) else 0
    return device


def _align_groups(graph: Graph, device: "Ints") -> "Ints":
    """Ops of one group are where the first of them with a weight, else the first, is."""
    unit, num = units(graph)
    home = np.full(num, -1, dtype=np.int32)
    for wanted in (Phase.PARAM, None):
        for op in range(graph.num_ops):
            if home[unit[op]] < 0 and (wanted is None or graph.phase[op] == wanted):
                home[unit[op]] = device[op]
    return home[unit]
