"""Placed training steps, timed: what the suite `running` is made of, on this machine's devices."""

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

import loadmaster as lm
from benchmarks.suites.gpu import Case
from loadmaster.cluster.benchmark import benchmark
from loadmaster.cluster.parse import parse_cluster
from loadmaster.cluster.toml import machine_toml
from loadmaster.core.plan import Plan, plan_of
from loadmaster.graph.torch_capture.step import loss_of


@dataclass(frozen=True, slots=True)
class Run:
    """Steps of one loop."""

    step_s: float
    peak_bytes: int  # of the GPU, 0 = not asked
    losses: tuple[float, ...]


def synchronise() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def forget() -> None:
    """Give memory back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def stepper(model: Any, made: Any, optimizer: Any) -> Callable[[], float]:
    """One step of a plain loop; gives the loss."""

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of(model(*made.args, **made.kwargs), made.loss)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def timed(step: Callable[[], float], *, steps: int, warm: int) -> Run:
    """Median seconds of a step, the peak of the GPU after the warm-up."""
    taken, losses = [], []
    for at in range(warm + steps):
        if at == warm and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        synchronise()
        began = time.perf_counter()
        losses.append(step())
        synchronise()
        if at >= warm:
            taken.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return Run(statistics.median(taken), peak, tuple(losses))


def pairs_s(one: Callable[[], float], other: Callable[[], float], *, num: int) -> list[tuple[float, float]]:
    """Seconds of two steps that follow each other, many times, who goes first changing."""
    found = []
    for at in range(num + 3):
        both = []
        for step in (one, other) if at % 2 else (other, one):
            synchronise()
            began = time.perf_counter()
            step()
            synchronise()
            both.append(time.perf_counter() - began)
        if at >= 3:
            found.append((both[0], both[1]) if at % 2 else (both[1], both[0]))
    return found


def probed() -> Any:
    """This machine as a cluster, with the rates and links that it achieves."""
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "here.toml"
        path.write_text(machine_toml(benchmark(say=lambda *_: None)), encoding="utf-8")
        return parse_cluster(path)


def on_gpu_first(cluster: Any) -> tuple[int, int]:
    """The GPU and the host of a cluster."""
    host = cluster.on_host[cluster.kind]
    return int(np.flatnonzero(~host)[0]), int(np.flatnonzero(host)[0])


def limited(cluster: Any, device: int, num_bytes: int) -> Any:
    """The cluster with less memory on a device."""
    memory = cluster.memory_bytes.copy()
    memory[device] = num_bytes
    reserve = cluster.reserve_bytes.copy()
    reserve[device] = 0
    return replace(cluster, memory_bytes=memory, reserve_bytes=reserve)


def by_module(graph: Any, where: Callable[[str], int]) -> Plan:
    """Each op where a function of its module says; backward ops and updates follow, groups stay together."""
    device = np.array([where(module) for module in graph.module], dtype=np.int32)
    back = graph.mirror >= 0
    device[back] = device[graph.mirror[back]]
    for group in np.unique(graph.group[graph.group >= 0]):
        some = np.flatnonzero(graph.group == group)
        device[some] = device[some[0]]
    return plan_of(device, np.arange(graph.num_ops, dtype=np.int32))


def placement_of(problem: Any, plan: Plan) -> Any:
    """A plan as lm.place takes it."""
    from loadmaster.core.placement import Placement, Status

    timeline = lm.simulate(problem, plan)
    nothing = np.zeros(problem.cluster.num_devices, dtype=np.int64)
    return Placement(
        problem=problem,
        plan=plan,
        algorithm="by hand",
        status=Status.FEASIBLE,
        score_s=timeline.step_s,
        bound_s=0.0,
        bound_name="none",
        proof="",
        shortfall_bytes=nothing,
        peak_bytes=timeline.peak_bytes,
        least_overflow_plan=None,
        members=(),
        wall_s=0.0,
    )


def captured(case: Case) -> Any:
    """The graph of a case, for a GPU where there is one."""
    made = case.example("meta")
    target = "cuda" if torch.cuda.is_available() else "cpu"
    return lm.capture(made.model, made.args, made.kwargs, loss=made.loss, target=target)


@contextmanager
def capped(num_bytes: int) -> Any:
    """The allocator gives no more than this, gaps and all."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
