"""The whole story on one screen: read, ask, answer, simulate, place, run, save.

problem = lm.problem("gen:transformer:1500", "2xA100-80GB, cpu-64GB")     source + devices -> Problem
placement = lm.plan(problem)                                               Problem -> Placement
timeline = lm.simulate(problem, placement.plan)                            Problem x Plan -> Timeline
placed = lm.place(model, placement)                                        nn.Module x Placement -> Placed
lm.save(placement, "plan.json");  lm.load("plan.json")                     any noun <-> file

Every function here makes nouns and hands them down; no room below calls back. The simulator (numba, scipy)
and torch are imported where they are used: bad input is answered without them.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from loadmaster.cluster.local import auto_shorthand
from loadmaster.cluster.parse import parse_cluster
from loadmaster.core.choices import parse_choice
from loadmaster.core.errors import InputError
from loadmaster.core.io import MAX_BYTES, load, save
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Plan
from loadmaster.core.problem import Links, Load, Objective, Problem, Split
from loadmaster.core.question import MEASURE_S, Devices, Question, Source
from loadmaster.core.run import Bound, Budget, ignore_progress, parse_budget
from loadmaster.core.timeline import Timeline
from loadmaster.core.units import parse_bytes
from loadmaster.graph.framework import is_tensorflow_model
from loadmaster.graph.origin import is_tensorflow_graph
from loadmaster.graph.whole_modules import group_by_module
from loadmaster.placers.ask import PlanRequest, find_placement
from loadmaster.placers.registry import Placer, objectives_of, placer, require_served
from loadmaster.questions.problem import build_problem, revise_problem, target_of

if TYPE_CHECKING:
    from loadmaster.core.check import Violation
    from loadmaster.core.fit_answer import Fit
    from loadmaster.core.run_report import Outcome
    from loadmaster.runtime.place_request import PlaceOptions
    from loadmaster.runtime.placed import Placed
    from loadmaster.runtime.tensorflow.verify_step import StepVerification
    from loadmaster.runtime.verify.verification import Verification
    from loadmaster.simulator.compare import Comparison

__all__ = [
    "check_plan",
    "compare_timelines",
    "fit",
    "load",
    "lower_bound",
    "place",
    "plan",
    "problem",
    "run",
    "save",
    "simulate",
    "verify",
]


def problem(
    source: Source,
    devices: Devices | None = None,
    objective: Objective | str | None = None,
    *,
    links: Links | str | None = None,
    split: Split | str | None = None,
    load: Load | str | None = None,
    optimizer: str | None = None,
    precision: str = "fp32",
    pin: Mapping[str, str] | None = None,
    reserve_bytes: int | str = 0,
    format: str | None = None,
    max_bytes: int = MAX_BYTES,
    pipeline: str | None = None,
    batch: int | None = None,
    seq: int | None = None,
    target: str | None = None,
    capture_path: str | None = None,
    assume: float | None = None,
    accumulation: int | None = None,
    ranges: Mapping[str, tuple[int, int]] | None = None,
    costs: str = "roofline",
    measure_budget: Budget | float | str = MEASURE_S,
    database: str | os.PathLike[str] | None = None,
    tell: Callable[[str], None] | None = None,
    progress: Callable[[str, float], None] = ignore_progress,
) -> Problem:
    """A source on devices (its own if it brings some and none are named), and what is asked.

    What is None is the source's own, else the default. `pipeline` ('1f1b:8', 'gpipe:8') asks for stages with
    room for so many micro-batches, of which the graph is one (docs/algorithms.md). `pin` maps an op or module
    to a device; `optimizer` sizes the state of parameters; `batch`, `seq`, `target` (default: the kind of the
    devices), `capture_path`, `assume`, `accumulation` and `ranges` are for captured models: docs/capture.md.
    `costs` 'measured': times of ops are measured on this machine's devices, for at most `measure_budget`
    seconds, and kept in a database (docs/costs.md); `tell` is told what was measured. 'auto': for 2 seconds,
    where all devices are on this machine.
    """
    question = Question(
        source,
        devices,
        objective,
        links=links,
        split=split,
        load=load,
        optimizer=optimizer,
        precision=precision,
        pin=pin,
        reserve_bytes=reserve_bytes,
        format=format,
        max_bytes=max_bytes,
        pipeline=pipeline,
        batch=batch,
        seq=seq,
        target=target,
        capture_path=capture_path,
        assume=assume,
        accumulation=accumulation,
        ranges=ranges,
        costs=costs,
        measure_budget=measure_budget,
        database=database,
    )
    return build_problem(question, tell=tell, progress=progress)


def plan(
    problem_or_source: Problem | Source,
    devices: Devices | None = None,
    algorithm: str | Placer | Plan = "auto",
    budget: Budget | float | str = 10.0,
    seed: int = 0,
    objective: Objective | str | None = None,
    links: Links | str | None = None,
    split: Split | str | None = None,
    *,
    pipeline: str | None = None,
    spill: str | None = None,
    order: str = "free",
    progress: Callable[[str, float], None] = ignore_progress,
) -> Placement:
    """The best plan an algorithm finds within a budget of seconds, or of a count ('2000x').

    `pipeline` asks for stages with room for micro-batches in flight, e.g. '1f1b:8'. With `spill` 'host' (or
    the name of a device) weights may stay there while their ops run elsewhere (docs/running.md). With `order`
    'captured' ops run in the graph's own order, as torch runs a training step. A Plan of your own instead
    of an algorithm is scored as it is (`Plan.from_device_map`).
    """
    chosen = _resolve_algorithm(algorithm)
    _require_usable(chosen, seed)
    if objective is None and not isinstance(problem_or_source, Problem):
        only = objectives_of(chosen)
        objective = only[0] if len(only) == 1 else None
    asked = _resolve_problem(problem_or_source, devices, objective, links, split, pipeline)
    require_served(chosen, asked)
    return find_placement(asked, PlanRequest(chosen, parse_budget(budget), seed, order, spill, progress))


def fit(
    source: Source,
    devices: Devices | None = None,
    *,
    batch: int | None = None,
    seq: int | None = None,
    optimizer: str | None = None,
    precision: str = "fp32",
    assume: float | None = None,
    reserve_bytes: int | str = 0,
    format: str | None = None,
    max_bytes: int = MAX_BYTES,
    budget: Budget | float | str = "60x",
    quick: bool = False,
    every: bool = False,
    progress: Callable[[str, float], None] = ignore_progress,
) -> "Fit":
    """Whether a step fits on each device and on all of them, what it holds, and what would make it fit.

    Without `devices` (and none that the source brings): every preset. `budget` is for each search of a plan;
    `quick` asks for no other batch and no change, `every` checks changes beyond the first that fits.
    `assume` stands for values that a captured model reads and that nobody can know.
    """
    from loadmaster.capacity.fit import answer_fit

    question = Question(
        source,
        devices,
        batch=batch,
        seq=seq,
        optimizer=optimizer,
        precision=precision,
        assume=assume,
        reserve_bytes=parse_bytes(reserve_bytes),
        format=format,
        max_bytes=max_bytes,
    )
    return answer_fit(question, budget=parse_budget(budget), quick=quick, every=every, progress=progress)


def place(
    model: Any, plan_or_inputs: Any, *, devices: Devices = "auto", **wishes: "Unpack[PlaceOptions]"
) -> "Placed":
    """The model on its plan: same class, same weights, same numbers (docs/running.md).

    `plan_or_inputs` is a Placement or its file; or example inputs (a tensor, a tuple, a dict), for which a
    plan on `devices` is made first. The other options are listed in `runtime.place_request.PlaceOptions`.
    """
    if is_tensorflow_model(model):
        return _place_tensorflow(model, plan_or_inputs, devices, wishes)
    from loadmaster.runtime import place_request

    place_request.check_place_request(model, wishes)
    placement = place_request.resolve_placement(plan_or_inputs)
    if placement is None:
        devices = auto_shorthand() if devices == "auto" else devices
        cluster = parse_cluster(devices)
        graph = place_request.capture_step(model, plan_or_inputs, wishes, target=target_of(cluster))
        if place_request.is_run_by_hooks(model, plan_or_inputs, wishes):
            graph = group_by_module(graph)
        order = "captured" if model.training else "free"  # autograd has an order of its own
        budget, spill = wishes.get("budget", 10.0), wishes.get("spill")
        costs = wishes.get("costs", "auto" if isinstance(devices, str) else "roofline")
        asked = problem(graph, devices if isinstance(devices, str) else cluster, costs=costs)
        placement = plan(asked, budget=budget, spill=spill, order=order)
    else:
        place_request.refuse_planning_options(devices, wishes)
    # The only function that is handed down: `placed.plan_that_fits()`, which the user calls when a device was
    # full, needs a planner, and planners stand above the runtime.
    return place_request.place_on_plan(model, placement, wishes, replan=_repair_plan)


def _place_tensorflow(model: Any, plan_or_inputs: Any, devices: Devices, wishes: Any) -> Any:
    """The same story in TensorFlow's own room: the step is traced, planned, and imported op by op."""
    from loadmaster.runtime.tensorflow import place_request

    place_request.check_place_request(model, wishes)
    placement = place_request.resolve_placement(plan_or_inputs)
    if placement is not None:
        place_request.refuse_planning_options(devices, wishes)
        return place_request.place_on_plan(model, placement, wishes)
    devices = auto_shorthand() if devices == "auto" else devices
    cluster = parse_cluster(devices)
    place_request.start_devices(cluster)
    captured = place_request.capture_example(model, plan_or_inputs)
    costs = wishes.get("costs", "auto" if isinstance(devices, str) else "roofline")
    asked = problem(captured.graph, devices if isinstance(devices, str) else cluster, costs=costs)
    placement = plan(asked, budget=wishes.get("budget", 10.0))
    return place_request.place_captured(captured, placement)


