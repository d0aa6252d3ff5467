"""The default: a plan that fits within milliseconds, then every suitable algorithm, then local search.

A portfolio. Everything on one device is always a legal answer and comes first. Then the constructors, cheap
ones first, without repair, and `learned_order` where its file of verdicts recommends it; where none of them
fits, for chains `ideal_dp`, whose proof may end it, then `memory_first`, then constructors that repair; the
oracle where the problem is tiny; for training steps segments of the forward order; last, local search from
`m_etf`'s plan with a quarter of the budget, unless it is far behind, and from the best plan with the rest;
before that CP-SAT for a better bound, or after it, where the graph is small, for a better plan too. It ends
early when the best plan is within `good_enough` of the lower bound. It reports every member: who won, and why
the others lost.
"""

import math
import time
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from loadmaster.core.graph import units
from loadmaster.core.placement import Member, Placement, Status
from loadmaster.core.plan import Plan
from loadmaster.core.problem import Objective, Problem, Split
from loadmaster.core.run import Bound, Budget, Run
from loadmaster.core.units import format_bytes, format_percent, format_seconds
from loadmaster.placers.answer import Meter
from loadmaster.placers.learned._verdict import is_recommended
from loadmaster.placers.registry import (
    Placer,
    own_algorithms,
    placer,
    why_missing_package,
    why_not,
    why_unsuited,
)

_FIRST = ("single_device", "m_topo", "heft", "cpop", "m_etf", "chain_balance")  # then the others, by name
_LAST = ("m_sct",)  # not worth it when the plan is good enough
_PIPELINED = ("linear_dp", "ideal_dp", "local_search", "cpsat_throughput")  # for throughput alone
_NOT_CONSTRUCTORS = (
    "auto",
    "refine",
    "layers",
    "segments",
    "branch_and_bound",
    "brute_force",
    "memory_first",
    "cpsat_latency",
    "pipeline",  # and its measures: steps of micro-batches
    "pipeline_equal",
    "pipeline_by_speed",
    *_PIPELINED,
)
_QUICK, _QUARTER, _MOST_OF_IT, _MOST = 0.1, 0.25, 0.6, 0.95
_FOR_SEGMENTS = 0.4  # of the budget, for training steps
_FOR_LAYERS = 0.35  # likewise, for the bound and for starts
_FOR_TREE = 0.6  # of the budget, for every plan of a tiny problem
_FOR_ROOM = 0.5  # of what is left, for each member that may find a plan where nothing fits yet
_FOR_PROOF = 0.4  # of the budget, where local search still has much to do
_FOR_ANOTHER = 0.15  # likewise, where layers have proven something
_UNMENDED = ("single_device", "memory_first")  # the first stays what it is, the second has done its best
_EQUAL = 1e-9  # times this near differ by rounding
_FEW_DEVICES, _FEW_OPS = 3, 60  # of a problem that is tiny
_HOPELESS = 1.5  # a start this much slower than the best plan is not refined


