"""The split files of msr-fiddle/dnn-partitioning: where the authors' experts put each op."""

from collections.abc import Sequence

import msgspec
import numpy as np

from loadmaster.core.arrays import Ints
from loadmaster.core.errors import PlanError
from loadmaster.core.graph import NO_GROUP, Graph
from loadmaster.core.problem import Workload
from loadmaster.graph.formats import msr
from loadmaster.graph.formats._records import decode

_NOWHERE = -1  # an op a split file does not name


class _Part(msgspec.Struct):
    nodes: list[int]


class _Split(msgspec.Struct):
    fpgas: list[_Part]
    cpus: list[_Part] = []


def ids_in_op_order(data: bytes) -> list[int]:
    """The file's id of each op of the graph that `read` makes, for `read_split`."""
    file = msr._parse_file(data)
    _, row = msr._build_graph(file, "")
    return [file.nodes[at].id for at in row]


def read_split(data: bytes, workload: Workload, *, ids: Sequence[int]) -> Ints:
    """Device [N] of each op from a split file; ops it leaves out follow their colour class.

    Accelerator i is device i, CPUs come after them.
    """
    split = decode(data, _Split, what="an msr split")
    if workload.cluster is None or len(ids) != workload.graph.num_ops:
        raise PlanError(f"{len(ids)} ids do not belong to this graph; take both from one msr file")
    kind = workload.cluster.kind
    device = np.full(len(ids), _NOWHERE, dtype=np.int32)
    op_of = {own_id: op for op, own_id in enumerate(ids)}
    for label, parts, column in (("fpgas", split.fpgas, msr._ACCELERATOR), ("cpus", split.cpus, msr._CPU)):
        devices = np.flatnonzero(kind == column).tolist()
        for at, part in enumerate(parts):
            if part.nodes and at >= len(devices):
                raise PlanError(f"{label}[{at}] has ops, but the cluster has {len(devices)} {label}")
            for own_id in part.nodes:
                _set_device(device, op_of, own_id, devices[at], f"{label}[{at}]")
    return _fill_colour_classes(device, workload.graph, ids)


def _set_device(device: Ints, op_of: dict[int, int], own_id: int, to: int, label: str) -> None:
    """Set one op's device; `device` is the array under construction."""
    op = op_of.get(own_id)
    if op is None:
        raise PlanError(f"{label} names node {own_id}, which the graph does not have")
    if device[op] not in (_NOWHERE, to):
        raise PlanError(f"node {own_id} is on two devices, {device[op]} and {to}; name it once")
    device[op] = to


def _fill_colour_classes(device: Ints, graph: Graph, ids: Sequence[int]) -> Ints:
    """The devices, ops without one on the device of their colour class."""
    of_group: dict[int, int] = {}
    for group, own in zip(graph.group.tolist(), device.tolist(), strict=True):
        if group != NO_GROUP and own != _NOWHERE and of_group.setdefault(group, own) != own:
            raise PlanError(
                f"colour class {group} is on devices {of_group[group]} and {own}; it is not split"
            )
    result = device.copy()
    for op in np.flatnonzero(device == _NOWHERE).tolist():
        result[op] = of_group.get(int(graph.group[op]), _NOWHERE)
        if result[op] == _NOWHERE:
            raise PlanError(f"node {ids[op]} has no device, nor has any node of its colour class; add it")
    return result
