"""Planning: a source on devices as a Problem, and what answers it: a plan, what fits, the ways, a bound."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, overload

from loadmaster.core.errors import InputError, UnknownNameError
from loadmaster.core.files import MAX_BYTES
from loadmaster.core.pipelines.schedule import AUTO
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Plan
from loadmaster.core.problem import Links, Load, Objective, Problem, Split
from loadmaster.core.question import MEASURE_S, Devices, Question, Source
from loadmaster.core.run import Bound, Budget, ignore_news, ignore_progress, parse_budget
from loadmaster.core.strategy_answer import StrategyAnswer
from loadmaster.core.units import parse_bytes
from loadmaster.graph.source import is_model
from loadmaster.placers.ask import PlanRequest, find_placement
from loadmaster.placers.registry import Placer, objectives_of, placer, require_served
from loadmaster.questions.problem import batch_of, build_problem, revise_problem

if TYPE_CHECKING:
    from loadmaster.core.answers.fit_answer import Fit
    from loadmaster.core.answers.ways_answer import Ways


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
    """Build a Problem: a source, the devices, their costs, and the question to answer.

    An option that is None takes the source's own value if it has one, otherwise the default.

    - `devices`: a shorthand, a file or a Cluster. Some sources bring their own.
    - `pipeline` ('1f1b:8', 'gpipe:8'): plan stages with room for that many micro-batches. The graph is one
      micro-batch (docs/algorithms.md).
    - `pin`: maps an op or a module to a device.
    - `optimizer`: sizes the state that is kept for each parameter.
    - `batch`, `seq`, `target`, `capture_path`, `assume`, `accumulation`, `ranges`: options for models that
      are captured (docs/capture.md). `target` defaults to the kind of the devices.
    - `costs`: 'roofline', 'measured' or 'auto'. 'measured' times the ops on this machine's devices for at
      most `measure_budget` seconds and keeps the times in a database (docs/costs.md). 'auto' measures for
      2 seconds if all devices are on this machine.
    - `tell`: is called with a text that says what was measured.
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


@overload
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
    evaluate: str = "simulated",
    repeats: int = 5,
    question: Question | None = None,
    progress: Callable[[str, float], None] | None = None,
    ways: None = None,
) -> Placement: ...


@overload
def plan(
    problem_or_source: Source,
    devices: Devices | None = None,
    *,
    ways: str,
    budget: Budget | float | str = 10.0,
    seed: int = 0,
    question: Question | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> Placement | StrategyAnswer: ...


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
    evaluate: str = "simulated",
    repeats: int = 5,
    question: Question | None = None,
    progress: Callable[[str, float], None] | None = None,
    ways: str | None = None,
) -> Placement | StrategyAnswer:
    """Return the best plan that an algorithm finds within a budget.

    Takes a Problem, or a source and devices.

    - `budget`: seconds, or a count of plans such as '2000x', which gives the same answer on every machine.
    - `algorithm`: a name (`loadmaster algorithms` lists them), an instance, or your own Plan, which is then
      scored as it is (`Plan.from_device_map`).
    - `pipeline`: '1f1b:8' plans stages with room for 8 micro-batches. 'auto' compares pipelines of every
      schedule and number of micro-batches with other plans, for one step of the whole batch; `question` then
      says how to capture the micro-batches of a Problem.
    - `spill`: 'host', or the name of a device, where weights may wait while their ops run elsewhere
      (docs/running.md).
    - `order`: 'captured' runs ops in the order of the graph, as torch does.
    - `evaluate`: 'measured' runs every plan of a captured model on this machine, `repeats` steps each
      (docs/learned.md).
    - `ways`: 'any' compares every way to run the step (`lm.ways`), with this budget for each. It returns the
      fastest way that keeps the numbers: a Placement, or a StrategyAnswer for `lm.launch`.

    Without `progress`, a terminal or a notebook shows a live table with the best plan, the bound and the gap.
    """
    if ways is not None:
        return _plan_any_way(ways, problem_or_source, devices, question, parse_budget(budget), seed, progress)
    chosen = _resolve_algorithm(algorithm)
    _require_usable(chosen, seed)
    if pipeline == AUTO:
        question = question or _question_of(problem_or_source, devices)
        whole = _resolve_problem(problem_or_source, devices, objective, links, split, pipeline)
        say = progress or ignore_progress
        request = PlanRequest(chosen, parse_budget(budget), seed, order, spill, say)
        return _plan_microbatches(whole, question, request)
    if objective is None and not isinstance(problem_or_source, Problem):
        only = objectives_of(chosen)
        objective = only[0] if len(only) == 1 else None
    asked = _resolve_problem(problem_or_source, devices, objective, links, split, pipeline)
    require_served(chosen, asked)
    limit = parse_budget(budget)
    if _is_measured(evaluate, spill):
        request = PlanRequest(chosen, limit, seed, "captured", None, progress or ignore_progress)
        return _plan_by_measuring(asked, request, repeats)
    again = None
    if not isinstance(problem_or_source, Problem) and is_model(problem_or_source):
        again = Question(problem_or_source, devices, objective, links, split, pipeline=pipeline, target="cpu")
    if progress is not None or isinstance(algorithm, Plan):
        say = progress or ignore_progress
        return _ask(asked, PlanRequest(chosen, limit, seed, order, spill, say), again)
    from loadmaster.report.live_plan import show_live

    with show_live() as live:
        say = ignore_progress if live is None else live.say
        watch = ignore_news if live is None else live.watch
        return _ask(asked, PlanRequest(chosen, limit, seed, order, spill, say, watch), again)


