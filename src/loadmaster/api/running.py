"""Running: a plan on real devices, in this process or in many, and whether its numbers are the same."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Unpack

from loadmaster.api.planning import plan, problem
from loadmaster.api.simulation import simulate
from loadmaster.cluster.local import auto_shorthand
from loadmaster.cluster.parse import parse_cluster
from loadmaster.core.errors import InputError
from loadmaster.core.io import load
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Plan
from loadmaster.core.problem import Problem
from loadmaster.core.question import Devices
from loadmaster.core.run import Budget, ignore_progress, parse_budget
from loadmaster.core.strategy_answer import StrategyAnswer
from loadmaster.graph.framework import is_tensorflow_model
from loadmaster.graph.origin import is_tensorflow_graph
from loadmaster.graph.whole_modules import group_by_module
from loadmaster.questions.problem import target_of

if TYPE_CHECKING:
    from loadmaster.core.answers.run_report import Outcome
    from loadmaster.runtime.distributed.pipeline_run import PipelineRun
    from loadmaster.runtime.distributed.strategy_run import StrategyRun
    from loadmaster.runtime.distributed.trial_run import PipelineOutcome, StrategyOutcome
    from loadmaster.runtime.place_request import PlaceOptions
    from loadmaster.runtime.placed import Placed
    from loadmaster.runtime.tensorflow.verify_step import StepVerification
    from loadmaster.runtime.verify.verification import Verification


def place(
    model: Any, plan_or_inputs: Any, *, devices: Devices = "auto", **wishes: "Unpack[PlaceOptions]"
) -> "Placed":
    """Run a model on several devices: same class, same weights, same numbers (docs/running.md).

    `plan_or_inputs` is a Placement or its file. It may also be example inputs (a tensor, a tuple or a dict);
    then a plan for `devices` is made first. Options:

    - `optimizer`: a class or name to plan for. An instance is also moved to the devices.
    - `loss`: a function from the model's output to one number, if that output is not a loss.
    - `kwargs`: example inputs by name.
    - `budget`, `costs`, `spill`, `assume`: as in `lm.plan` and `lm.problem`.
    - `accumulate`: forward and backward passes before each optimizer step.
    - `engine`: 'graph', 'hooks' (module by module) or 'auto'.
    - `compile`: compile the parts with torch.compile; True, or the name of a backend.
    - `verify`: 'first-step' compares the first step with the unplaced model.
    - `on_nan`: 'warn', 'raise' or None, for a loss that is not finite.
    - `output_device`: where outputs are moved to.
    - `presum`: add gradients before they are sent: fewer copies, but results may differ in the last bits.
    - `weights`: a safetensors file or a checkpoint folder to load.
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
    """Compare loss and gradients of one batch under a plan with those of the unplaced model.

    The model is not changed. For a TensorFlow model, the results of one step and all variables after it are
    compared.
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
    """Train a captured model on its plan for some steps of synthetic data, and compare with the prediction.

    The model is built from the source that the plan names, or from `model`. `calibrate` writes the measured
    times of ops to the cost database. `tell` is called with step, seconds, loss and bytes on each device.
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
    """Start the processes of a pipeline or a strategy. Under torchrun, join them.

    - `optimizer`: a class, a name, or a function of a list of weights.
    - `scheduler`: a function that makes a learning-rate schedule from the optimizer.
    - `clip`: the largest norm of all gradients.
    - `loss`: `loss(output, target)`, if the model does not return a loss.
    - `timeout`: how many seconds a process waits for another before it fails.
    - `emulate`: run the hosts of the plan as network namespaces on this machine.

    Strategies also take `weight`, `compare_every`, `bucket_bytes` and `verify` (docs/strategies.md).
    """
    from loadmaster.runtime.distributed.launch import LaunchOptions, load_launchable, strategy_options
    from loadmaster.runtime.distributed.launch import launch as start
    from loadmaster.runtime.distributed.pipeline.rank import TrainOptions
    from loadmaster.runtime.distributed.watch import failure_told
    from loadmaster.runtime.place_request import require_model

    with failure_told():
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


def _repair_plan(problem: Problem, start: Plan) -> Placement:
    """A plan that fits, repaired from one that does not."""
    from loadmaster.placers.search.refine import Refine

    return plan(problem, algorithm=Refine(start, kicks=0), budget="60x", progress=ignore_progress)
