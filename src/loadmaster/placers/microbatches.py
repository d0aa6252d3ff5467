"""Micro-batches: `--pipeline auto`, which weighs pipelines against op placement and one device.

A step of a global batch is one pass of everything, placed op by op, or a pipeline of 2, 4, ... micro-batches,
any number that divides the batch. Each number is tried on a micro-batch scaled from the whole (the rule is in
`cost/microbatch.py`); the best is captured again at its own size where the source allows it, and planned
with what is left of the budget. The bound is the least of those of all numbers that were tried.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from loadmaster.core.errors import InputError, ProblemError
from loadmaster.core.graph import Phase
from loadmaster.core.pipelines.order import ONE_F_ONE_B
from loadmaster.core.pipelines.schedule import AUTO
from loadmaster.core.placement import Member, Placement, Status
from loadmaster.core.plan import in_graph_order
from loadmaster.core.problem import Objective, Problem, Split
from loadmaster.core.run import Budget
from loadmaster.core.units import format_seconds
from loadmaster.cost.microbatch import make_microbatch
from loadmaster.graph.origin import origin_of
from loadmaster.placers.ask import CAPTURED, PlanRequest, find_placement
from loadmaster.placers.registry import placer, serves_steps_alone

_MOST_COUNTS = 6
_MOST_MICROBATCHES = 64
_ANY_BATCH = 32  # of a graph that does not say how large its batch is
_FOR_PLAIN, _FOR_COUNTS = 0.3, 0.3  # of the budget
_BELOW = 1.0 - 1e-12
_MOST_PROPOSED, _MOST_LOOKS, _LOOKS = 16, 3, 4  # micro-batches, numbers of them, plans of each number
_MOST_OPS = 20_000
_WORTH_A_WORD = 1.1


@dataclass(frozen=True, slots=True)
class Whole:
    """A step of a whole batch: its size, None where nobody knows it, and how to capture a smaller one."""

    problem: Problem
    batch: int | None = None
    capture: Callable[[int], Problem] | None = None


def counts_of(batch: int | None) -> list[int]:
    """Numbers of micro-batches worth a try: divisors of the batch, spread from 2 up to 64."""
    size = _ANY_BATCH if batch is None else batch
    found = [m for m in range(2, min(size, _MOST_MICROBATCHES) + 1) if size % m == 0]
    if len(found) <= _MOST_COUNTS:
        return found
    step = (len(found) - 1) / (_MOST_COUNTS - 1)
    return [found[round(i * step)] for i in range(_MOST_COUNTS)]


def plan_microbatches(whole: Whole, ask: PlanRequest) -> Placement:
    """The best of op placement, one device and pipelines of any number of micro-batches."""
    problem, started = _require_training(whole.problem), time.perf_counter()
    order = CAPTURED if _is_captured(problem) else ask.order  # a stage runs as torch does, so does one pass
    one_pass = placer("auto") if serves_steps_alone(ask.algorithm) else ask.algorithm
    plain = find_placement(
        problem, replace(ask, algorithm=one_pass, order=order, budget=_share(ask.budget, _FOR_PLAIN))
    )
    counts = counts_of(whole.batch) if problem.cluster.num_devices > 1 else []
    tried: list[tuple[int, Placement]] = []
    quick = placer("pipeline", simulated=2, moves=0)
    for count in counts:
        ask.progress(f"{count} micro-batches", 0.0)
        each = replace(ask, algorithm=quick, spill=None, budget=_share(ask.budget, _FOR_COUNTS / len(counts)))
        tried.append((count, find_placement(with_steps(make_microbatch(problem, count), count), each)))
    if not tried:
        return plain
    tried.sort(key=lambda one: _rank(one[1]))
    spent = time.perf_counter() - started
    best = _refine(whole, tried, ask, spent)
    return _choose(plain, best, tried, time.perf_counter() - started)


def propose_pipeline(placement: Placement, batch: int | None) -> tuple[Placement, float | None] | None:
    """A pipeline that is a tenth faster than one pass as it trains, or fits where that does not; else None.

    With it the seconds of that pass.

    A brief look, at scaled micro-batches: `--pipeline auto` plans it properly.
    """
    problem = placement.problem
    gpus = ~problem.cluster.on_host[problem.cluster.kind]
    if problem.objective != Objective.STEP or problem.pipeline or gpus.sum() < 2 or not _is_captured(problem):
        return None
    if not (problem.graph.phase == Phase.BACKWARD).any() or problem.graph.num_ops > _MOST_OPS:
        return None
    quick = placer("pipeline", simulated=1, moves=0, replicas=False)
    found = []
    for count in [m for m in counts_of(batch) if m <= _MOST_PROPOSED][-_MOST_LOOKS:]:
        ask = PlanRequest(quick, Budget(count=_LOOKS))
        found.append(find_placement(with_steps(make_microbatch(problem, count), count, ONE_F_ONE_B), ask))
    best = min(found, key=_rank, default=None)
    if best is None or best.score_s is None:
        return None
    now_s = _as_trained_s(placement)
    return (best, now_s) if now_s is None or best.score_s * _WORTH_A_WORD < now_s else None


def _as_trained_s(placement: Placement) -> float | None:
    """What a plan of one pass takes in torch's order, None without a plan."""
    from loadmaster.simulator.events.engine import simulate

    plan = placement.plan
    return None if plan is None else simulate(placement.problem, in_graph_order(plan)).step_s