def _is_measured(evaluate: str, spill: str | None) -> bool:
    if evaluate not in ("simulated", "measured"):
        raise UnknownNameError("way to evaluate", evaluate, ("simulated", "measured"))
    if evaluate == "measured" and spill is not None:
        raise InputError(
            "measured evaluation does not support spilled weights; leave out --spill, or simulate"
        )
    return evaluate == "measured"


def _plan_by_measuring(problem: Problem, request: PlanRequest, repeats: int) -> Placement:
    """An algorithm's answer with times of real steps instead of simulated ones, and how sure they are."""
    from loadmaster.placers.answer import with_note
    from loadmaster.runtime.run.launch import rebuild_for_graph
    from loadmaster.runtime.run.plan_timer import PlanTimer

    rebuilt = rebuild_for_graph(problem.graph, seed=request.seed, progress=request.progress)
    timer = PlanTimer(problem, rebuilt, repeats, request.seed)
    found = find_placement(problem, replace(request, score=timer.score))
    return with_note(found, "measured", timer.summary)


def _ask(problem: Problem, asked: PlanRequest, again: Question | None) -> Placement:
    """The answer; of a model (`again`: for the kernels of CPUs) with each device's own kernels."""
    if again is None:
        return find_placement(problem, asked)
    from loadmaster.capacity.mixed_plan import plan_with_own_kernels

    def ask(one: Problem, limit: Budget) -> Placement:
        return find_placement(one, replace(asked, budget=limit))

    return plan_with_own_kernels(problem, asked.budget, ask, lambda: build_problem(again))


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
    """Say whether a training step fits, on each device and on all of them together, and what would help.

    The answer has the memory of the step by kind and by module, the largest batch that fits, and changes
    that would make the step fit, cheapest first.

    - `devices`: without it, and if the source brings none, every preset is checked.
    - `budget`: for each search of a plan.
    - `quick`: only check whether it fits; try no other batch and no change.
    - `every`: check all changes, not only those up to the first that fits.
    - `assume`: the value to assume for values that capture cannot know.
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


def ways(
    source: Source,
    devices: Devices | None = None,
    *,
    batch: int | None = None,
    seq: int | None = None,
    optimizer: str | None = None,
    precision: str = "fp32",
    budget: Budget | float | str = 5.0,
    seed: int = 0,
    folder: str | os.PathLike[str] | None = None,
    progress: Callable[[str, float], None] = ignore_progress,
) -> "Ways":
    """Compare every way to run a step: predicted time, peaks, gap, exactness, and the command that runs it.

    `budget` is for each way. If `folder` is given, the plan of each way is saved there and its command
    names that file.
    """
    from loadmaster.capacity.ways import weigh_ways

    question = Question(source, devices, batch=batch, seq=seq, optimizer=optimizer, precision=precision)
    where = None if folder is None else os.fspath(folder)
    limit = parse_budget(budget)
    return weigh_ways(question, budget=limit, seed=seed, folder=where, progress=progress).table


def _plan_any_way(
    ways: str,
    source: Problem | Source,
    devices: Devices | None,
    question: Question | None,
    budget: Budget,
    seed: int,
    progress: Callable[[str, float], None] | None,
) -> Placement | StrategyAnswer:
    """The fastest way that a plan can express."""
    from loadmaster.capacity.ways import best_answer, weigh_ways

    if ways != "any":
        raise UnknownNameError("choice of ways", ways, ("any",))
    if isinstance(source, Problem):
        raise InputError(
            "ways='any' also tries other batches and settings; pass the source instead of a Problem"
        )
    asked = question or Question(source, devices)
    return best_answer(weigh_ways(asked, budget=budget, seed=seed, progress=progress or ignore_progress))


def lower_bound(
    problem_or_source: Problem | Source,
    budget: Budget | float | str | None = None,
    *,
    devices: Devices | None = None,
) -> Bound:
    """Return a step time that no plan can beat, and the name of the argument that proves it.

    Takes a Problem, or a source and devices. All bounds are computed and the best one is returned. With a
    budget, the exact solver searches for a better one within it.
    """
    from loadmaster.placers.lower_bound import find_lower_bound

    return find_lower_bound(_resolve_problem(problem_or_source, devices), budget)


def _resolve_problem(
    given: Problem | Source,
    devices: Devices | None,
    objective: Objective | str | None = None,
    links: Links | str | None = None,
    split: Split | str | None = None,
    pipeline: str | None = None,
) -> Problem:
    """A source becomes a problem; a problem keeps what is not asked again."""
    if not isinstance(given, Problem):
        return build_problem(Question(given, devices, objective, links, split, pipeline=pipeline))
    if devices is not None:
        raise InputError("a Problem has its devices already; give a source to plan on others")
    return revise_problem(given, objective=objective, links=links, split=split, pipeline=pipeline)


def _question_of(given: Problem | Source, devices: Devices | None) -> Question | None:
    """How a source would be captured again; a Problem does not know."""
    return None if isinstance(given, Problem) else Question(given, devices)


def _plan_microbatches(whole: Problem, question: Question | None, ask: PlanRequest) -> Placement:
    """Pipelines weighed against other plans, micro-batches captured again where a question says how."""
    from loadmaster.placers.microbatches import Whole, plan_microbatches

    batch = batch_of(whole.graph, question)
    if question is None:
        return plan_microbatches(Whole(whole, batch), ask)
    again = replace(question, pipeline=None, objective=Objective.STEP)
    can = is_model(question.source)

    def capture(batch: int) -> Problem:
        part = build_problem(replace(again, batch=batch), progress=ask.progress)
        return replace(part, links=whole.links)

    return plan_microbatches(Whole(whole, batch, capture if can else None), ask)


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
