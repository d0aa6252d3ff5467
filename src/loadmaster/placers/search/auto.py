"""The default: every algorithm that serves the problem, best plan kept, early stop at the bound.

A portfolio. Cheap constructors come first, so that a plan exists within milliseconds; the oracle
only where the problem is tiny. It reports every member: who won, and why the others lost.
"""

import time
from dataclasses import dataclass, replace

from loadmaster.core.placement import Member, Placement, Status
from loadmaster.core.plan import Plan
from loadmaster.core.problem import Problem
from loadmaster.core.run import Budget, Run, Score
from loadmaster.core.units import format_bytes, format_percent, format_seconds
from loadmaster.placers.registry import Placer, own, placer, why_not

_FAMILY_ORDER = {"heuristic": 0, "exact": 1, "search": 2, "learned": 3}


@dataclass(frozen=True, slots=True)
class Auto:
    """`good_enough`: a gap at which the search stops; `tiny_ops`: the largest problem for brute force."""

    good_enough: float = 0.01
    tiny_ops: int = 6

    def __call__(self, problem: Problem, run: Run) -> Placement:
        """Run the members in turn until the budget, the bound or the list ends."""
        best: Placement | None = None
        scored = _Counter(run)
        results: list[Placement] = []
        skipped: list[Member] = []
        for name, algorithm in self._members(problem):
            reason = why_not(algorithm, problem) or self._enough(run, best, scored.count)
            if reason:
                skipped.append(Member(name, None, None, 0.0, f"not tried: {reason}"))
                continue
            run.progress(name, 0.0)
            started = time.perf_counter()
            result = algorithm(problem, replace(run, score=scored, started=started, budget=scored.left()))
            results.append(result)
            if best is None or _rank(result) < _rank(best):
                best = result
        assert best is not None  # single_device serves every problem
        members = tuple(_member(result, best) for result in results)
        seconds = time.perf_counter() - run.started
        proven = next((result for result in results if result.status == Status.INFEASIBLE), best)
        return replace(
            best,
            algorithm="auto",
            status=proven.status,
            proof=proven.proof,
            members=members + tuple(skipped),
            wall_s=seconds,
        )

    def _members(self, problem: Problem) -> list[tuple[str, Placer]]:
        entries = [e for e in own().values() if e.name != "auto"]
        entries.sort(key=lambda e: (e.name != "single_device", _FAMILY_ORDER[e.family], e.name))
        tiny = problem.graph.num_ops <= self.tiny_ops and problem.cluster.num_devices <= 3
        return [(e.name, placer(e.name)) for e in entries if e.name != "brute_force" or tiny]

    def _enough(self, run: Run, best: Placement | None, tried: int) -> str:
        """Why to stop now, '' to go on; while nothing fits, every member gets its turn."""
        if best is None:
            return ""
        if best.status == Status.OPTIMAL:
            return "the best plan is proven optimal"
        if best.gap is not None and best.gap <= self.good_enough:
            return f"the best plan is within {format_percent(best.gap)} of the bound"
        return "the budget is spent" if best.fits and run.out_of_budget(tried) else ""


class _Counter:
    """The run's scorer, counting, so that members share one budget."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.count = 0

    def __call__(self, plan: Plan) -> Score:
        self.count += 1
        return self.run.score(plan)

    def left(self) -> Budget:
        """What the next member may use; never nothing, so that each can give one answer."""
        if self.run.budget.count is not None:
            return Budget(count=max(self.run.budget.count - self.count, 1))
        assert self.run.budget.seconds is not None
        return Budget(seconds=max(self.run.budget.seconds - (time.perf_counter() - self.run.started), 1e-3))


def _rank(result: Placement) -> tuple[bool, float, float]:
    """Fitting first, then fast, then least overflow."""
    seconds = result.score_s if result.score_s is not None else 0.0
    return (not result.fits, seconds, float(result.shortfall_bytes.sum()))


def _member(result: Placement, best: Placement) -> Member:
    """How a member did, in words."""
    if result is best:
        reason = "best" if result.fits else "nearest to fitting"
    elif not result.fits:
        short = int(result.shortfall_bytes.max())
        name = result.problem.cluster.device_name[int(result.shortfall_bytes.argmax())]
        reason = f"{name} lacks {format_bytes(short)}" if short else result.proof
    else:
        assert result.score_s is not None
        assert best.score_s is not None
        later = result.score_s - best.score_s
        reason = f"{format_seconds(later)} slower" if later > 0 else "as good"
    return Member(result.algorithm, result.status, result.score_s, result.wall_s, reason)


PLACER: type[Placer] = Auto