def _is_captured(problem: Problem) -> bool:
    return origin_of(problem.graph) is not None


def _require_training(problem: Problem) -> Problem:
    if not (problem.graph.phase == Phase.BACKWARD).any():
        raise ProblemError(
            f"a pipeline of micro-batches is a schedule of training, and graph {problem.graph.name!r} has no"
            " backward op; leave the pipeline out"
        )
    if problem.objective != Objective.STEP or problem.pipeline:
        raise ProblemError(
            "--pipeline auto is about the time of a step of the whole batch; ask for --objective step"
        )
    return problem


def with_steps(problem: Problem, count: int, schedule: str = AUTO) -> Problem:
    """The same micro-batch as one of `count` of a step."""
    return replace(problem, objective=Objective.STEP, split=Split.FREE, pipeline=f"{schedule}:{count}")


def _refine(whole: Whole, tried: list[tuple[int, Placement]], ask: PlanRequest, spent_s: float) -> Placement:
    """The best number with the rest of the budget, on a captured micro-batch where there can be one."""
    count, first = tried[0]
    problem = first.problem
    if whole.capture is not None and whole.batch is not None:
        try:
            problem = with_steps(whole.capture(whole.batch // count), count)
        except InputError as trouble:
            reason = f"a micro-batch could not be captured, so it was scaled: {trouble}"
            ask.progress(reason, 0.0)
    left = _share(ask.budget, 1.0 - _FOR_PLAIN - _FOR_COUNTS)
    if left.seconds is not None and ask.budget.seconds is not None:
        left = Budget(seconds=max(left.seconds, ask.budget.seconds - spent_s))
    found = find_placement(problem, replace(ask, algorithm=placer("pipeline"), spill=None, budget=left))
    if problem is first.problem and _rank(first) < _rank(found):
        return first
    return found


def _choose(
    plain: Placement,
    best: Placement,
    tried: Sequence[tuple[int, Placement]],
    wall_s: float,
) -> Placement:
    """The better one, with all that were weighed, and a bound that holds for all of them."""
    chosen = min((plain, best), key=_rank)
    members = [_member("one pass, op by op", plain, _describe(plain, chosen))]
    single = next((m for m in plain.members if m.name == "single_device"), None)
    if single is not None:
        reason = single.reason  # against other plans of one pass
        if chosen is not plain and single.score_s is not None:
            reason = _compare(single.score_s, chosen)
        members.append(Member("one pass, one device", single.status, single.score_s, single.seconds, reason))
    count = best.problem.schedule.num_microbatches if best.problem.schedule is not None else 1
    members.append(
        Member(
            f"pipeline, {count} micro-batches",
            best.status,
            best.score_s,
            best.wall_s,
            _describe(best, chosen),
        )
    )
    for number, other in sorted(tried, key=lambda one: one[0]):
        if number != count:
            reason = f"{_describe(other, chosen)}; scaled, looked at briefly"
            members.append(_member(f"pipeline, {number} micro-batches", other, reason))
    every = [plain, best, *(placement for _, placement in tried if placement is not best)]
    least = min(every, key=lambda one: one.bound_s)
    bound_s = min(least.bound_s * _BELOW, chosen.score_s if chosen.score_s is not None else least.bound_s)
    numbers = ", ".join(str(number) for number, _ in sorted(tried, key=lambda one: one[0]))
    proven = chosen.status == Status.INFEASIBLE and all(p.status == Status.INFEASIBLE for p in every)
    status = chosen.status
    if not proven:
        status = Status.FEASIBLE if chosen.fits else Status.NOT_FOUND
    return replace(
        chosen,
        algorithm="auto" if chosen is plain else chosen.algorithm,
        status=status,
        proof=chosen.proof if not chosen.fits else "",
        bound_s=bound_s,
        bound_name=f"{least.bound_name}; 1 pass or {numbers} micro-batches" if bound_s > 0 else "none",
        members=tuple(members),
        guarantee="",
        wall_s=wall_s,
    )


def _member(name: str, placement: Placement, reason: str) -> Member:
    return Member(name, placement.status, placement.score_s, placement.wall_s, reason)


def _describe(placement: Placement, chosen: Placement) -> str:
    if placement is chosen:
        return "best" if placement.fits else "nearest to fitting"
    if placement.score_s is None:
        return placement.proof or "does not fit"
    return _compare(placement.score_s, chosen)


def _compare(score_s: float, chosen: Placement) -> str:
    if chosen.score_s is None or score_s <= chosen.score_s:
        return "as good"
    return f"{format_seconds(score_s - chosen.score_s)} slower"


def _rank(placement: Placement) -> tuple[bool, float, float]:
    seconds = placement.score_s if placement.score_s is not None else 0.0
    return (not placement.fits, seconds, float(placement.shortfall_bytes.sum()))


def _share(budget: Budget, share: float) -> Budget:
    if budget.count is not None:
        return Budget(count=max(int(share * budget.count), 1))
    assert budget.seconds is not None
    return Budget(seconds=share * budget.seconds)
