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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack, overload

from loadmaster.cluster.local import auto_shorthand
from loadmaster.cluster.parse import parse_cluster
from loadmaster.core.choices import parse_choice
from loadmaster.core.errors import InputError, UnknownNameError
from loadmaster.core.files import MAX_BYTES
from loadmaster.core.io import load, save
from loadmaster.core.pipelines.schedule import AUTO
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Plan
from loadmaster.core.problem import Links, Load, Objective, Problem, Split
from loadmaster.core.question import MEASURE_S, Devices, Question, Source
from loadmaster.core.run import Bound, Budget, ignore_news, ignore_progress, parse_budget
from loadmaster.core.strategy_answer import StrategyAnswer
from loadmaster.core.timeline import Timeline
from loadmaster.core.units import parse_bytes
from loadmaster.graph.framework import is_tensorflow_model
from loadmaster.graph.origin import is_tensorflow_graph
from loadmaster.graph.source import is_model
from loadmaster.graph.whole_modules import group_by_module
from loadmaster.placers.ask import PlanRequest, find_placement
from loadmaster.placers.registry import Placer, objectives_of, placer, require_served
from loadmaster.questions.problem import batch_of, build_problem, revise_problem, target_of

if TYPE_CHECKING:
    from loadmaster.core.answers.fit_answer import Fit
    from loadmaster.core.answers.outcomes import Difference, Explanation, Outcomes
    from loadmaster.core.answers.run_report import Outcome
    from loadmaster.core.answers.ways_answer import Ways
    from loadmaster.core.check import Violation
    from loadmaster.runtime.distributed.pipeline_run import PipelineRun
    from loadmaster.runtime.distributed.strategy_run import StrategyRun
    from loadmaster.runtime.distributed.trial_run import PipelineOutcome, StrategyOutcome
    from loadmaster.runtime.place_request import PlaceOptions
    from loadmaster.runtime.placed import Placed
    from loadmaster.runtime.tensorflow.verify_step import StepVerification
    from loadmaster.runtime.verify.verification import Verification
    from loadmaster.simulator.compare import Comparison