def verify(
    model: Any, plan: Any, batch: Any, *, loss: Callable[[Any], Any] | None = None, seed: int = 0
) -> "Verification | StepVerification":
    """Loss and gradients of a batch under a plan against the unplaced model; nothing of the model changes.

    Of a TensorFlow model: what a step on a batch (x, y) gives, and all variables after it.
    """
    if is_tensorflow_model(model):
        from loadmaster.runtime.tensorflow.verify_step import verify_step

        return verify_step(model, plan, batch, loss=loss, seed=seed)
    from loadmaster.runtime.place_request import verify_plan

    return verify_plan(model, plan, batch, loss=loss, seed=seed)


def run(
    plan: "Placement | str | os.PathLike[str]",
    *,
    model: str | None = None,
    steps: int = 20,
    calibrate: bool = False,
    database: str | os.PathLike[str] | None = None,
    seed: int = 0,
    tell: Callable[[int, float, float, dict[str, int]], None] | None = None,
    progress: Callable[[str, float], None] = ignore_progress,
) -> "Outcome":
    """Train a captured model on its plan for some steps of synthetic data: predicted beside measured.

    The model is made again from its source, which the plan names, or from `model`. `calibrate` writes the
    measured times of ops to the cost database. `tell` is told step, seconds, loss and bytes on each device.
    """
    if isinstance(plan, str | os.PathLike):
        plan = load(plan)
    if isinstance(plan, Placement) and is_tensorflow_graph(plan.problem.graph):
        return _run_tensorflow(plan, model, steps, seed, calibrate, tell)
    from loadmaster.runtime.place_request import load_placement, place_on_plan
    from loadmaster.runtime.run.launch import plan_as_run, rebuild_model, require_steps, run_placed

    require_steps(steps)
    placement = load_placement(plan)
    rebuilt = rebuild_model(placement, model, seed=seed, progress=progress)
    placed = place_on_plan(rebuilt.model, placement, {"loss": rebuilt.loss, "on_nan": None})
    predicted = simulate(placement.problem, plan_as_run(placement))
    return run_placed(
        placed, rebuilt, predicted, steps=steps, calibrate=calibrate, database=database, seed=seed, tell=tell
    )