@dataclass(frozen=True, slots=True)
class Auto:
    """`good_enough`: a gap at which the search stops; `tiny_units`: up to which every plan is tried
    or ruled out; `small_ops`: where local search is soon done, and CP-SAT has the rest of the budget.
    """

    good_enough: float = 0.01
    tiny_units: int = 12
    small_ops: int = 250
    pipelines: ClassVar[bool] = True
    stepped: ClassVar[bool] = True

    def __call__(self, problem: Problem, run: Run) -> Placement:
        """Run the members in turn until the budget, the bound or the list ends."""
        portfolio = _Portfolio(problem, run, self.good_enough)
        if problem.is_stepped:
            for name in ("pipeline_equal", "pipeline_by_speed"):
                portfolio.construct(name)
            portfolio.search("pipeline", to_the_end=True)
            return portfolio.answer()
        if problem.pipeline:
            return _search_stages(portfolio)
        for name in _list_constructors():
            portfolio.construct(name)
        if is_recommended("learned_order", problem):
            portfolio.search("learned_order", share=_QUICK)
        if problem.objective == Objective.THROUGHPUT:
            portfolio.search("linear_dp", share=_QUICK, to_the_end=True)
        if problem.split == Split.CHAIN and not portfolio.fits:
            _search_chain(portfolio, share=_MOST_OF_IT)  # before repairs: it may prove that they are in vain
        if _is_tiny(problem, self.tiny_units):
            portfolio.search("branch_and_bound", share=_FOR_TREE, to_the_end=True, start=portfolio.plan)
        portfolio.make_fit()
        if not portfolio.fits:
            portfolio.insist()
        if problem.objective == Objective.THROUGHPUT:
            _search_throughput(portfolio)
        self._refine(portfolio)
        return portfolio.answer()

    def _refine(self, portfolio: "_Portfolio") -> None:
        """Local search: what a quarter of the budget makes of m_etf's plan is hardly ever missed."""
        if portfolio.plan is None:
            return
        small = portfolio.problem.graph.num_ops <= self.small_ops and _can_use_cpsat(portfolio.problem)
        if _has_backward(portfolio.problem):
            portfolio.search("layers", share=_FOR_LAYERS, start=portfolio.plan)
            share = _FOR_ANOTHER if portfolio.bound.name == "layers" else _FOR_PROOF
            _certify(portfolio, share=0.0 if small else share)
            portfolio.search("segments", share=_FOR_SEGMENTS, start=portfolio.plan)
        else:
            _refine_list_plan(portfolio)
            _certify(portfolio, share=0.0 if small else _FOR_PROOF)
        best = portfolio.best
        assert best is not None
        assert best.plan is not None
        start = "m_etf" if best is portfolio.result("m_etf") else best.plan  # by name: the search on its own
        share = _FOR_PROOF if small else 1.0
        portfolio.search("refine", label=f"refine({best.algorithm})", share=share, start=start)
        if small:
            _certify(portfolio)


def _refine_list_plan(portfolio: "_Portfolio") -> None:
    """Local search from m_etf's plan, unless that is the best or far behind."""
    best, listed = portfolio.best, portfolio.result("m_etf")
    if best is None or best.score_s is None or listed is None or listed is best:
        return
    if (listed.score_s or np.inf) <= _HOPELESS * best.score_s:
        portfolio.search("refine", label="refine(m_etf)", share=_QUARTER, start="m_etf")


def _is_tiny(problem: Problem, most_units: int) -> bool:
    """Whether every plan can be tried or ruled out."""
    few = problem.cluster.num_devices <= _FEW_DEVICES and problem.graph.num_ops <= _FEW_OPS
    return few and units(problem.graph)[1] <= most_units


def _has_backward(problem: Problem) -> bool:
    """Whether there are backward ops: then stretches of the forward order pay."""
    return problem.graph.num_ops > 0 and bool((problem.graph.mirror >= 0).any())


def _search_stages(portfolio: "_Portfolio") -> Placement:
    """Stages with room for their micro-batches: along one order, along many, over all ideals."""
    portfolio.construct("chain_balance")
    portfolio.search("linear_dp", share=_QUICK, to_the_end=True)
    portfolio.search("ideal_dp", share=_MOST, to_the_end=True)
    return portfolio.answer()


def _search_chain(portfolio: "_Portfolio", *, share: float) -> None:
    """The best chain there is, or the proof that none fits, once."""
    if portfolio.problem.objective == Objective.THROUGHPUT and portfolio.result("ideal_dp") is None:
        portfolio.search("ideal_dp", share=share, to_the_end=True)


def _search_throughput(portfolio: "_Portfolio") -> None:
    """The best chain there is; or splits of any shape: local search, then CP-SAT for plan and bound."""
    if portfolio.problem.split != Split.FREE:
        _search_chain(portfolio, share=_MOST)
    else:
        portfolio.search("local_search", share=_QUARTER, start=portfolio.plan)
    portfolio.search("cpsat_throughput", share=_MOST, to_the_end=True, start=portfolio.plan)


