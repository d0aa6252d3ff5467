"""Running: trains a plan for some steps, then times a few of them, and compares with the prediction."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median, quantiles
from typing import Any

import numpy as np
import torch

from loadmaster.cluster.probe import local_devices
from loadmaster.core.answers.run_report import SCHEMA_VERSION, DeviceRan, Pair, Ran
from loadmaster.core.placement import Placement
from loadmaster.core.timeline import SpanKind, Timeline
from loadmaster.cost.busy_machine import BUSY, CALM, BusyWatch, count_cores
from loadmaster.cost.database import CostRow, today
from loadmaster.cost.error_bar import step_error
from loadmaster.cost.keys import collect_keys, step_key
from loadmaster.runtime.graph_engine.op_clock import Clock
from loadmaster.runtime.placed import HOOKS, Placed
from loadmaster.runtime.run.measured import Spans, build_timeline, make_cost_rows, match_spans
from loadmaster.runtime.run.training import Training, TrainingTask
from loadmaster.simulator.compare import compare

CLOCKED_STEPS = 3
_STEPS_FOR_ANCHOR = 4
DONE, INTERRUPTED = "done", "interrupted"
Tell = Callable[[int, float, float, dict[str, int]], None]  # step, seconds, loss, bytes now on each device


@dataclass(slots=True)
class PlanRun:
    """One run of a plan; ends early at an interrupt and where the loss is no number."""

    model: Placed
    placement: Placement
    task: TrainingTask
    predicted: Timeline
    seed: int = 0
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    clocked: list[Spans] = field(default_factory=list)
    ended: str = DONE
    busy: bool = False  # with other work than this run
    others_cores: float = 0.0
    _uncounted_s: list[float] = field(default_factory=list)

    def run(self, steps: int, tell: Tell) -> None:
        """Train; what was measured so far stays, however it ends."""
        on_host = any(device.where.type == "cpu" for device in self.model._engine.devices)
        watch = BusyWatch(threads=torch.get_num_threads() if on_host else 1)
        try:
            self._train(steps, tell)
        finally:
            self.busy, self.others_cores = watch.is_busy, watch.others_cores

    def _train(self, steps: int, tell: Tell) -> None:
        try:
            training = Training(
                self.model, self.task, self.seed, find_input_device(self.placement, self.model)
            )
            for number in range(1, steps + 1):
                took_s, loss = training.step()
                self.seconds.append(took_s)
                self.losses.append(loss)
                tell(number, took_s, loss, live_bytes(self.model))
                if not math.isfinite(loss):
                    self.ended = f"loss is {loss}"
                    return
            self._run_clocked_steps(training)
        except KeyboardInterrupt:
            self.ended = INTERRUPTED
        except torch.OutOfMemoryError as problem:  # in the backward pass or the update
            raise self.model.full(problem) from problem

    def _run_clocked_steps(self, training: Training) -> None:
        """A few steps more, op by op; hooks have no ops."""
        engine = self.model._engine
        if not engine.graphs:
            engine.say("run by hooks: no times of single ops, and no timeline")
            return
        graph, plan = self.placement.problem.graph, self.placement.plan
        assert plan is not None, "it runs"
        for _ in range(CLOCKED_STEPS):
            engine.clock = Clock(engine.devices)
            try:
                took_s, _ = training.step(engine.clock)
                spans = match_spans(engine.clock.list_spans(), graph, plan, len(engine.devices))
            finally:
                engine.clock = None
            self._uncounted_s.append(took_s)
            self.clocked.append(spans)

    @property
    def timeline(self) -> Timeline | None:
        """The step of median length that was timed op by op; None: none was."""
        if not self.clocked:
            return None
        order = sorted(range(len(self.clocked)), key=self._uncounted_s.__getitem__)
        chosen = self.clocked[order[len(order) // 2]]
        peaks = [peak or 0 for peak in peak_bytes(self.model)]
        return build_timeline(chosen, self.placement.problem.cluster, peaks)

    def cost_rows(self) -> list[CostRow]:
        """What the clock says of every op, for the cost database."""
        chips = {device.torch_name: device.chip for device in local_devices()}
        of_device = [chips.get(str(device.where), "") for device in self.model._engine.devices]
        graph, moment = self.placement.problem.graph, BUSY if self.busy else CALM
        rows = make_cost_rows(self.clocked, graph, of_device, str(torch.__version__))
        if len(set(of_device)) == 1 and self._is_whole_step_of_a_cpu():
            rows += self._make_step_row(of_device[0])
        return [replace(row, moment=moment) for row in rows if row.device]

    def _is_whole_step_of_a_cpu(self) -> bool:
        """Whether a step is the sum of its ops: one after the other on one CPU, none of them twice."""
        plan, devices = self.placement.plan, self.model._engine.devices
        assert plan is not None, "it runs"
        return all(device.where.type == "cpu" for device in devices) and not plan.recompute.any()

    def _make_step_row(self, chip: str) -> list[CostRow]:
        """The usual whole step, to which the sum of its ops is anchored (`cost/timed/whole_step`)."""
        usual = self.seconds[2:]
        if len(usual) < _STEPS_FOR_ANCHOR:
            return []
        low, middle, high = quantiles(usual, n=4, method="inclusive")
        key = step_key(collect_keys(self.placement.problem.graph))
        spread = (high - low) / 2 / middle
        return [CostRow(key, chip, str(torch.__version__), today(), middle, spread, len(usual))]

    def report(self, source: str, asked: int, *, num_calibrated: int = 0, database: str | None = None) -> Ran:
        """Predicted beside measured."""
        measured, graph = self.timeline, self.placement.problem.graph
        plan = self.placement.plan
        assert plan is not None, "it runs"
        found = compare(self.predicted, measured) if measured is not None else None
        usual = self.seconds[1:] or self.seconds
        counted = self.model._engine.accounts is not None and bool(self._uncounted_s)
        return Ran(
            loadmaster="run",
            schema=SCHEMA_VERSION,
            source=source,
            graph=graph.name,
            placement_digest=self.placement.digest,
            engine="graph" if self.model._engine.graphs else HOOKS,
            steps_asked=asked,
            steps_done=len(self.seconds),
            ended=self.ended,
            losses=tuple(loss if math.isfinite(loss) else None for loss in self.losses),
            step_times_s=tuple(self.seconds),
            step_s=Pair(self.predicted.step_s, median(usual) if usual else None),
            uncounted_step_s=median(self._uncounted_s) if counted else None,
            num_transfers=Pair(
                _num_transfers(self.predicted), _num_transfers(measured) if measured else None
            ),
            transfer_s=Pair(_transfer_s(self.predicted), _transfer_s(measured) if measured else None),
            devices=self._devices(measured),
            median_op_error=found.median_op_error if found is not None else None,
            num_ops_measured=len(found.common_ops) if found is not None else 0,
            num_calibrated=num_calibrated,
            database=database,
            notes=(*self.model.notes, *self._note_busy_machine()),
            step_rel_error=step_error(self.placement.problem, plan),
            busy=self.busy,
            others_cores=self.others_cores,
        )

    def _note_busy_machine(self) -> list[str]:
        """What other work did to the run."""
        if not self.busy:
            return []
        return [
            f"this machine was busy: other work used {self.others_cores:.1f} of its {count_cores()}"
            " processors while this ran, so the measured times are longer than on an idle machine;"
            " run again when it is idle"
        ]

    def _devices(self, measured: Timeline | None) -> tuple[DeviceRan, ...]:
        cluster, rows = self.placement.problem.cluster, []
        busy = measured.busy_s.tolist() if measured is not None else [None] * cluster.num_devices
        peaks = peak_bytes(self.model)
        for at, device in enumerate(self.model._engine.devices):
            rows.append(
                DeviceRan(
                    device=device.name,
                    where=str(device.where),
                    memory_bytes=int(cluster.usable_bytes[at]),
                    busy_s=Pair(float(self.predicted.busy_s[at]), busy[at]),
                    peak_bytes=Pair(int(self.predicted.peak_bytes[at]), peaks[at]),
                )
            )
        return tuple(rows)


def live_bytes(model: Placed) -> dict[str, int]:
    """What stands on each device now, where somebody counts."""
    engine = model._engine
    found = {}
    for at, device in enumerate(engine.devices):
        if engine.accounts is not None:
            found[device.name] = engine.accounts.live_bytes[at]
        elif device.where.type == "cuda":
            found[device.name] = int(torch.cuda.memory_allocated(device.where))
    return found


def peak_bytes(model: Placed) -> list[int | None]:
    """[D] the most that stood on each device, where somebody counts."""
    engine, found = model._engine, list[int | None]()
    for at, device in enumerate(engine.devices):
        if engine.accounts is not None:
            found.append(engine.accounts.peak_bytes[at])
        elif device.where.type == "cuda":
            found.append(int(torch.cuda.max_memory_allocated(device.where)))
        else:
            found.append(None)
    return found


def _num_transfers(timeline: Timeline) -> int:
    return int((timeline.kind != SpanKind.COMPUTE).sum())


def _transfer_s(timeline: Timeline) -> float:
    moved = timeline.kind != SpanKind.COMPUTE
    return float(np.sum((timeline.end_s - timeline.start_s)[moved]))


def silent_tell(number: int, seconds: float, loss: float, live: dict[str, Any]) -> None:
    """Tell nobody."""


def find_input_device(placement: Placement, model: Placed) -> torch.device:
    """Where a plan has its inputs, if that is one device: a prediction begins when they are there."""
    graph, plan = placement.problem.graph, placement.plan
    assert plan is not None, "it runs"
    given = {int(at) for kind, at in zip(graph.op_kind, plan.device, strict=True) if kind == "input"}
    devices = model._engine.devices
    return devices[given.pop()].where if len(given) == 1 else torch.device("cpu")
