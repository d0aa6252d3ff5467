"""Launching: the parts of `lm.run`, in the order in which `api.run` calls them.

The model is made again from the source that the plan names (`rebuild_model`), predicted in the order in which
torch runs it (`plan_as_run`), and trained for some steps (`run_placed`).
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from loadmaster.core.answers.run_report import Outcome
from loadmaster.core.check import why_not_runnable
from loadmaster.core.errors import InputError, PlanError
from loadmaster.core.graph import Graph
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Plan, in_graph_order
from loadmaster.core.problem import Objective, Origin
from loadmaster.core.run import ignore_progress
from loadmaster.core.timeline import Timeline
from loadmaster.core.units import format_apart, format_seconds
from loadmaster.cost.database import open_database
from loadmaster.cost.error_bar import BUSY_ERROR, step_error
from loadmaster.graph.differences import list_differences
from loadmaster.graph.models import CaptureOptions, capture_model, load_model_parts
from loadmaster.graph.origin import origin_of
from loadmaster.runtime.place_request import load_placement, require_plan
from loadmaster.runtime.placed import Placed
from loadmaster.runtime.run.running import PlanRun, Tell, silent_tell
from loadmaster.runtime.run.training import Training, TrainingTask, make_task
from loadmaster.runtime.verify.unplaced import Loss

_WIDE = 0.5 * BUSY_ERROR  # half of the time, or more, was measured on a busy machine


@dataclass(frozen=True, slots=True, eq=False)
class RebuiltModel:
    """A model made again from the source that a plan names, with its inputs, loss and optimizer."""

    source: str
    asked: CaptureOptions
    parts: Mapping[str, Any]

    @property
    def model(self) -> nn.Module:
        """The model itself, in training mode."""
        found: nn.Module = self.parts["model"]
        return found

    @property
    def loss(self) -> Loss | None:
        """What makes one number of its outputs, where that is not its own loss."""
        found: Loss | None = self.parts.get("loss")
        return found

    @property
    def task(self) -> TrainingTask:
        """What it is trained on."""
        return make_task(self.parts, self.asked)


def require_steps(steps: Any) -> None:
    """Refuse what is not a number of steps."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InputError(f"steps is {steps!r}; give a whole number >= 1")


def rebuild_model(
    placement: Placement,
    model: str | None,
    *,
    seed: int = 0,
    progress: Callable[[str, float], None] = ignore_progress,
) -> RebuiltModel:
    """The model of a plan from its source, or from `model`; it must still give the graph of the plan."""
    require_plan(placement)
    return rebuild_for_graph(placement.problem.graph, model, seed=seed, progress=progress)


def rebuild_for_graph(
    graph: Graph,
    model: str | None = None,
    *,
    seed: int = 0,
    progress: Callable[[str, float], None] = ignore_progress,
) -> RebuiltModel:
    """The model that a graph was captured from, made again; it must still give that graph."""
    source, asked = _find_source(graph, model)
    progress(f"building {source}", 0.0)
    _require_same_graph(graph, source, asked)
    return RebuiltModel(source, asked, _build_model(source, asked, seed))


def plan_as_run(placement: Placement) -> Plan:
    """The plan in the order in which torch runs it: a backward pass has the captured order."""
    plan = require_plan(placement)
    return in_graph_order(plan) if why_not_runnable(placement.problem, plan) else plan


def run_placed(
    placed: Placed,
    rebuilt: RebuiltModel,
    predicted: Timeline,
    *,
    steps: int,
    calibrate: bool,
    database: str | os.PathLike[str] | None,
    seed: int = 0,
    tell: Tell | None = None,
) -> Outcome:
    """Train a placed model for some steps, and set what was measured beside the prediction."""
    placement = placed.placement
    running = PlanRun(placed, placement, rebuilt.task, predicted, seed)
    running.run(steps, tell or silent_tell)
    rows, path = (running.cost_rows() if calibrate else []), None
    if rows:
        with open_database(database, needed=True) as known:
            known.put(rows)
            path = str(known.path)
    report = running.report(rebuilt.source, steps, num_calibrated=len(rows), database=path)
    report = replace(report, notes=(*_collect_notes(placement, predicted), *report.notes))
    return Outcome(report, placement, running.predicted, running.timeline)