def _certify(portfolio: "_Portfolio", *, share: float = 1.0) -> None:
    """CP-SAT from the best plan: better plans and bounds of small graphs, a better bound of larger ones."""
    best = portfolio.best
    if best is None or best.plan is None or portfolio.problem.objective != Objective.STEP or share == 0.0:
        return
    portfolio.search("cpsat_latency", share=share, start=best.plan, coarse_ops=0)


def _can_use_cpsat(problem: Problem) -> bool:
    """Whether CP-SAT can be asked."""
    return not why_not(own_algorithms()["cpsat_latency"].traits, problem)


def _list_constructors() -> list[str]:
    """Every constructor of this package, the likely and cheap ones first."""
    entries = own_algorithms()
    named = (*_FIRST, *_LAST, *_NOT_CONSTRUCTORS)
    rest = sorted(name for name, e in entries.items() if name not in named and e.family != "learned")
    return [name for name in (*_FIRST, *rest, *_LAST) if name in entries]


class _Portfolio:
    """The answers so far and what is left of the budget."""

    def __init__(self, problem: Problem, run: Run, good_enough: float) -> None:
        self.problem, self.run, self.good_enough = problem, run, good_enough
        self.meter, self.entries = Meter(run), own_algorithms()
        self.bound = run.bound
        self.best: Placement | None = None
        self.results: list[tuple[str, Placement]] = []
        self.skipped: list[Member] = []

    def construct(self, name: str) -> None:
        """Have a constructor answer, without repair; while nothing fits each gets its turn."""
        reason = self._why_proven() or (self._why_good_enough() if name in _LAST else "")
        if self.meter.spent and (self.fits or name not in _FIRST):
            reason = reason or "the budget is spent"
        self._run(name, reason, replace(self.meter.member(), repair=False))

    def make_fit(self) -> None:
        """Where nothing fits, memory comes first; then the constructors may repair their plans."""
        reason = "a plan that fits was found" if self.fits else ""
        self._run("memory_first", self._why_proven() or reason, self.meter.member())
        for name in [name for name, _ in self.results if name not in _UNMENDED]:
            if self.fits or self._why_proven() or self.meter.spent:
                break
            self._run(name, "", self.meter.member(), label=f"{name}, repaired")

    def insist(self) -> None:
        """Where nothing fits yet, whatever else may find a plan that does, until one does."""
        nearest = self.nearest
        self.search("segments", share=_FOR_ROOM)
        if not self.fits:
            self.search("cpsat_latency", share=_FOR_ROOM)
        for name in ("local_search", "cpsat_throughput", "refine"):
            if not self.fits:
                self.search(name, share=_FOR_ROOM, start=nearest)

    @property
    def nearest(self) -> Plan | None:
        """The best plan, or the one that comes nearest to fitting."""
        if self.best is None:
            return None
        return self.best.plan or self.best.least_overflow_plan

    @property
    def fits(self) -> bool:
        """Whether some plan fits."""
        return self.best is not None and self.best.fits

    def result(self, name: str) -> Placement | None:
        """What a member answered, if it was asked."""
        return next((result for known, result in self.results if known == name), None)

    def skip(self, name: str, reason: str) -> None:
        """Say why a member was not asked."""
        self.skipped.append(Member(name, None, None, 0.0, f"not tried: {reason}"))

    @property
    def plan(self) -> Plan | None:
        """The best plan, if one fits."""
        return None if self.best is None else self.best.plan

    def search(
        self, name: str, *, label: str = "", share: float = 1.0, to_the_end: bool = False, **parameters: Any
    ) -> None:
        """Have a search answer with a share of the whole budget, or most of what is left of it.

        `to_the_end`: even where the plan is good enough, for the proof. `label` is what it is called in the
        answer, `parameters` are those of the algorithm.
        """
        reason = self._why_proven() or ("" if to_the_end else self._why_good_enough())
        reason = reason or ("the budget is spent" if self.meter.spent else "")
        member, before = self.meter.member(), self.meter.count
        if share < 1.0:
            whole, left = (
                _share_of_budget(self.run.budget, share),
                _share_of_budget(member.budget, max(share, _MOST_OF_IT)),
            )
            member = replace(member, budget=min(whole, left, key=_budget_size))
        self._run(name, reason, member, label=label, **parameters)
        if not reason and member.budget.count is not None:
            self.meter.charge(before + member.budget.count)

    def _run(self, name: str, reason: str, member: Run, *, label: str = "", **parameters: Any) -> None:
        """Ask an algorithm, or say why not; only one that is asked is imported."""
        traits, label = self.entries[name].traits, label or name
        reason = why_unsuited(traits, self.problem) or reason or why_missing_package(traits)
        if reason:
            self.skip(label, reason)
            return
        self.run.progress(f"{label}{self._describe_so_far()}", 0.0)
        result = placer(name, **parameters)(self.problem, replace(member, bound=self.bound))
        self.results.append((label, result))
        if result.bound_s > self.bound.seconds:
            self.bound = Bound(result.bound_s, result.bound_name, self.bound.infeasible)
            self.run.prove(self.bound)
        if self.best is None or _rank_key(result) < _rank_key(self.best):
            self.best = result

    def _describe_so_far(self) -> str:
        """The best time, what is proven, and the gap between them, for a line of progress."""
        if self.best is None or self.best.score_s is None:
            return ""
        best_s, bound_s = self.best.score_s, self.bound.seconds
        told = f": best {format_seconds(best_s)}"
        if bound_s <= 0:
            return told
        return f"{told}, bound {format_seconds(bound_s)}, gap {format_percent(best_s / bound_s - 1.0)}"

    def _find_proven(self) -> Placement | None:
        """An answer that is proven and as good as the best."""
        known, best = (Status.OPTIMAL, Status.INFEASIBLE), self.best
        alike = (r for _, r in self.results if best is not None and _is_as_good(r, best))
        return next((r for r in alike if r.status in known), None)

    def _why_proven(self) -> str:
        certain = self._find_proven()
        if certain is None:
            return ""
        optimal = certain.status == Status.OPTIMAL
        return "the best plan is proven optimal" if optimal else "it is proven that none fits"

    def _why_good_enough(self) -> str:
        if self.best is None or self.best.score_s is None or self.bound.seconds <= 0:
            return ""
        gap = self.best.score_s / self.bound.seconds - 1.0
        if gap > self.good_enough:
            return ""
        return f"the best plan is within {format_percent(gap)} of the bound"

    def answer(self) -> Placement:
        """The best plan with the best bound, and how every member did."""
        best = self.best
        assert best is not None  # single_device supports every problem
        members = tuple(_describe_member(name, result, best) for name, result in self.results)
        proven = self._find_proven() or best
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