def _run_tensorflow(
    placement: Placement, model: str | None, steps: int, seed: int, calibrate: bool, tell: Any
) -> "Outcome":
    """Steps of a TensorFlow plan, in its own room."""
    from loadmaster.core.run_report import Outcome
    from loadmaster.runtime.tensorflow.run_plan import start_run

    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InputError(f"steps is {steps!r}; give a whole number >= 1")
    if calibrate:
        raise InputError(
            "TensorFlow's ops are not timed in a run; plan with --measure to time them one by one"
        )
    running = start_run(placement, model, seed)
    predicted = simulate(placement.problem, running.plan)
    running.train(steps, tell or (lambda *_: None))
    return Outcome(running.report(predicted, steps), placement, predicted, None)


def simulate(
    problem: Problem, plan: Plan, links: Links | str | None = None, *, dispatch: str | None = None
) -> Timeline:
    """The timeline of a plan, under the problem's links unless others are named."""
    _require_plan(problem, plan)
    from loadmaster.simulator.events import engine

    how = parse_choice(engine.Dispatch, dispatch)
    return engine.simulate(problem, plan, links=parse_choice(Links, links), dispatch=how)


def seconds_per_sample(problem: Problem, plan: Plan, links: Links | str | None = None) -> float:
    """Steady-state time of a pipelined plan: its busiest device or link."""
    _require_plan(problem, plan)
    from loadmaster.simulator.events.throughput import steady_state

    return steady_state(replace(problem, links=parse_choice(Links, links) or problem.links), plan).time_s


