"""Spill: plans whose weights and activations may wait in host memory while their ops run on a GPU.

For a placement of the computation (all on one device, or what an algorithm finds where weights weigh nothing)
weights are moved to the store until it fits: as many as are lacking, spread over the pass, from its middle,
or the largest first, with windows of several sizes. Where all weights are not enough, activations follow,
those of the first ops first: they wait longest for the backward pass. Every try is simulated on the graph
with loads (`graph/spill.py`); the fastest that fits is the answer.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from loadmaster.core.arrays import Bools, Ints, Longs
from loadmaster.core.cluster import Cluster
from loadmaster.core.errors import ClusterError, ProblemError, UnknownNameError
from loadmaster.core.graph import Graph, Phase
from loadmaster.core.placement import Member, Placement, Status
from loadmaster.core.plan import Plan, plan_of
from loadmaster.core.problem import BY_ROUTE, FREE, Costs, Objective, Origin, Problem
from loadmaster.core.run import Budget, Run, Score
from loadmaster.graph.spill import NEW, Reading, Stash, add_loads, find_readings, find_stashes
from loadmaster.placers.answer import make_placement
from loadmaster.simulator.bounds import lower_bounds
from loadmaster.simulator.events import engine

HOST = "host"
_WINDOWS = (2, 4, 8)  # times the largest weight that is spilled
_STASH_WINDOWS = (1, 2)  # times the largest weight or activation, which may be all logits
_ROUNDS = 8  # to find how much must be spilled
_SLACK = 1.02  # more than is lacking, since every weight that goes changes the moment of the peak
_ISSUE_S = 3e-5  # assumed: a copy, an event and a wait, where launches are counted at all
_SMALL = 1e-4  # of all weights: one that is smaller is spilled last; of all activations: never


def find_store_device(cluster: Cluster, name: str) -> int:
    """The device that spilled weights stay on: a host-side one, or the one that is named."""
    if name != HOST:
        if name not in cluster.device_name:
            raise UnknownNameError("device to spill to", name, [HOST, *cluster.device_name])
        return cluster.device_name.index(name)
    side = np.flatnonzero(cluster.on_host[cluster.kind])
    if len(side) == 0 or cluster.num_devices < 2:
        raise ClusterError(
            f"spill='host' needs host memory beside a device; the cluster is"
            f" {', '.join(cluster.device_name)}: name it, e.g. 'H200, cpu-64GB'"
        )
    return int(side[np.argmax(cluster.usable_bytes[side])])


def with_spill(
    placement: Placement, store: int, *, plan: Callable[[Problem], Placement], budget: Budget
) -> Placement:
    """The placement, or a better one that spills weights to a device; `plan` answers other problems."""
    problem = placement.problem
    if problem.objective != Objective.STEP or problem.pipeline:
        raise ProblemError("spilling supports only the step objective; leave out spill or the pipeline")
    own = placement.plan
    if own is not None and not (own.device == store).any():
        return placement  # nothing of it is slowed down by memory
    search = _Search(problem, store, budget)
    for name, where in _list_computations(problem, store, plan):
        search.try_all(name, where)
    found = search.answer(placement)
    return placement if found is None else found


def _list_computations(
    problem: Problem, store: int, plan: Callable[[Problem], Placement]
) -> Iterator[tuple[str, Ints]]:
    """Where everything but weights may be: one device alone, and a plan that weights do not weigh on."""
    cluster, graph = problem.cluster, problem.graph
    seconds = problem.device_compute_s.sum(axis=0)
    others = [d for d in range(cluster.num_devices) if d != store and np.isfinite(seconds[d])]
    for d in sorted(others, key=lambda d: (seconds[d], -cluster.usable_bytes[d]))[:2]:
        free = problem.pinned == FREE
        yield cluster.device_name[d], np.where(free, d, problem.pinned).astype(np.int32)
    if len(others) > 1:
        kept = graph.keep & (graph.phase[graph.tensor_op] != Phase.BACKWARD)
        light = replace(graph, resident_bytes=np.zeros_like(graph.resident_bytes), keep=kept)
        found = plan(replace(problem, graph=light)).plan
        if found is not None:
            yield "several devices", found.device


@dataclass(frozen=True, slots=True, eq=False)
class _Try:
    """A plan with loads that was simulated."""

    problem: Problem
    plan: Plan
    score: Score
    name: str
    num_spilled: int
    num_stashed: int


class _Search:
    """Tries, the best of them, and what they cost."""

    def __init__(self, problem: Problem, store: int, budget: Budget) -> None:
        self.problem, self.store = problem, store
        self.best: _Try | None = None
        self.num = 0
        self._began, self._budget = time.perf_counter(), budget
        self._readings = find_readings(problem.graph)
        self._freed = _freed_bytes(problem.graph)
        self._stashes = find_stashes(problem.graph)

    def try_all(self, name: str, where: Ints) -> None:
        """Every way of choosing weights, for one placement of the computation."""
        device = self._with_weights(where)
        mine = [param for param, some in self._readings.items() if self._may_spill(param, some, device)]
        if not mine:
            return
        largest = max(self._weight_bytes(param) for param in mine)
        too_much = 0
        for way, order in _list_orders(mine, self._freed, self._readings).items():
            for times in _WINDOWS:
                if self._spent:
                    return
                title = f"{name}, {way}, window of {times} weights"
                too_much = self._spill_until_fits(title, device, order, way == "spread", times * largest)
        if too_much > 0:
            for times in _STASH_WINDOWS:
                self._stash_until_fits(f"{name}, window of {times} tensors", device, mine, times, too_much)

    @property
    def _spent(self) -> bool:
        if self._budget.count is not None:
            return self.num >= self._budget.count
        assert self._budget.seconds is not None
        return self.num > 0 and time.perf_counter() - self._began >= self._budget.seconds

    def _with_weights(self, where: Ints) -> Ints:
        """A weight and its update are where its first reader is, unless they are pinned."""
        graph, device = self.problem.graph, where.copy()
        home = np.full(int(graph.group.max()) + 2, -1, dtype=np.int32)
        for param, some in self._readings.items():
            if self.problem.pinned[param] == FREE:
                device[param] = where[some[0].reader]
            if graph.group[param] >= 0:
                home[graph.group[param]] = device[param]
        grouped = (graph.group >= 0) & (home[graph.group] >= 0) & (self.problem.pinned == FREE)
        device[grouped] = home[graph.group[grouped]]
        return device

    def _may_spill(self, param: int, some: Sequence[Reading], device: Ints) -> bool:
        """Whether a weight is read elsewhere than on the store only, and nothing pins it."""
        ops = np.flatnonzero(self.problem.graph.group == self.problem.graph.group[param])
        ops = ops if self.problem.graph.group[param] >= 0 else np.array([param])
        runs = np.isfinite(self.problem.device_compute_s[ops, self.store]).all()
        free = (self.problem.pinned[ops] == FREE).all()
        return bool(runs and free and all(device[one.reader] != self.store for one in some))

    def _weight_bytes(self, param: int) -> int:
        return int(self.problem.graph.tensor_bytes[self.problem.graph.tensor_op == param].max())

    def _spill_until_fits(self, name: str, device: Ints, order: list[int], spread: bool, window: int) -> int:
        """Spill more until it fits, or all is spilled; the bytes that are lacking then."""
        sizes = self._freed[order].astype(np.float64)
        wanted, over = 0.0, 0
        for _ in range(_ROUNDS):
            chosen = _take_evenly(order, sizes, wanted) if spread else _take_first(order, sizes, wanted)
            made = self._compute_score(name, device, chosen, window)
            over = _overflow_bytes(self.problem.cluster, made.score, self.store)
            if over <= 0 or len(chosen) == len(order) or self._spent:
                break
            wanted = float(self._freed[chosen].sum()) + _SLACK * over
        return over

    def _stash_until_fits(
        self, name: str, device: Ints, params: list[int], times: int, too_much: float
    ) -> None:
        """All weights are spilled; more activations follow until it fits, or no more are left."""
        graph = self.problem.graph
        sizes = {
            op: sum(int(graph.tensor_bytes[one.tensor]) for one in some) for op, some in self._stashes.items()
        }
        least = _SMALL * sum(sizes.values())
        ops = [op for op in self._stashes if device[op] != self.store and sizes[op] >= least]
        if not ops:
            return
        largest = max(*(self._weight_bytes(param) for param in params), *(sizes[op] for op in ops))
        sums = np.cumsum([sizes[op] for op in ops])
        wanted = _SLACK * too_much
        for _ in range(_ROUNDS):
            if self._spent:
                return
            taken = ops[: int(np.searchsorted(sums, wanted)) + 1]
            made = self._compute_score(name, device, params, times * largest, taken)
            over = _overflow_bytes(self.problem.cluster, made.score, self.store)
            if over <= 0 or len(taken) == len(ops):
                return
            wanted = float(sums[len(taken) - 1]) + _SLACK * over

    def _compute_score(
        self, name: str, device: Ints, chosen: list[int], window: int, stashed: Sequence[int] = ()
    ) -> _Try:
        """Simulate a set of weights spilled, and of ops whose outputs wait on the store."""
        self.num += 1
        picked = [reading for param in chosen for reading in self._readings[param]]
        home = device.copy()
        gone = np.isin(self.problem.graph.group, self.problem.graph.group[chosen])
        home[gone & (self.problem.graph.group >= 0)] = self.store
        home[chosen] = self.store
        stashes = [stash for op in stashed for stash in self._stashes[op]]
        problem, origin = spill_problem(self.problem, picked, home, window_bytes=window, stashes=stashes)
        where = np.where(origin == NEW, self.store, home[np.maximum(origin, 0)]).astype(np.int32)
        plan = plan_of(where, np.arange(len(where), dtype=np.int32))
        made = _Try(problem, plan, engine.prepare(problem).score(plan), name, len(chosen), len(stashes))
        if self.best is None or made.score < self.best.score:
            self.best = made
        return made

    def answer(self, base: Placement) -> Placement | None:
        """The best try as a placement, if it is better than what is there without."""
        best = self.best
        if best is None or best.score.overflow_bytes or (base.fits and best.score.time_s >= _seconds(base)):
            return None
        run = Run(
            budget=self._budget,
            rng=np.random.default_rng(0),
            score=engine.prepare(best.problem).score,
            arrange=engine.prepare(best.problem).order_and_score,
            bound=lower_bounds.lower_bound(best.problem),
            started=self._began,
        )
        taken = time.perf_counter() - self._began
        what = f"{best.num_spilled} weights"
        if best.num_stashed:
            what += f" and {best.num_stashed} activations"
        reason = f"{what} stay on {base.problem.cluster.device_name[self.store]}: {best.name}"
        spill = Member("spill", Status.FEASIBLE, best.score.time_s, taken, reason)
        without = Member(base.algorithm, base.status, base.score_s, base.wall_s, "without spilling")
        members = (spill, without)
        return make_placement(best.problem, run, best.plan, best.score, algorithm="spill", members=members)


def _seconds(placement: Placement) -> float:
    return np.inf if placement.score_s is None else placement.score_s


def _overflow_bytes(cluster: Cluster, score: Score, store: int) -> int:
    """Bytes lacking on devices other than the store."""
    over = np.maximum(np.array(score.peak_bytes) - cluster.usable_bytes, 0)
    over[store] = 0
    return int(over.sum())


def _freed_bytes(graph: Graph) -> Longs:
    """[N] bytes that leave a device with a weight: weight, state and gradient."""
    freed = graph.resident_bytes.copy()
    maker = graph.tensor_op[graph.use_tensor]
    update = graph.phase[graph.use_op] == Phase.UPDATE
    owner = {
        int(op): int(param)
        for op, param in zip(graph.use_op[update], maker[update], strict=True)
        if graph.phase[param] == Phase.PARAM
    }
    for t, op, made in zip(graph.use_tensor[update], graph.use_op[update], maker[update], strict=True):
        if graph.phase[made] != Phase.PARAM and int(op) in owner and graph.keep[t]:
            freed[owner[int(op)]] += graph.tensor_bytes[t]
    return freed


def _list_orders(mine: list[int], freed: Longs, found: dict[int, list[Reading]]) -> dict[str, list[int]]:
    """Ways of choosing weights; those that are read often, or are small, come last in each."""
    least = _SMALL * float(freed[mine].sum())
    first = [param for param in mine if len(found[param]) == 1 and freed[param] >= least]
    first.sort(key=lambda param: found[param][0].reader)
    last = sorted(set(mine) - set(first), key=lambda param: (len(found[param]), -freed[param]))
    middle = sorted(range(len(first)), key=lambda at: abs(2 * at + 1 - len(first)))
    return {
        "spread": first + last,
        "from the middle": [first[at] for at in middle] + last,
        "largest first": sorted(first, key=lambda param: -freed[param]) + last,
    }


def _take_first(
    order: list[int], sizes: "np.ndarray[tuple[int], np.dtype[np.float64]]", wanted: float
) -> list[int]:
    """The first weights that free so many bytes."""
    if wanted <= 0:
        return []
    return order[: int(np.searchsorted(np.cumsum(sizes), wanted)) + 1]


def _take_evenly(
    order: list[int], sizes: "np.ndarray[tuple[int], np.dtype[np.float64]]", wanted: float
) -> list[int]:
    """Weights that free so many bytes, at even distances in bytes."""
    total = float(sizes.sum())
    if wanted <= 0 or total <= 0:
        return []
    share = min(1.0, wanted / total)
    ends = np.floor(np.cumsum(sizes) * share / sizes.max())  # a weight goes whenever its like is due
    goes: Bools = np.diff(ends, prepend=0.0) > 0
    chosen = [param for param, go in zip(order, goes.tolist(), strict=True) if go]
    rest = [param for param, go in zip(order, goes.tolist(), strict=True) if not go]
    lacking = wanted - float(sizes[goes].sum())
    return chosen + (_take_first(rest, sizes[~goes], lacking) if lacking > 0 else [])


def spill_problem(
    problem: Problem,
    chosen: Sequence[Reading],
    device: Ints,
    *,
    window_bytes: int,
    stashes: Sequence[Stash] = (),
) -> tuple[Problem, Ints]:
    """The problem with loads for the chosen readings and stashes, and the old op behind each op."""
    made = add_loads(problem.graph, chosen, device.tolist(), window_bytes=window_bytes, stashes=stashes)
    costs, new = problem.costs, made.origin == NEW
    old = np.maximum(made.origin, 0)
    issue = _ISSUE_S if costs.issue_s.any() else 0.0
    given = np.full(made.graph.num_tensors, BY_ROUTE)
    given[: problem.graph.num_tensors] = costs.transfer_s
    compute = costs.compute_s[old]
    compute[new] = 0.0
    whole = Costs(
        compute_s=compute,
        issue_s=np.where(new, issue, costs.issue_s[old]),
        transfer_s=given,
        origin=np.where(new, Origin.ANALYTIC, costs.origin[old]).astype(np.int8),
        rel_error=np.where(new, 0.0, costs.rel_error[old]),
    )
    pinned = np.where(new, FREE, problem.pinned[old]).astype(np.int32)
    return replace(problem, graph=made.graph, costs=whole, pinned=pinned), made.origin
