"""Placed models: what `lm.place` gives for TensorFlow.

`PlacedFunction` is called like the function it was made of. `PlacedModel` is the user's Keras model whose
training step runs the plan: `fit`, checkpoints, `save` and `export` are the model's own.
"""

from collections import Counter
from typing import Any

import tensorflow as tf
from loadmaster.core.errors import InputError
from loadmaster.core.placement import Placement
from loadmaster.core.problem import Objective
from loadmaster.core.units import format_bytes
from loadmaster.cost.error_bar import format_error, step_error
from loadmaster.graph.tf_capture.steps import ORIGINAL, specs_of
from loadmaster.runtime.tensorflow.devices import describe_use
from loadmaster.runtime.tensorflow.placed_step import PlacedStep
from loadmaster.runtime.tensorflow.watched_step import WatchedStep, watch_step


class PlacedFunction:
    """A step on its plan."""

    def __init__(self, step: PlacedStep) -> None:
        self.step = step

    def __call__(self, *args: Any) -> Any:
        """One step."""
        return self.step(*args)

    @property
    def placement(self) -> Placement:
        """The plan with its problem and score."""
        return self.step.placement

    def devices_of_ops(self) -> dict[str, str]:
        """Where each op is, as TensorFlow names devices: 'CPU:1'."""
        return self.step.device_of_ops()

    def watch(self, *args: Any) -> WatchedStep:
        """One step, and where TensorFlow says that its ops ran."""
        self.step.import_again()
        return watch_step(lambda: self.step(*args))

    def explain(self) -> str:
        """A few lines: where ops and weights are, and what is known of memory."""
        placed = Counter(self.step.device_of_ops().values())
        graph, plan = self.placement.problem.graph, self.placement.plan
        assert plan is not None, "it runs"
        lines = [f"TensorFlow: {len(self.step.devices)} devices, {graph.num_ops} ops in a step"]
        lines.append("why: every op of the traced step was imported with the device that its plan has for it")
        for d, device in enumerate(self.step.devices):
            held = int(graph.resident_bytes[plan.device == d].sum())
            ops = f"{placed[device.where]} ops" if placed else "not run yet"
            lines.append(
                f"{device.name} ({device.where}): {ops}, weights and state of {format_bytes(held)}, "
                + describe_use(device)
            )
        error = step_error(self.placement.problem, plan)
        if error is not None and self.placement.score_s is not None:
            what = "a step" if self.placement.problem.objective == Objective.STEP else "a pass"
            lines.append(f"predicted: {what} takes {format_error(self.placement.score_s, error)}")
        return "\n".join([*lines, *(f"note: {note}" for note in graph.notes)])


def _compiled_parts(model: Any) -> tuple[Any, ...]:
    """What `compile` makes anew."""
    return tuple(getattr(model, name, None) for name in ("optimizer", "_compile_loss", "_compile_metrics"))


class PlacedModel(PlacedFunction):
    """A Keras model on its plan; whatever is not here is the model's own."""

    def __init__(self, step: PlacedStep) -> None:
        super().__init__(step)
        self.model = step.step.model
        self._compiled = _compiled_parts(self.model)
        if step.step.trains:
            original = getattr(self.model.train_step, ORIGINAL, self.model.train_step)

            def train_step(data: Any) -> Any:
                self._require_compiled()
                return step(data)

            setattr(train_step, ORIGINAL, original)
            self.model.train_step = train_step
        self.model.train_function = self.model.test_function = self.model.predict_function = None

    def __getattr__(self, name: str) -> Any:
        """The model's own: fit, evaluate, predict, save, export, weights, optimizer, ..."""
        if name == "model":
            raise AttributeError(name)
        return getattr(self.model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs; by the plan where the plan is for inference."""
        if self.step.step.trains or kwargs or not self._is_planned(args):
            return self.model(*args, **kwargs)
        return self.step(*args)

    def _is_planned(self, args: tuple[Any, ...]) -> bool:
        try:
            tf.nest.assert_same_structure(specs_of(self.step.step.args), specs_of(args))
        except (TypeError, ValueError):
            return False
        return True

    def train_on(self, *batch: Any) -> Any:
        """One training step of the plan on a batch (x, y); gives what `train_step` gives."""
        self._require_compiled()
        return self.step(batch)

    def watch(self, *args: Any) -> WatchedStep:
        """One step on a batch (x, y) (inference: on x), and where TensorFlow says that its ops ran."""
        self.step.import_again()
        return watch_step(lambda: self.train_on(*args) if self.step.step.trains else self.step(*args))

    def _require_compiled(self) -> None:
        """The step has the optimizer and loss that the model had when it was placed."""
        parts = zip(_compiled_parts(self.model), self._compiled, strict=True)
        if self.step.step.trains and any(now is not then for now, then in parts):
            raise InputError(
                f"model {self.model.name!r} was compiled again after it was placed; its placed step has the"
                " optimizer and loss of before; place the model again: lm.place(model, ...)"
            )
