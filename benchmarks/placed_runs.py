"""Placed training steps, timed: what the suite `running` is made of, on this machine's devices."""

import copy
import gc
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

import loadmaster as lm
from benchmarks.suites.gpu import Case
from loadmaster.cluster.benchmark import benchmark_machine
from loadmaster.cluster.parse import parse_cluster
from loadmaster.cluster.toml import machine_toml
from loadmaster.core.plan import Plan, plan_of
from loadmaster.core.timeline import SpanKind
from loadmaster.modules.loss import compute_loss
from loadmaster.runtime.run.running import PlanRun, find_input_device, silent_tell
from loadmaster.runtime.run.training import TrainingTask
from loadmaster.zoo.hf import SIZES, Size, build_example


@dataclass(frozen=True, slots=True)
class Run:
    """Steps of one loop."""

    step_s: float
    peak_bytes: int  # of the GPU, 0 = not asked
    losses: tuple[float, ...]
    all_s: tuple[float, ...] = ()


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


def loss_on(model: Any, made: Any) -> Any:
    """The loss of a batch; labels go where the output is, and the output is let go of."""
    return loss_near(model(*made.args, **made.kwargs), made.loss)


def loss_near(out: Any, loss: Any) -> Any:
    """The loss of what a model gave, its labels beside that."""
    labels = getattr(loss, "labels", None)
    if isinstance(labels, torch.Tensor) and isinstance(out, torch.Tensor):
        loss = copy.copy(loss)
        loss.labels = labels.to(out.device)
    return compute_loss(out, loss)


def loaded(made: Any, placement: Any, placed: Any) -> Any:
    """The example with its inputs where the plan has them: that is where a prediction begins."""
    where = find_input_device(placement, placed)
    args, kwargs = tree_map_only(torch.Tensor, lambda one: one.to(where), (made.args, made.kwargs))
    return replace(made, args=args, kwargs=kwargs)


def what_is_off(placed: Any, placement: Any, made: Any, *, num: int = 8) -> list[dict[str, Any]]:
    """Where a prediction is off most: ops, devices and transfers, in ms, predicted and by the clock."""
    task = TrainingTask(made.args, made.kwargs, lambda out: loss_near(out, made.loss), "adamw")
    running = PlanRun(placed, placement, task, lm.simulate(placement.problem, placement.plan))
    running.run(2, silent_tell)
    ours, theirs = running.predicted, running.timeline
    if theirs is None:
        return []
    graph = placement.problem.graph
    mine, its = ({int(one): s for one, s in zip(*op_seconds(t), strict=True)} for t in (ours, theirs))
    rows = [
        {"op": graph.op_name[op], "kind": graph.op_kind[op], "device": int(placement.plan.device[op])}
        | {"ms": [round(1e3 * float(mine[op]), 3), round(1e3 * float(its[op]), 3)]}
        for op in sorted(mine.keys() & its.keys(), key=lambda op: -abs(mine[op] - its[op]))[:num]
    ]
    busy = [[round(1e3 * one, 2) for one in t.busy_s.tolist()] for t in (ours, theirs)]
    moved = [
        round(1e3 * float((t.end_s - t.start_s)[t.kind != SpanKind.COMPUTE].sum()), 2) for t in (ours, theirs)
    ]
    clocked = [round(1e3 * t.step_s, 2) for t in (ours, theirs)]
    return [{"step ms": clocked, "busy ms": busy, "moved ms": moved}, *rows]


def op_seconds(timeline: Any) -> tuple[Any, Any]:
    """The ops of a timeline and their seconds."""
    compute = timeline.kind == SpanKind.COMPUTE
    ops, inverse = np.unique(timeline.item[compute], return_inverse=True)
    total = np.zeros(len(ops))
    np.add.at(total, inverse, (timeline.end_s - timeline.start_s)[compute])
    return ops, total


class Stepper:
    """One step of a plain loop; gives the loss. It knows its phase, and on request the peaks of each."""

    def __init__(self, model: Any, made: Any, optimizer: Any) -> None:
        self._model, self._made, self._optimizer = model, made, optimizer
        self.phase = ""
        self.watched = False
        self.peaks: dict[str, dict[str, float]] = {}

    def __call__(self) -> float:
        """zero_grad, forward, backward, step."""
        self.phase = "forward"
        self._optimizer.zero_grad()
        loss = loss_on(self._model, self._made)
        self._next("backward")
        loss.backward()
        self._next("update")
        self._optimizer.step()
        self._next("")
        return float(loss.detach())

    def _next(self, phase: str) -> None:
        if self.watched and torch.cuda.is_available():
            self.peaks[self.phase] = gpu_memory()
            torch.cuda.reset_peak_memory_stats()
        self.phase = phase


def gpu_memory() -> dict[str, float]:
    """GiB now and at most since the last reset."""
    return {
        "allocated": round(torch.cuda.memory_allocated() / 2**30, 3),
        "most allocated": round(torch.cuda.max_memory_allocated() / 2**30, 3),
        "most reserved": round(torch.cuda.max_memory_reserved() / 2**30, 3),
    }


def by_phase(step: Stepper) -> dict[str, dict[str, float]]:
    """The peaks of one more step, phase by phase."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    step.watched = True
    try:
        step()
    finally:
        step.watched = False
    return step.peaks


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
    return Run(statistics.median(taken), peak, tuple(losses), tuple(taken))


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
        path.write_text(machine_toml(benchmark_machine(say=lambda *_: None)), encoding="utf-8")
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


@contextmanager
def full_float32() -> Any:
    """No TF32 in matrix products, nor in convolutions."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def shares_of_limit(wanted: dict[str, Any], found: dict[str, Any]) -> dict[str, float]:
    """Per weight ||dg|| / (1e-5 ||g|| + 1e-7 max ||g||), the largest norm being that of any weight's."""
    norms = {name: float(grad.double().norm()) for name, grad in wanted.items()}
    most = max(norms.values())
    return {
        name: float((found[name].double() - grad.double()).norm()) / (1e-5 * norms[name] + 1e-7 * most)
        for name, grad in wanted.items()
    }


class Shorter(NamedTuple):
    """A model of fewer layers, at a batch."""

    size: Size
    batch: int
    seq: int

    def example(self, device: str) -> Any:
        """The model and its inputs."""
        return build_example(self.size, batch=self.batch, seq=self.seq, device=device)


def shorter(name: str, num_layers: int, *, batch: int, seq: int) -> Shorter:
    """A GPT-2 of fewer layers: ten graphs of it are made in little time."""
    size = SIZES[name]
    return Shorter(replace(size, numbers={**size.numbers, "n_layer": num_layers}), batch, seq)


def captured(case: Case | Shorter, optimizer: Any = "adamw") -> Any:
    """The graph of a case, for a GPU where there is one."""
    made = case.example("meta")
    target = "cuda" if torch.cuda.is_available() else "cpu"
    return lm.capture(made.model, made.args, made.kwargs, loss=made.loss, target=target, optimizer=optimizer)


def fused_adamw(weights: Any) -> Any:
    """One kernel for all weights of a device."""
    return torch.optim.AdamW(weights, fused=True)


@contextmanager
def capped(num_bytes: int) -> Any:
    """The allocator gives no more than this, gaps and all."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
