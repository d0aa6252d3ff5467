"""Standing memory: what a placement holds when the forward pass is over.

Resident bytes, tensors kept to the end of the step and tensors saved for the backward pass, each on every
device that needs it then. What is freed on the way, workspaces and transfers in flight come on top: a peak
is the simulator's to tell. Where every tensor is kept, the standing bytes are the peak but for workspaces.
"""

import numpy as np

from loadmaster.core.arrays import Bools, Ints, Longs, offsets, sorted_unique
from loadmaster.core.graph import Graph, Phase, home_bytes
from loadmaster.core.problem import Problem
from loadmaster.placers._partition import NOWHERE, Standing, count_pins, loads_of
from loadmaster.placers.placement_units import Cargo


def load_standing(problem: Problem, cargo: Cargo) -> Standing:
    """The standing memory of a problem's units, as nets for the compiled search."""
    graph = problem.graph
    root, at_home = cargo.of_op[graph.tensor_op], home_bytes(graph)
    unit_bytes = np.zeros(cargo.num_units, dtype=np.int64)
    np.add.at(unit_bytes, cargo.of_op, graph.resident_bytes)
    np.add.at(unit_bytes, root[graph.keep], at_home[graph.keep])
    tensor, unit = _list_needs(graph, cargo)
    stays = graph.keep | (at_home == 0)  # at home: to the end of the step, or in what is resident anyway
    away = ~stays[tensor] | (root[tensor] != unit)
    tensor, unit = tensor[away], unit[away]
    alone = ~stays[tensor] & (np.bincount(tensor, minlength=graph.num_tensors)[tensor] == 1)
    np.add.at(unit_bytes, unit[alone], graph.tensor_bytes[tensor[alone]])
    tensor, unit = tensor[~alone], unit[~alone]
    used, net = np.unique(tensor, return_inverse=True)
    net_root = np.where(stays[used], root[used], NOWHERE).astype(np.int32)
    rooted = np.flatnonzero(net_root != NOWHERE)
    member, of_member = np.concatenate([unit, net_root[rooted]]), np.concatenate([net, rooted])
    return Standing(
        unit_bytes=unit_bytes,
        net_bytes=graph.tensor_bytes[used],
        net_root=net_root,
        pin_ptr=offsets(net.astype(np.int32), len(used)),
        pin=unit.astype(np.int32),
        net_ptr=offsets(np.sort(member).astype(np.int32), cargo.num_units),
        net=of_member[np.lexsort((of_member, member))].astype(np.int32),
    )


def _list_needs(graph: Graph, cargo: Cargo) -> tuple[Longs, Longs]:
    """Distinct pairs (tensor, unit), sorted, such that the tensor stands where the unit is."""
    counted = graph.tensor_storage >= 0
    used = (graph.keep[graph.use_tensor] | _is_saved(graph)) & counted[graph.use_tensor]
    tensors, units = [graph.use_tensor[used]], [cargo.of_op[graph.use_op[used]]]
    stands, looks_into = graph.keep & counted, _view_sources(graph)
    stands[tensors[0]] = True
    fresh = np.flatnonzero(stands)
    while len(views := fresh[looks_into[fresh] != fresh]):  # where it is made, a view prolongs what it sees
        tensors.append(looks_into[views])
        units.append(cargo.of_op[graph.tensor_op[views]])
        fresh = np.unique(tensors[-1][~stands[tensors[-1]]])
        stands[fresh] = True
    num = cargo.num_units
    pair = sorted_unique(np.concatenate(tensors).astype(np.int64) * num + np.concatenate(units))
    return pair // num, pair % num


def _view_sources(graph: Graph) -> Ints:
    """[T] what a view was made from: its op's input of the same storage, else its base; others themselves."""
    base, own = graph.tensor_storage, np.arange(graph.num_tensors, dtype=np.int32)
    found = np.where(base >= 0, base, own)
    views = np.flatnonzero(found != own)
    if len(views) and graph.num_uses:
        stride = graph.num_tensors + 1  # of storages, one of which is none
        key = graph.use_op.astype(np.int64) * stride + base[graph.use_tensor] + 1
        order = np.argsort(key, kind="stable")
        wanted = graph.tensor_op[views].astype(np.int64) * stride + base[views] + 1
        at = np.minimum(np.searchsorted(key[order], wanted), graph.num_uses - 1)
        read = key[order[at]] == wanted
        found[views[read]] = graph.use_tensor[order[at[read]]]
    return found


def _is_saved(graph: Graph) -> Bools:
    """[uses] whether a tensor of the forward pass is used after it."""
    later = np.isin(graph.phase, (Phase.BACKWARD, Phase.UPDATE))
    return later[graph.use_op] & ~later[graph.tensor_op[graph.use_tensor]]


def standing_bytes(standing: Standing, device: Ints, num_devices: int) -> Longs:
    """[D] bytes standing on each device when unit u is on `device[u]`."""
    load: Longs = loads_of(standing, device, count_pins(standing, device, num_devices))[0]
    return load


def running_bytes(problem: Problem, cargo: Cargo, *, workspace: bool) -> Longs:
    """[U] the most that one op of a unit needs while it runs: tensors that do not stay, and workspace."""
    most = np.zeros(cargo.num_units, dtype=np.int64)
    np.maximum.at(most, cargo.of_op, op_running_bytes(problem.graph, workspace=workspace))
    return most


def op_running_bytes(graph: Graph, *, workspace: bool) -> Longs:
    """[N] what an op needs while it runs: tensors that do not stay, and workspace."""
    gone = ~graph.keep & (graph.tensor_storage == np.arange(graph.num_tensors))
    gone &= graph.phase[graph.tensor_op] != Phase.PARAM
    gone[graph.use_tensor[_is_saved(graph)]] = False
    need = graph.workspace_bytes.copy() if workspace else np.zeros(graph.num_ops, dtype=np.int64)
    np.add.at(need, graph.tensor_op[gone], graph.tensor_bytes[gone])
    reads = gone[graph.use_tensor]
    np.add.at(need, graph.use_op[reads], graph.tensor_bytes[graph.use_tensor[reads]])
    return need