__all__ = [
    "check_plan",
    "compare_timelines",
    "diff",
    "explain",
    "export",
    "fit",
    "import_file",
    "launch",
    "load",
    "load_measured",
    "lower_bound",
    "place",
    "plan",
    "problem",
    "run",
    "save",
    "simulate",
    "verify",
    "ways",
    "whatif",
    "write_report",
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


def place(
    model: Any, plan_or_inputs: Any, *, devices: Devices = "auto", **wishes: "Unpack[PlaceOptions]"
) -> "Placed":
    """The model on its plan: same class, same weights, same numbers (docs/running.md).

    `plan_or_inputs` is a Placement or its file; or example inputs (a tensor, a tuple, a dict), for which a
    plan on `devices` is made first. The other options are listed in `runtime.place_request.PlaceOptions`.
    """
    if is_tensorflow_model(model):
        placed: Placed = _place_tensorflow(model, plan_or_inputs, devices, wishes)
        return placed
    from loadmaster.capacity.mixed_plan import plan_with_own_kernels
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
        where = devices if isinstance(devices, str) else cluster

        def ask(one: Problem, limit: Budget) -> Placement:
            return plan(one, budget=limit, spill=spill, order=order)

        def on_cpus() -> Problem:
            captured = place_request.capture_step(model, plan_or_inputs, wishes, target="cpu")
            by_hooks = place_request.is_run_by_hooks(model, plan_or_inputs, wishes)
            return problem(group_by_module(captured) if by_hooks else captured, where, costs=costs)

        placement = plan_with_own_kernels(
            problem(graph, where, costs=costs), parse_budget(budget), ask, on_cpus
        )
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
    loaded = load(plan) if isinstance(plan, str | os.PathLike) else plan
    if isinstance(loaded, Placement) and is_tensorflow_graph(loaded.problem.graph):
        return _run_tensorflow(loaded, model, steps, seed, calibrate, tell)
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
    from loadmaster.core.answers.run_report import Outcome
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


def launch(
    plan: Placement | StrategyAnswer | str | os.PathLike[str],
    model: Any = None,
    *,
    loss: Callable[..., Any] | None = None,
    optimizer: Any = None,
    scheduler: Callable[[Any], Any] | None = None,
    clip: float | None = None,
    autocast: Any = None,
    seed: int = 0,
    timeout: float = 120.0,
    threads: int | None = None,
    emulate: bool = False,
    source: str | None = None,
    **strategy: Any,
) -> "PipelineRun | StrategyRun":
    """The processes of a pipeline or a strategy, started here or, under torchrun, joined.

    `optimizer` is a class, a name or a function of a list of weights; `scheduler` makes one of the optimizer;
    `clip` is the largest norm of all gradients; `loss(output, target)` compares. `timeout` is the most
    seconds that a process waits for another. With `emulate` hosts of the plan are network namespaces here.
    What else a strategy takes is in `StrategyOptions` (docs/strategies.md): `weight`, `compare_every`,
    `bucket_bytes`, `verify`.
    """
    from loadmaster.runtime.distributed.launch import LaunchOptions, load_launchable, strategy_options
    from loadmaster.runtime.distributed.launch import launch as start
    from loadmaster.runtime.distributed.pipeline.rank import TrainOptions
    from loadmaster.runtime.place_request import require_model

    if model is not None:
        require_model(model)
    answer = load_launchable(plan)
    train = TrainOptions(loss, optimizer, scheduler, clip, autocast, seed)
    extras = strategy_options(answer, strategy)
    options = LaunchOptions(train, float(timeout), threads, source, strategy=extras, emulate=emulate)
    return start(answer, model, options)


def run_processes(
    plan: Placement | StrategyAnswer | str | os.PathLike[str],
    *,
    model: str | None = None,
    steps: int = 20,
    seed: int = 0,
    checkpoint: str | None = None,
    every: int = 0,
    timeout: float = 120.0,
    threads: int | None = None,
    emulate: bool = False,
    tell: Callable[[int, float, float, dict[str, int]], None] | None = None,
) -> "PipelineOutcome | StrategyOutcome":
    """Train a captured model on a pipeline or a strategy for some steps: predicted beside measured.

    With `checkpoint` the run goes on from the newest checkpoint in that folder, and leaves one at its end and
    every so many steps.
    """
    from loadmaster.graph.origin import origin_of
    from loadmaster.runtime.distributed.launch import load_launchable
    from loadmaster.runtime.distributed.trial_run import run_steps
    from loadmaster.runtime.run.launch import require_steps

    require_steps(steps)
    answer = load_launchable(plan)
    found = origin_of(answer.problem.graph)
    source = model or (found[0] if found is not None else "")
    with launch(
        answer, source=model, seed=seed, timeout=timeout, threads=threads, emulate=emulate
    ) as running:
        return run_steps(
            running,
            steps,
            tell or (lambda *_: None),
            source=source,
            checkpoint=checkpoint,
            every=every,
        )


def simulate(
    problem: Problem, plan: Plan, links: Links | str | None = None, *, dispatch: str | None = None
) -> Timeline:
    """The timeline of a plan, under the problem's links unless others are named."""
    _require_plan(problem, plan)
    from loadmaster.simulator.events import engine

    how = parse_choice(engine.Dispatch, dispatch)
    if problem.is_stepped:
        from loadmaster.simulator.pipelines.unrolled import simulate_step

        return simulate_step(problem, plan, links=parse_choice(Links, links))[0]
    return engine.simulate(problem, plan, links=parse_choice(Links, links), dispatch=how)


def lower(answer: StrategyAnswer) -> Placement:
    """A strategy as a placement that `simulate`, `write_report`, `explain` and `export` serve.

    Every op is there once for each replica, and collectives run on channels beside the devices.
    """
    from loadmaster.strategies.flat_answer import as_placement

    return as_placement(answer)


def seconds_per_sample(problem: Problem, plan: Plan, links: Links | str | None = None) -> float:
    """Steady-state time of a pipelined plan: its busiest device or link."""
    _require_plan(problem, plan)
    from loadmaster.simulator.events.throughput import steady_state

    return steady_state(replace(problem, links=parse_choice(Links, links) or problem.links), plan).time_s


def write_report(
    placement: Placement,
    path: str | os.PathLike[str],
    *,
    measured: Timeline | None = None,
    compare: Mapping[str, Placement] | None = None,
    outcomes: "Sequence[Outcomes]" = (),
) -> None:
    """Write one self-contained HTML page of a placement (docs/report.md): it loads nothing from anywhere.

    `measured` is drawn below the prediction, on the same axis; `compare` are other answers to the same
    question, by name; `outcomes` what `whatif` found.
    """
    from loadmaster.core.files import write_bytes
    from loadmaster.report.plan_page import PlanPage, render_plan_page
    from loadmaster.review.look import review_measured, review_plan, shown_plan

    review = review_plan(placement)
    seen = None
    if measured is not None:
        seen = review_measured(placement.problem, shown_plan(placement), measured)
    others = tuple((compare or {}).items())
    write_bytes(render_plan_page(PlanPage(placement, review, seen, others, outcomes)), path)


def load_measured(
    path: str | os.PathLike[str], placement: Placement, *, max_bytes: int = MAX_BYTES
) -> Timeline:
    """A measured timeline of a placement's plan: a file of `run`, or a Chrome trace of `torch.profiler`."""
    from loadmaster.review.profiler_trace import read_measured

    return read_measured(path, placement, max_bytes=max_bytes)


def export(
    placement: Placement, to: str, path: str | os.PathLike[str] | None = None
) -> tuple[bytes, tuple[str, ...]]:
    """A plan in the format of another program ('device_map', 'torchtitan', 'openvino', 'chrome', 'graphml',
    'nodelink', 'csv'): the file, written to `path` if one is named, and what the format cannot express.
    """
    from loadmaster.core.files import write_bytes
    from loadmaster.report.exports.registry import export_plan
    from loadmaster.review.look import shown_plan

    made = export_plan(placement, simulate(placement.problem, shown_plan(placement)), to)
    if path is not None:
        write_bytes(made.content, path)
    return made.content, made.lost


def import_file(
    path: str | os.PathLike[str], placement: Placement, *, max_bytes: int = MAX_BYTES
) -> tuple[Placement | Timeline, tuple[str, ...]]:
    """A device_map scored on a placement's question, or a Chrome trace as its measured timeline; with
    notes."""
    from loadmaster.review.imports import read_device_map, read_import

    read = read_import(path, placement, max_bytes=max_bytes)
    if isinstance(read, tuple):
        return read
    imported, notes = read_device_map(read, placement)
    return plan(placement.problem, algorithm=imported), notes


def explain(
    placement: Placement,
    target: str = "",
    *,
    budget: Budget | float | str = "100x",
    replan: bool = True,
    seed: int = 0,
    progress: Callable[[str, float], None] = ignore_progress,
) -> "Explanation":
    """Why a plan, or an op or module of it, is as it is: the alternatives are tried (docs/report.md).

    Without a target single changes of the question are planned for, with one the target is put on every
    other device. `budget` is for each of these plans; without `replan` a target elsewhere is only simulated.
    """
    from loadmaster.review.explain import explain_plan
    from loadmaster.review.replanning import Replanner

    replanner = Replanner(parse_budget(budget), seed=seed, progress=progress)
    return explain_plan(placement, target, replanner, replan=replan)


def diff(
    before: Placement, after: Placement, *, names: tuple[str, str] = ("before", "after")
) -> "Difference":
    """Two plans of one model: what moved, and time and memory before and after."""
    from loadmaster.review.diff import compare_plans

    return compare_plans(before, after, names)


def whatif(
    placement: Placement,
    *,
    set: str | Sequence[str] = (),
    add: str | Sequence[str] = (),
    remove: str | Sequence[str] = (),
    batch: int | None = None,
    seq: int | None = None,
    optimizer: str | None = None,
    precision: str | None = None,
    sweep: str | None = None,
    together: bool = False,
    budget: Budget | float | str = "100x",
    order: str = "free",
    seed: int = 0,
    progress: Callable[[str, float], None] = ignore_progress,
) -> "tuple[Outcomes, Placement | None]":
    """The outcomes of planning again with something changed, and the plan with all changes.

    `set` 'gpu1.memory=24GB', `add` '1xA100-80GB', `remove` 'gpu1' (one or a list of each), and what
    a captured model can be captured with again; `sweep` 'batch=1..64' instead takes one of them through
    several values. Without `together` each of several changes has a row of its own before the row of all.
    """
    from loadmaster.review import whatif as trials
    from loadmaster.review.replanning import Replanner
    from loadmaster.review.settings import Settings

    replanner = Replanner(parse_budget(budget), order, seed, progress)
    words: dict[str, Any] = {"batch": batch, "seq": seq, "optimizer": optimizer, "precision": precision}
    sets, adds, removals = ((each,) if isinstance(each, str) else tuple(each) for each in (set, add, remove))
    asked = Settings(sets, adds, removals, batch, seq, optimizer, precision)
    if sweep is not None:
        found, answers = trials.sweep(placement, sweep, asked, replanner)
        return found, answers[-1]
    single = [Settings(sets=(each,)) for each in sets]
    single += [Settings(add=(each,)) for each in adds] + [Settings(remove=(each,)) for each in removals]
    single += [Settings(**{name: value}) for name, value in words.items() if value is not None]
    if not single:
        raise InputError("nothing is changed; name --set, --add, --remove, --batch or --sweep")
    changes = [asked] if together or len(single) == 1 else [*single, asked]
    found, answers = trials.try_changes(placement, changes, replanner)
    return found, answers[-1]


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
    from loadmaster.simulator.peak_check import check_plan_and_peaks

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


def _repair_plan(problem: Problem, start: Plan) -> Placement:
    """A plan that fits, repaired from one that does not."""
    from loadmaster.placers.search.refine import Refine

    return plan(problem, algorithm=Refine(start, kicks=0), budget="60x", progress=ignore_progress)


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
