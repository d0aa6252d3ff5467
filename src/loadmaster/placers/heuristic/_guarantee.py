"""What theory promises of list scheduling, where its assumptions hold, and None where they do not.

*Assumed*: n devices, each an engine of its own, on which every op takes the same finite time; nothing ties
ops together (groups, pins, parameters that ride with their reader); transfers never wait for each other
(parallel links, or transfers without time); no issue times; the objective is the step. Links may differ: c
is the longest time of a tensor between two devices.

*Promised of one greedy pass*: one that never leaves a device idle while an op could start there, whatever
its ties, and whose plan is replayed in the order of its own starts. A pass that waits for favourites, sees
contended links or is replayed first come first served may do worse. An algorithm that keeps the best of
several plans is covered if such a pass is among them.

*m-ETF* (Hwang, Chow, Anger, Lee, SIAM J. Comput. 1989; with memory after Baechi, Jeon et al., SoCC 2020).
Follow the op v that ends last back to the input that could be everywhere last, and so on: a chain with L
seconds of ops and C of transfers. From the moment v could start anywhere to its start, every device with
room for v is busy. If m devices always have room for anything, that is (W - L) / m seconds in all, at most,
W being the time of all ops:

    T <= W / m + (1 - 1/m) L + C <= (n/m + 1 - 1/m) OPT_without_transfers + C

Memory: let an op add at most d bytes to its device (resident, outputs, copies of its inputs), D in all,
d_max the most, and M be the room beside the largest workspace. A device that shuts an op out holds more than
M - d_max, so that fewer than D / (M - d_max) do. Where everything fits on every device m = n, the factor
2 - 1/n. With M = K D/n + d_max, K > 1, and bytes that are never freed m > n (1 - 1/K); with C <= rho L, rho
being longest transfer / shortest op, T <= (2 + rho + 1/(K-1)) OPT. (Where bytes are freed a plan made without
counting them may not fit, and the one that is kept instead has no such promise.)
"""

from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Floats
from loadmaster.core.graph import NO_STORAGE
from loadmaster.core.problem import Links, Objective, Problem
from loadmaster.core.units import format_seconds
from loadmaster.cost.transfer import route_bytes_per_s, route_latency_s
from loadmaster.placers.heuristic._list_kernel import upward_rank
from loadmaster.placers.placement_units import Cargo, load_cargo
from loadmaster.simulator.events.engine import prepare
from loadmaster.simulator.events.kernel import ProblemArrays


@dataclass(frozen=True, slots=True)
class Guarantee:
    """T <= seconds, T <= factor x (the best time without transfers) + plus_s, T <= of_best x (the best)."""

    seconds: float
    factor: float
    plus_s: float
    of_best: float  # infinite where an op takes no time
    sentence: str


@dataclass(frozen=True, slots=True, eq=False)
class _Setting:
    """What the assumptions leave."""

    num_devices: int
    op_s: Floats  # [N]
    longest_s: Floats  # [T] transfer between the worst pair of devices
    num_open: int  # devices that always have room for anything

    @property
    def rho(self) -> float:
        """Longest transfer / shortest op."""
        longest, shortest = float(self.longest_s.max(initial=0.0)), float(self.op_s.min())
        return 0.0 if longest == 0.0 else longest / shortest if shortest > 0 else np.inf


