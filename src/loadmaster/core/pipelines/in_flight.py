"""Pipelines of micro-batches: how many of them a stage holds at once, and the bytes they take there.

The graph is one micro-batch. Between its forward and its backward pass, stage s of S holds as many as the
schedule says: under `1f1b` S - s (the last stage one), under `gpipe` all of them. Of each it keeps its
*stash*: what its backward ops need of the forward pass. A stage that is *recomputed* keeps only what comes
into it, and one full set while it runs again (Tarnawski et al., "Piper: Multidimensional Planner for DNN
Parallelization", NeurIPS 2021: memory A y + B of y micro-batches).

A storage is counted whole, once, on every device where it is needed; a view stands for what it looks into.
"""

from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Bools, Ints, Longs, sorted_unique
from loadmaster.core.graph import NO_MIRROR, Graph, Phase, home_bytes
from loadmaster.core.plan import Plan


def find_mirrored_ops(graph: Graph) -> Bools:
    """[N] forward ops that a backward op mirrors: those that a recomputed stage runs again."""
    found = np.zeros(graph.num_ops, dtype=np.bool_)
    found[graph.mirror[graph.mirror != NO_MIRROR]] = True
    found[graph.phase != Phase.FORWARD] = False
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Stash:
    """Bytes on D devices."""

    each: Longs  # [D] of every micro-batch in flight
    once: Longs  # [D] beside what ops hold: what is made again, copies of weights and of gradients
    again: Longs  # [D] of `each`, what is kept for recomputation alone


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """Pairs (storage, device) of what backward passes need, as storage * D + device."""

    pair: Longs  # sorted
    made: Bools  # made again on that device instead of being kept
    saved: Bools  # needed without recomputation too


def find_kept(graph: Graph, device: Ints, recompute: Bools, num_devices: int) -> Kept:
    """What is kept of a micro-batch, and where, when op n is on `device[n]`."""
    root, num = graph.tensor_storage, num_devices
    counted = root[graph.use_tensor] >= 0
    base, user = root[graph.use_tensor][counted], graph.use_op[counted]
    maker, where = graph.tensor_op[base], device[user]
    later = np.isin(graph.phase, (Phase.BACKWARD, Phase.UPDATE))
    kept = kept_storages(graph)
    forward = graph.phase[maker] == Phase.FORWARD
    homes = np.flatnonzero(kept & (graph.phase[graph.tensor_op] == Phase.FORWARD)).astype(np.int32)
    needs = forward & (later[user] | kept[base])
    saved = sorted_unique(
        np.concatenate(
            [
                _distinct_pairs(base[needs], where[needs], num),
                _distinct_pairs(homes, device[graph.tensor_op[homes]], num),
            ]
        )
    )
    rerun = forward & recompute[user]
    pair = sorted_unique(np.concatenate([saved, _distinct_pairs(base[rerun], where[rerun], num)]))
    tensor, at = pair // num, pair % num
    op = graph.tensor_op[tensor]
    return Kept(pair, recompute[op] & (device[op] == at) & ~kept[tensor], np.isin(pair, saved))


def stash_of(graph: Graph, device: Ints, recompute: Bools, num_devices: int) -> Stash:
    """What micro-batches keep on each device when op n is on `device[n]`."""
    num, found = num_devices, find_kept(graph, device, recompute, num_devices)
    tensor, at, made = found.pair // num, found.pair % num, found.made
    copies = _find_copies(graph, device, num)
    size = graph.tensor_bytes
    return Stash(
        each=_sum_by_device(at[~made], size[tensor[~made]], num),
        once=_sum_by_device(at[made & found.saved], size[tensor[made & found.saved]], num)
        + _sum_by_device(copies % num, size[copies // num], num),
        again=_sum_by_device(at[~made & ~found.saved], size[tensor[~made & ~found.saved]], num),
    )


def _find_copies(graph: Graph, device: Ints, num: int) -> Longs:
    """Pairs of weights and kept gradients that backward or update ops need on another device."""
    root = graph.tensor_storage
    counted = root[graph.use_tensor] >= 0
    base, user = root[graph.use_tensor][counted], graph.use_op[counted]
    maker, where = graph.tensor_op[base], device[user]
    later = np.isin(graph.phase, (Phase.BACKWARD, Phase.UPDATE))
    away = where != device[maker]
    away &= ((graph.phase[maker] == Phase.PARAM) | (later[maker] & kept_storages(graph)[base])) & later[user]
    return sorted_unique(_distinct_pairs(base[away], where[away], num))


def kept_storages(graph: Graph) -> Bools:
    """[T] storages that live to the end of the step, a view's base where the view does."""
    kept = np.zeros(graph.num_tensors, dtype=np.bool_)
    root = graph.tensor_storage[graph.keep]
    kept[root[root >= 0]] = True
    return kept


def settled_bytes(graph: Graph) -> Longs:
    """[N] bytes that an op holds whatever is in flight: resident, and what its backward ops keep."""
    held = graph.resident_bytes.copy()
    grown = grown_storages(graph)
    np.add.at(held, graph.tensor_op[grown], home_bytes(graph)[grown])
    return held


def grown_storages(graph: Graph) -> Bools:
    """[T] kept storages of the backward pass: gradients, which add up over micro-batches."""
    later = np.isin(graph.phase[graph.tensor_op], (Phase.BACKWARD, Phase.UPDATE))
    return kept_storages(graph) & later


def _distinct_pairs(tensor: Ints, device: Ints, num: int) -> Longs:
    return tensor.astype(np.int64) * num + device


def _sum_by_device(at: Longs, size: Longs, num: int) -> Longs:
    total = np.zeros(num, dtype=np.int64)
    np.add.at(total, at, size)
    return total


def in_flight_at(plan: Plan, num_devices: int) -> Longs:
    """[D] micro-batches that each device holds, 1 without a pipeline."""
    held = np.ones(num_devices, dtype=np.int64)
    if plan.pipeline is not None:
        held[plan.device] = plan.pipeline.in_flight[plan.pipeline.stage]
    return held


def standing_bytes(graph: Graph, plan: Plan, num_devices: int) -> Longs:
    """[D] bytes that stand on each device of a pipeline: what ops hold, and the stash."""
    held = np.zeros(num_devices, dtype=np.int64)
    np.add.at(held, plan.device, settled_bytes(graph))
    stash = stash_of(graph, plan.device, plan.recompute, num_devices)
    total: Longs = held + in_flight_at(plan, num_devices) * stash.each + stash.once
    return total
