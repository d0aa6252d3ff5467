"""The default: a plan that fits within milliseconds, then every algorithm that serves, then local search.

A portfolio. Everything on one device is always a legal answer and comes first. Then the constructors, each
of them cheap; `memory_first` early where nothing fits yet; the oracle where the problem is tiny; last, local
search from `m_etf`'s plan with a quarter of the budget and from the best plan with the rest. It ends early
when the best plan is within `good_enough` of the lower bound: what is skipped is dear, every cheap
constructor has had its turn. It reports every member: who won, and why the others lost.
"""

import time
from dataclasses import dataclass, replace

from loadmaster.core.placement import Member, Placement, Status
from loadmaster.core.problem import Problem
from loadmaster.core.run import Bound, Budget, Run
from loadmaster.core.units import format_bytes, format_percent, format_seconds
from loadmaster.placers.answer import Meter
from loadmaster.placers.registry import Placer, own, placer, why_not

_FIRST = ("single_device", "m_topo", "memory_first", "chain_balance", "m_etf", "heft", "cpop")  # then by name
_LAST = ("m_sct",)  # a constructor that is not worth it when the plan is good enough
_SEARCHES = ("auto", "refine", "brute_force")


@dataclass(frozen=True, slots=True)
class Auto:
    """`good_enough`: a gap at which the search stops; `tiny_ops`: the largest problem for brute force."""

    good_enough: float = 0.01
    tiny_ops: int = 6

    def __call__(self, problem: Problem, run: Run) -> Placement:
        """Run the members in turn until the budget, the bound or the list ends."""
        portfolio = _Portfolio(problem, run, self.good_enough)
        for name in _constructors():
            portfolio.construct(name)
        if problem.graph.num_ops <= self.tiny_ops and problem.cluster.num_devices <= 3:
            portfolio.search("brute_force", placer("brute_force"))
        self._refine(portfolio)
        return portfolio.answer()

    def _refine(self, portfolio: "_Portfolio") -> None:
        """Local search: what a quarter of the budget makes of m_etf's plan is never missed."""
        best = portfolio.best
        if best is not None and best.algorithm not in ("m_etf", "refine"):
            portfolio.search("refine(m_etf)", placer("refine", start="m_etf"), share=0.25)
        if best is not None and best.plan is not None:
            start = best.plan if best.algorithm != "m_etf" else "m_etf"
            portfolio.search(f"refine({best.algorithm})", placer("refine", start=start))


def _constructors() -> list[str]:
    """Every constructor of this package, the likely ones first and the dear ones last."""
    entries = own()
    rest = sorted(name for name in entries if name not in (*_FIRST, *_LAST, *_SEARCHES))
    return [name for name in (*_FIRST, *rest, *_LAST) if name in entries]


class _Portfolio:
    """The answers so far and what is left of the budget."""

    def __init__(self, problem: Problem, run: Run, good_enough: float) -> None:
        self.problem, self.run, self.good_enough = problem, run, good_enough
        self.meter = Meter(run)
        self.bound = run.bound
        self.best: Placement | None = None
        self.results: list[tuple[str, Placement]] = []
        self.skipped: list[Member] = []

    def construct(self, name: str) -> None:
        """Have a constructor answer; until something fits the first ones do, whatever the budget."""
        fits = self.best is not None and self.best.fits
        reason = self._proven() or (self._enough() if name in _LAST else "")
        if name == "memory_first" and fits:
            reason = reason or "a plan that fits was found"
        if self.meter.spent and (fits or name not in _FIRST[: _FIRST.index("memory_first") + 1]):
            reason = reason or "the budget is spent"
        self._run(name, placer(name), reason, self.meter.member())

    def search(self, name: str, algorithm: Placer, *, share: float = 1.0) -> None:
        """Have a search answer with a share of the whole budget, as far as there is some left."""
        reason = self._proven() or self._enough() or ("the budget is spent" if self.meter.spent else "")
        member = self.meter.member()
        if share < 1.0:
            member = replace(member, budget=_share(self.run.budget, share))
        self._run(name, algorithm, reason, member)
        if not reason and member.budget.count is not None:
            self.meter.charge(member.budget.count)

    def _run(self, name: str, algorithm: Placer, reason: str, member: Run) -> None:
        reason = why_not(algorithm, self.problem) or reason
        if reason:
            self.skipped.append(Member(name, None, None, 0.0, f"not tried: {reason}"))
            return
        self.run.progress(name, 0.0)
        result = algorithm(self.problem, replace(member, bound=self.bound))
        self.results.append((name, result))
        if result.bound_s > self.bound.seconds:
            self.bound = Bound(result.bound_s, result.bound_name, self.bound.infeasible)
        if self.best is None or _rank(result) < _rank(self.best):
            self.best = result

    def _proven(self) -> str:
        if self.best is None:
            return ""
        if self.best.status == Status.OPTIMAL:
            return "the best plan is proven optimal"
        return "it is proven that nothing fits" if self.best.status == Status.INFEASIBLE else ""

    def _enough(self) -> str:
        if self.best is None or self.best.score_s is None or self.bound.seconds <= 0:
            return ""
        gap = self.best.score_s / self.bound.seconds - 1.0
        if gap > self.good_enough:
            return ""
        return f"the best plan is within {format_percent(gap)} of the bound"

    def answer(self) -> Placement:
        """The best plan with the best bound, and how every member did."""
        best = self.best
        assert best is not None  # single_device serves every problem
        members = tuple(_member(name, result, best) for name, result in self.results)
        proven = next((r for _, r in self.results if r.status == Status.INFEASIBLE), best)
        return replace(
            best,
            algorithm="auto",
            status=proven.status,
            proof=proven.proof,
            bound_s=self.bound.seconds,
            bound_name=self.bound.name,
            guarantee=next((r.guarantee for _, r in self.results if r.guarantee), ""),
            members=members + tuple(self.skipped),
            wall_s=time.perf_counter() - self.run.started,
        )


def _share(budget: Budget, share: float) -> Budget:
    """A share of a whole budget, at least one plan."""
    if budget.count is not None:
        return Budget(count=max(int(share * budget.count), 1))
    assert budget.seconds is not None
    return Budget(seconds=share * budget.seconds)


def _rank(result: Placement) -> tuple[bool, float, float]:
    """Fitting first, then fast, then least overflow."""
    seconds = result.score_s if result.score_s is not None else 0.0
    return (not result.fits, seconds, float(result.shortfall_bytes.sum()))


def _member(name: str, result: Placement, best: Placement) -> Member:
    """How a member did, in words."""
    if result is best:
        reason = "best" if result.fits else "nearest to fitting"
    elif not result.fits:
        short = int(result.shortfall_bytes.max())
        device = result.problem.cluster.device_name[int(result.shortfall_bytes.argmax())]
        reason = f"{device} lacks {format_bytes(short)}" if short else result.proof
    else:
        assert result.score_s is not None
        assert best.score_s is not None
        later = result.score_s - best.score_s
        reason = f"{format_seconds(later)} slower" if later > 0 else "as good"
    return Member(name, result.status, result.score_s, result.wall_s, reason)


PLACER: type[Placer] = Auto