def lower_bound(
    problem_or_source: Problem | Source,
    budget: Budget | float | str | None = None,
    *,
    devices: Devices | None = None,
) -> Bound:
    """What no plan of this problem, or of a source on devices, can beat, and the argument's name.

    The best of all arguments; with a budget also what the exact solver proves within it.
    """
    from loadmaster.placers.lower_bound import find_lower_bound

    return find_lower_bound(_resolve_problem(problem_or_source, devices), budget)


def check_plan(problem: Problem, plan: Plan) -> "list[Violation]":
    """Every rule a plan breaks, peak memory included; an empty list means it may be run."""
    _require_plan(problem, plan)
    from loadmaster.simulator.events.peak_check import check_plan_and_peaks

    return check_plan_and_peaks(problem, plan)


def compare_timelines(predicted: Timeline, measured: Timeline) -> "Comparison":
    """How far a prediction is from a measurement."""
    from loadmaster.simulator import compare

    return compare.compare(predicted, measured)


def _resolve_problem(
    given: Problem | Source,
    devices: Devices | None,
    objective: Objective | str | None = None,
    links: Links | str | None = None,
    split: Split | str | None = None,
    pipeline: str | None = None,
) -> Problem:
    """A source becomes a problem; a problem keeps what is not asked anew."""
    if not isinstance(given, Problem):
        return build_problem(Question(given, devices, objective, links, split, pipeline=pipeline))
    if devices is not None:
        raise InputError("a Problem has its devices already; give a source to plan on others")
    return revise_problem(given, objective=objective, links=links, split=split, pipeline=pipeline)


def _repair_plan(problem: Problem, start: Plan) -> Placement:
    """A plan that fits, repaired from one that does not."""
    from loadmaster.placers.search.refine import Refine

    return plan(problem, algorithm=Refine(start, kicks=0), budget="60x")


def _resolve_algorithm(algorithm: str | Placer | Plan) -> Placer:
    """By its name, or as it is; a plan is its own answer."""
    if isinstance(algorithm, Plan):
        from loadmaster.placers.fixed_plan import Given

        return Given(algorithm)
    return placer(algorithm) if isinstance(algorithm, str) else algorithm


def _require_usable(algorithm: object, seed: object) -> None:
    """Refuse what is no algorithm, or no seed."""
    if isinstance(algorithm, type) or not callable(algorithm):
        raise InputError(f"{algorithm!r} is not an algorithm; give a name or an instance, e.g. RoundRobin()")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise InputError(f"seed is {seed!r}; give a whole number >= 0")


def _require_plan(problem: object, plan: object) -> None:
    """Refuse what is easily confused with a problem and its plan."""
    if not isinstance(problem, Problem):
        raise InputError(f"{type(problem).__name__} is not a Problem; make one with loadmaster.problem()")
    if not isinstance(plan, Plan):
        hint = "nothing that fits was found; placement.least_overflow_plan came nearest"
        hint = hint if plan is None else "of a Placement, give its .plan"
        raise InputError(f"{type(plan).__name__} is not a Plan; {hint}")
