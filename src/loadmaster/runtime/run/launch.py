"""Launching: from a saved plan to a run of it; the model is made again from the source the plan names."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from loadmaster.core.check import why_not_runnable
from loadmaster.core.errors import InputError, PlanError
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Plan, in_graph_order
from loadmaster.core.problem import Objective, Origin, Problem
from loadmaster.core.run import ignore_progress
from loadmaster.core.run_report import Ran
from loadmaster.core.timeline import Timeline
from loadmaster.core.units import format_apart, format_seconds
from loadmaster.cost.database import open_database
from loadmaster.graph.differences import list_differences
from loadmaster.graph.models import CaptureOptions, capture_model, load_model_parts
from loadmaster.graph.origin import origin_of
from loadmaster.runtime.place_request import place_with_plan, require_plan, resolve_placement
from loadmaster.runtime.run.running import PlanRun, Tell, silent_tell
from loadmaster.runtime.run.training import Training, make_task


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What came of a run: the report, and the timelines it compares."""

    ran: Ran
    placement: Placement
    predicted: Timeline
    measured: Timeline | None


def run_plan(
    given: Any,
    simulate: Callable[[Problem, Plan], Timeline],
    *,
    model: str | None,
    steps: int,
    calibrate: bool,
    database: str | os.PathLike[str] | None,
    seed: int = 0,
    tell: Tell = silent_tell,
    progress: Callable[[str, float], None] = ignore_progress,
) -> Outcome:
    """Run a plan; `simulate` predicts it."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InputError(f"steps is {steps!r}; give a whole number >= 1")
    placement = resolve_placement(given)
    if placement is None:
        raise InputError(f"{type(given).__name__} is not a plan; give a Placement (lm.plan) or its file")
    require_plan(placement)
    source, asked = _find_source(placement, model)
    progress(f"building {source}", 0.0)
    _require_same_graph(placement, source, asked)
    parts = _build_model(source, asked, seed)
    made = place_with_plan(parts["model"], placement, {"loss": parts.get("loss"), "on_nan": None})
    plan = placement.plan
    assert plan is not None, "it was placed"
    predicted = simulate(placement.problem, _order_as_run(placement.problem, plan))
    running = PlanRun(made, placement, make_task(parts, asked), predicted, seed)
    running.run(steps, tell)
    rows, path = (running.cost_rows() if calibrate else []), None
    if rows:
        with open_database(database, needed=True) as known:
            known.put(rows)
            path = str(known.path)
    report = running.report(source, steps, num_calibrated=len(rows), database=path)
    report = replace(report, notes=(*_collect_notes(placement, predicted), *report.notes))
    return Outcome(report, placement, running.predicted, running.timeline)


def _order_as_run(problem: Problem, plan: Plan) -> Plan:
    """The plan in the order in which torch runs it: a backward pass has the captured order."""
    return in_graph_order(plan) if why_not_runnable(problem, plan) else plan


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
    placement = resolve_placement(given)
    if placement is None:
        raise InputError(f"{type(given).__name__} is not a plan; give a Placement (lm.plan) or its file")
    source, asked = _find_source(placement, model)
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


def _find_source(placement: Placement, model: str | None) -> tuple[str, CaptureOptions]:
    """The model's source, and what was asked of it when it was captured."""
    graph = placement.problem.graph
    found = origin_of(graph)
    if found is None and model is None:
        raise InputError(
            f"the plan does not say what model graph {graph.name!r} was captured from; name it with --model"
            " (hf:NAME, zoo:NAME or file.py:function), or use lm.place on your own model"
        )
    source, fields = found if found is not None else ("", {})
    return model or source, CaptureOptions(**fields)


def _require_same_graph(placement: Placement, source: str, asked: CaptureOptions) -> None:
    """The source must still give the graph of the plan; what changed is said."""
    changed = list_differences(placement.problem.graph, capture_model(source, asked))
    if changed:
        raise PlanError(
            f"the plan is for another model than {source} gives now: {'; '.join(changed)}; plan it anew"
        )