def etf_guarantee(
    problem: Problem, *, cargo: Cargo | None = None, fixed: ProblemArrays | None = None
) -> Guarantee | None:
    """What a greedy pass never exceeds; `cargo` and `fixed` are the problem's, where they are at hand."""
    setting = _check_assumptions(problem, cargo)
    if setting is None:
        return None
    n, m = setting.num_devices, setting.num_open
    factor = n / m + 1.0 - 1.0 / m
    fixed = prepare(problem).fixed if fixed is None else fixed
    plus_s = _longest_chain_s(fixed, np.zeros(len(setting.op_s)), setting.longest_s)
    chain_s = _longest_chain_s(fixed, (1.0 - 1.0 / m) * setting.op_s, setting.longest_s)
    seconds = float(setting.op_s.sum()) / m + chain_s
    room = "memory not binding" if m == n else f"always room on {m}"
    source = "Hwang et al. 1989" if m == n else "after Baechi 2020"
    sentence = (
        f"m-ETF: at most {factor:.3g} x the best without transfers + {format_seconds(plus_s)} of transfers,"
        f" here {format_seconds(seconds)} ({n} equal devices, free links, {room}; {source})"
    )
    return Guarantee(seconds, factor, plus_s, factor + setting.rho, sentence)


def _check_assumptions(problem: Problem, cargo: Cargo | None) -> _Setting | None:
    """What the theorem is about, None where an assumption fails."""
    seconds, cluster = problem.device_compute_s, problem.cluster
    equal = np.isfinite(seconds).all() and (seconds == seconds[:, :1]).all()
    alone = len(np.unique(cluster.engine)) == cluster.num_devices
    if problem.objective != Objective.STEP or problem.costs.issue_s.any() or not (equal and alone):
        return None
    longest_s = _longest_transfer_s(problem)
    if problem.links != Links.PARALLEL and longest_s.any():
        return None
    num_open = _num_roomy_devices(problem)
    cargo = load_cargo(problem) if cargo is None else cargo
    if cargo.num_units < problem.graph.num_ops or not cargo.fits.all():
        return None
    if num_open < 1 or (num_open < cluster.num_devices and not _never_frees(problem)):
        return None
    return _Setting(cluster.num_devices, seconds[:, 0], longest_s, num_open)


def _longest_transfer_s(problem: Problem) -> Floats:
    """[T] longest between two devices, 0 where there is one device or nobody reads it."""
    cluster, graph, given = problem.cluster, problem.graph, problem.costs.transfer_s
    away = ~np.eye(cluster.num_devices, dtype=np.bool_)
    longest = np.zeros(graph.num_tensors)
    pairs = np.stack([route_latency_s(cluster)[away], route_bytes_per_s(cluster)[away]], axis=1)
    for latency_s, bytes_per_s in np.unique(pairs, axis=0).tolist():
        there = np.where(given >= 0, given, latency_s + graph.tensor_bytes / bytes_per_s)
        longest = np.maximum(longest, there)
    read = np.bincount(graph.use_tensor, minlength=graph.num_tensors) > 0
    return np.where(read, longest, 0.0)


def _num_roomy_devices(problem: Problem) -> int:
    """How many devices have room for any op at any time, whatever else was placed; none if negative."""
    graph, num = problem.graph, problem.cluster.num_devices
    adds = graph.resident_bytes.copy()
    np.add.at(adds, graph.tensor_op, graph.tensor_bytes)
    np.add.at(adds, graph.use_op, graph.tensor_bytes[graph.use_tensor])
    copies = np.minimum(np.bincount(graph.use_tensor, minlength=graph.num_tensors), num - 1)
    total = int(graph.resident_bytes.sum()) + int((graph.tensor_bytes * (1 + copies)).sum())
    room = int(problem.cluster.usable_bytes.min() - graph.workspace_bytes.max() - adds.max())
    return num - total // (room + 1) if room >= 0 else 0  # a device that shuts one out holds more than `room`


def _never_frees(problem: Problem) -> bool:
    """Whether what is held at the end of the step is all there ever was, workspace apart."""
    graph = problem.graph
    views = (graph.tensor_storage != np.arange(graph.num_tensors)) & (graph.tensor_storage != NO_STORAGE)
    return bool(graph.keep.all()) and not views.any()


def _longest_chain_s(fixed: ProblemArrays, op_s: Floats, transfer_s: Floats) -> float:
    """The most seconds of ops and transfers on one chain."""
    return float(upward_rank(fixed, op_s, transfer_s).max())
