"""Run plan: `lm.run` for TensorFlow: some steps of a plan on synthetic data, predicted beside measured.

TensorFlow reports neither the bytes on a CPU device nor the times of single ops here: the report says None
for them.
"""

import math
import time
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

import tensorflow as tf
from loadmaster.core.answers.run_report import SCHEMA_VERSION, DeviceRan, Pair, Ran
from loadmaster.core.errors import InputError, PlanError
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Plan
from loadmaster.core.timeline import SpanKind, Timeline
from loadmaster.cost.error_bar import step_error
from loadmaster.graph.models import CaptureOptions, load_tensorflow_step
from loadmaster.graph.origin import origin_of
from loadmaster.graph.tf_capture.steps import Step
from loadmaster.runtime.tensorflow.devices import locate_devices, peak_bytes
from loadmaster.runtime.tensorflow.place_request import place_step
from loadmaster.runtime.tensorflow.placed_model import PlacedFunction
from loadmaster.runtime.tensorflow.placed_step import loss_of

DONE, INTERRUPTED, ENGINE = "done", "interrupted", "tensorflow"
_NOTE = "TensorFlow's ops were not timed one by one, so there is no measured timeline of ops and transfers"


@dataclass(slots=True, eq=False)
class TensorflowRun:
    """One run, while it lasts."""

    placement: Placement
    source: str
    step: Step
    seed: int
    placed: PlacedFunction = field(init=False)
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    ended: str = DONE

    def __post_init__(self) -> None:
        """The step on its plan, traced."""
        self.placed = place_step(self.step, self.placement)
        self.placed.step.start()

    def train(self, steps: int, tell: Any) -> None:
        """Train; what was measured so far stays, however it ends."""
        draw = np.random.default_rng(self.seed)
        try:
            for number in range(1, steps + 1):
                args = tf.nest.map_structure(lambda value: _draw_like(value, draw), self.step.args)
                began = time.perf_counter()
                loss = loss_of(self.placed.step(*args))
                self.seconds.append(time.perf_counter() - began)
                self.losses.append(loss)
                tell(number, self.seconds[-1], loss, self._live_bytes())
                if not math.isfinite(loss):
                    self.ended = f"loss is {loss}"
                    return
        except KeyboardInterrupt:
            self.ended = INTERRUPTED

    @property
    def plan(self) -> Plan:
        """What is run."""
        assert self.placement.plan is not None, "checked at the start"
        return self.placement.plan

    def _live_bytes(self) -> dict[str, int]:
        found = {device.name: peak_bytes(device) for device in self.placed.step.devices}
        return {name: used for name, used in found.items() if used is not None}

    def report(self, predicted: Timeline, asked: int) -> Ran:
        """Predicted beside measured."""
        usual = self.seconds[1:] or self.seconds
        moved = predicted.kind != SpanKind.COMPUTE
        devices = tuple(
            DeviceRan(
                device=device.name,
                where=device.where,
                memory_bytes=device.limit_bytes,
                busy_s=Pair(float(predicted.busy_s[at]), None),
                peak_bytes=Pair(int(predicted.peak_bytes[at]), peak_bytes(device)),
            )
            for at, device in enumerate(self.placed.step.devices)
        )
        return Ran(
            loadmaster="run",
            schema=SCHEMA_VERSION,
            source=self.source,
            graph=self.placement.problem.graph.name,
            placement_digest=self.placement.digest,
            engine=ENGINE,
            steps_asked=asked,
            steps_done=len(self.seconds),
            ended=self.ended,
            losses=tuple(loss if math.isfinite(loss) else None for loss in self.losses),
            step_times_s=tuple(self.seconds),
            step_s=Pair(predicted.step_s, median(usual) if usual else None),
            uncounted_step_s=None,
            num_transfers=Pair(int(moved.sum()), None),
            transfer_s=Pair(float((predicted.end_s - predicted.start_s)[moved].sum()), None),
            devices=devices,
            median_op_error=None,
            num_ops_measured=0,
            num_calibrated=0,
            database=None,
            notes=(*self.placement.problem.graph.notes, _NOTE),
            step_rel_error=step_error(self.placement.problem, self.plan),
        )


def start_run(placement: Placement, model: str | None, seed: int) -> TensorflowRun:
    """The step of a plan made again from its source, or from `model`."""
    found = origin_of(placement.problem.graph)
    if found is None and model is None:
        raise InputError(
            f"the plan does not say what model graph {placement.problem.graph.name!r} was captured from; name"
            " it with --model (keras:NAME, a SavedModel folder or file.py:function), or use lm.place"
        )
    origin, fields = found if found is not None else ("", {})
    source = model or origin
    if placement.plan is None:
        raise PlanError("the file holds no plan that fits, so there is nothing to run")
    locate_devices(placement.problem.cluster)  # before the model starts TensorFlow
    tf.keras.utils.set_random_seed(seed)
    step = load_tensorflow_step(source, CaptureOptions(**fields))
    return TensorflowRun(placement, source, step, seed)


def _draw_like(value: Any, draw: Any) -> Any:
    """Random numbers of a shape; whole numbers are the example's own, shuffled."""
    if value is None:
        return None
    shape = [1 if size is None else int(size) for size in value.shape]
    kind = tf.as_dtype(value.dtype)
    if kind.is_floating:
        return tf.cast(tf.constant(draw.standard_normal(shape), tf.float32), kind)
    if isinstance(value, tf.TensorSpec):
        return tf.zeros(shape, kind)
    array = np.asarray(value)
    return tf.constant(draw.permutation(array.ravel()).reshape(array.shape))
