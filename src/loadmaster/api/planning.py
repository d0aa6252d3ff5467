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
    """The best plan an algorithm finds within a budget of seconds, or of a count ('2000x').

    `pipeline` asks for stages with room for micro-batches in flight, e.g. '1f1b:8'; 'auto' weighs pipelines
    of any schedule and number of micro-batches against other plans, for a step of the whole batch (then
    `question` says how a Problem's micro-batches are captured). With `spill` 'host' (or
    the name of a device) weights may stay there while their ops run elsewhere (docs/running.md). With `order`
    'captured' ops run in the graph's own order, as torch runs a training step. A Plan of your own instead
    of an algorithm is scored as it is (`Plan.from_device_map`). With `evaluate` 'measured' every plan of a
    captured model is run on this machine's devices, `repeats` steps each (docs/learned.md).

    With `ways` 'any' the step is asked of every way there is (`lm.ways`), for so much budget each; the answer
    is the fastest that keeps the numbers: a Placement, or a StrategyAnswer for `lm.launch`.

    Without `progress`, a terminal or a notebook shows a live table: the best plan so far, the bound, the gap.
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
        raise InputError("measured evaluations know no spilled weights; leave --spill out, or simulate")
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
    """Every way to run a step: predicted time, peaks, gap, how equal its numbers are, and what runs it.

    `budget` is for each way. With `folder` the plan of each way is saved there, and its command names it.
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
        raise InputError("ways='any' weighs other batches and settings; give the source, and not a Problem")
    asked = question or Question(source, devices)
    return best_answer(weigh_ways(asked, budget=budget, seed=seed, progress=progress or ignore_progress))


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


def _question_of(given: Problem | Source, devices: Devices | None) -> Question | None:
    """How a source would be captured again; a Problem does not know."""
    return None if isinstance(given, Problem) else Question(given, devices)


def _plan_microbatches(whole: Problem, question: Question | None, ask: PlanRequest) -> Placement:
    """Pipelines weighed against other plans, micro-batches captured anew where a question says how."""
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