def _collect_notes(placement: Placement, predicted: Timeline) -> list[str]:
    """What to know of the prediction: another order than the plan's, and costs that nobody measured."""
    notes, other = [], _list_deviations(placement, predicted)
    if other:
        notes.append(
            "predicted is the plan as torch runs it, its backward pass in the captured order, not in the"
            f" plan's: {', '.join(other)}; `plan --order captured` plans for that"
        )
    origin = placement.problem.costs.origin
    if not (origin == Origin.MEASURED).any() and (origin == Origin.ANALYTIC).any():
        notes.append(
            "times were predicted from vendors' peak rates, not measured, and may be far too small; plan with"
            " --measure to predict from times of this machine"
        )
    error = step_error(placement.problem, require_plan(placement))
    if error is not None and error >= _WIDE:
        notes.append(
            "costs behind the prediction were measured while this machine was busy with other work, so the"
            " predicted times may be far off; plan again when it is idle, and they are measured again"
        )
    return notes


def _list_deviations(placement: Placement, predicted: Timeline) -> list[str]:
    """What is predicted of the run and was not of the plan: the step, and the peak of devices."""
    problem, found = placement.problem, []
    now, then = format_seconds(predicted.step_s), format_seconds(placement.score_s or 0.0)
    if problem.objective == Objective.STEP and now != then:
        found.append(f"a step {now} instead of {then}")
    peaks = zip(problem.cluster.device_name, predicted.peak_bytes, placement.peak_bytes, strict=True)
    for name, now_bytes, then_bytes in peaks:
        if now_bytes != then_bytes:
            now, then = format_apart(int(now_bytes), int(then_bytes))
            found.append(f"the peak of {name} {now} instead of {then}")
    return found


def compute_plain_losses(given: Any, *, model: str | None = None, steps: int, seed: int = 0) -> list[float]:
    """The losses of the same steps without any plan: the model itself on the CPU."""
    placement = load_placement(given)
    source, asked = _find_source(placement.problem.graph, model)
    parts = _build_model(source, asked, seed)
    training = Training(parts["model"], make_task(parts, asked), seed)
    return [training.step()[1] for _ in range(steps)]


def _build_model(source: str, asked: CaptureOptions, seed: int) -> dict[str, Any]:
    """The model with weights that a seed gives, in training mode."""
    torch.manual_seed(seed)
    parts = load_model_parts(source, asked, device="cpu")
    parts["model"].train()
    torch.manual_seed(seed)  # of dropout
    return parts


def _find_source(graph: Graph, model: str | None) -> tuple[str, CaptureOptions]:
    """The model's source, and what was asked of it when it was captured."""
    if model is not None and not isinstance(model, str):
        raise InputError(
            f"model is a {type(model).__name__}; give its source (hf:NAME, zoo:NAME or"
            " file.py:function). For a model that you have at hand, use lm.place and your own loop"
        )
    found = origin_of(graph)
    if found is None and model is None:
        raise InputError(
            f"the plan does not say what model graph {graph.name!r} was captured from; name it with --model"
            " (hf:NAME, zoo:NAME or file.py:function), or use lm.place on your own model"
        )
    source, fields = found if found is not None else ("", {})
    return model or source, CaptureOptions(**fields)


def _require_same_graph(graph: Graph, source: str, asked: CaptureOptions) -> None:
    """The source must still give the graph of the plan; what changed is said."""
    changed = list_differences(graph, capture_model(source, asked))
    if changed:
        raise PlanError(
            f"the plan is for another model than {source} gives now: {'; '.join(changed)}; plan it again"
        )