def _budget_size(budget: Budget) -> float:
    return float(budget.count if budget.count is not None else budget.seconds or 0.0)


def _share_of_budget(budget: Budget, share: float) -> Budget:
    """A share of a whole budget, at least one plan."""
    if budget.count is not None:
        return Budget(count=max(int(share * budget.count), 1))
    assert budget.seconds is not None
    return Budget(seconds=share * budget.seconds)


def _rank_key(result: Placement) -> tuple[bool, float, float]:
    """Fitting first, then fast, then least overflow."""
    seconds = result.score_s if result.score_s is not None else 0.0
    return (not result.fits, seconds, float(result.shortfall_bytes.sum()))


def _is_as_good(result: Placement, best: Placement) -> bool:
    """Whether two answers differ by rounding alone: the same plan may be timed in another order of adding."""
    if result.score_s is None or best.score_s is None:
        return result.fits == best.fits
    return result.fits == best.fits and math.isclose(result.score_s, best.score_s, rel_tol=_EQUAL)


def _describe_member(name: str, result: Placement, best: Placement) -> Member:
    """How a member did, in words, with what it says of itself."""
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
        reason = "as good" if _is_as_good(result, best) else f"{format_seconds(later)} slower"
    notes = [note.reason for note in result.members if note.name == result.algorithm]
    return Member(name, result.status, result.score_s, result.wall_s, "; ".join([reason, *notes]))


PLACER: type[Placer] = Auto
