"""Steady-state time per sample of a pipelined split: the busiest device or link.

Under `Links.HOST` this is problem T of Tarnawski et al., NeurIPS 2020: every transfer goes through
host memory; an accelerator pays for each outside tensor it reads, once, and for each of its tensors
that anybody else reads, once; host-side devices pay for compute only. How the three add up is
`Problem.load`. Under the other link models devices and links are separate resources.
Ops that are recomputed run twice.
"""

from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Floats, Ints, sorted_unique
from loadmaster.core.plan import Plan
from loadmaster.core.problem import Links, Load, Problem
from loadmaster.cost.transfer import route_bytes_per_s, route_latency_s


@dataclass(frozen=True, slots=True, eq=False)
class Loads:
    """Seconds per sample of every resource."""

    compute_s: Floats  # [D]
    read_s: Floats  # [D]
    write_s: Floats  # [D]
    load_s: Floats  # [D] how they add up on the device
    link_s: Floats  # [L] under Links.SHARED, else zeros
    time_s: float


def steady_state(problem: Problem, plan: Plan) -> Loads:
    """Loads of a plan, and the largest of them."""
    graph, cluster, device = problem.graph, problem.cluster, plan.device
    num = cluster.num_devices
    compute = np.zeros(num)
    once_s = problem.costs.compute_s[np.arange(graph.num_ops), cluster.kind[device]]
    np.add.at(compute, device, np.where(plan.recompute, 2.0 * once_s, once_s))
    tensor, target = _list_transfers(problem, device)
    source = device[graph.tensor_op[tensor]]
    reads, writes, links = np.zeros(num), np.zeros(num), np.zeros(cluster.num_links)
    if problem.links == Links.HOST:
        on_host = cluster.on_host[cluster.kind]
        np.add.at(reads, target, hop_s(problem, tensor, target, to_host=False))
        once = sorted_unique(tensor.astype(np.int64)).astype(np.int32)
        owner = device[graph.tensor_op[once]]
        np.add.at(writes, owner, hop_s(problem, once, owner, to_host=True))
        reads[on_host] = writes[on_host] = 0.0
        load = combine_loads(problem.load, compute, reads, writes)
        return Loads(
            compute, reads, writes, load, links, max(float(load.max()), _busiest_engine_s(problem, compute))
        )
    seconds = _transfer_s(problem, tensor, source, target)
    np.add.at(reads, target, seconds)
    np.add.at(writes, source, seconds)
    busiest = _busiest_engine_s(problem, compute)
    if problem.links == Links.SHARED and len(tensor):
        for hop in range(cluster.route.shape[2]):
            link = cluster.route[source, target, hop]
            np.add.at(links, link[link >= 0], seconds[link >= 0])
        busiest = max(busiest, float(links.max()))
    elif problem.links == Links.HALF_DUPLEX:
        busiest = max(busiest, float((reads + writes).max()))
    return Loads(compute, reads, writes, compute, links, busiest)


def _busiest_engine_s(problem: Problem, compute: Floats) -> float:
    """Seconds of the busiest engine: its devices compute one after the other."""
    _, engine = np.unique(problem.cluster.engine, return_inverse=True)
    total = np.zeros(len(compute))
    np.add.at(total, engine, compute)
    return float(total.max())


def _list_transfers(problem: Problem, device: Ints) -> tuple[Ints, Ints]:
    """Distinct (tensor, other device that uses it)."""
    graph, num = problem.graph, problem.cluster.num_devices
    target = device[graph.use_op]
    away = target != device[graph.tensor_op[graph.use_tensor]]
    pair = sorted_unique(graph.use_tensor[away].astype(np.int64) * num + target[away])
    return (pair // num).astype(np.int32), (pair % num).astype(np.int32)


def _transfer_s(problem: Problem, tensor: Ints, source: Ints, target: Ints) -> Floats:
    """Seconds of each transfer over its route, unless given."""
    given = problem.costs.transfer_s[tensor]
    latency, rate = route_latency_s(problem.cluster), route_bytes_per_s(problem.cluster)
    routed = latency[source, target] + problem.graph.tensor_bytes[tensor] / rate[source, target]
    return np.where(given >= 0, given, routed)


def hop_s(problem: Problem, tensor: Ints, device: Ints | int, *, to_host: bool) -> Floats:
    """Seconds of each tensor between a device and host memory (the first host-side device, else a next)."""
    num = problem.cluster.num_devices
    on_host = problem.cluster.on_host[problem.cluster.kind]
    near = np.broadcast_to(np.asarray(device, dtype=np.int32), tensor.shape)
    far = np.full(len(tensor), int(on_host.argmax()), dtype=np.int32)
    if not on_host.any():
        far = ((near + 1) % num).astype(np.int32)
    return _transfer_s(problem, tensor, near, far) if to_host else _transfer_s(problem, tensor, far, near)


def combine_loads(load: Load, compute: Floats, reads: Floats, writes: Floats) -> Floats:
    """How compute, reads and writes add up on an accelerator."""
    if load == Load.SUM:
        return compute + reads + writes
    if load == Load.MAX2:
        return np.maximum(compute, reads + writes)
    return np.maximum(compute, np.maximum(reads, writes))
