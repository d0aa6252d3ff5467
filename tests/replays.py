"""A bench for the compiled replay and climb of local search: a problem, a plan of it, and changes to it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from loadmaster.core.arrays import Floats, Ints
from loadmaster.core.problem import BY_ROUTE, Links, Problem
from loadmaster.placers.heuristic._list_kernel import upward_rank
from loadmaster.placers.heuristic._lists import Lists, load_lists
from loadmaster.placers.search._moves import (
    Cast,
    Move,
    blank_move,
    climb,
    critical_units,
    first_effect_s,
)
from loadmaster.placers.search._replay import Tape, Weights, blank_tape, replay
from loadmaster.placers.search.refine import _build_cast, _build_weights
from loadmaster.simulator.events.engine import LINK_CODE
from tests.strategies import picks, problems

SNAPSHOTS = 32


@dataclass(frozen=True, eq=False)
class Bench:
    """A problem ready for replays, and a plan of it."""

    lists: Lists
    device: Ints
    key: Floats
    weights: Weights
    cast: Cast
    least_s: Floats

    @property
    def links(self) -> int:
        return LINK_CODE[self.lists.problem.links]

    def tape(self) -> Tape:
        problem, fixed = self.lists.problem, self.lists.fixed
        ports = max(fixed.num_links, problem.cluster.num_devices)
        num = problem.graph.num_ops
        return blank_tape(num, fixed.num_engines, ports, snapshots=SNAPSHOTS, heap_room=num)

    def recorded(self) -> tuple[Tape, float]:
        """The tape of the plan's run from the start, and its seconds."""
        tape = self.tape()
        return tape, self.resumed(tape, 0)

    def resumed(self, tape: Tape, begin: int, limit_s: float = np.inf) -> float:
        return float(
            replay(self.lists.fixed, self.weights, self.links, self.device, self.key, tape, begin, limit_s)
        )

    def moved(self, unit: int, device: int) -> "Bench":
        there = self.device.copy()
        there[self.lists.cargo.of_op == unit] = device
        return replace(self, device=there)

    def move_of(self, unit: int) -> Move:
        own = self.lists.cargo.of_op == unit
        move = blank_move(len(own))
        move.unit[0], move.device[0], move.marked[own] = unit, self.device[own][0], True
        return move

    def first_effect_s(self, tape: Tape, unit: int) -> float:
        """When moving a unit can first matter, by the code under test."""
        return float(first_effect_s(self.lists.fixed, self.cast, tape, self.move_of(unit), 1, self.least_s))


def bench(problem: Problem, device: Sequence[int], key: Floats) -> Bench:
    lists = load_lists(problem)
    cargo = lists.cargo
    least_s = np.where(cargo.fits[cargo.of_op], problem.device_compute_s, np.inf).min(axis=1)
    rank_s = upward_rank(lists.fixed, least_s, np.zeros(problem.graph.num_tensors))
    weights = _build_weights(problem, lists, rank_s - least_s)
    return Bench(lists, np.array(device, dtype=np.int32), key, weights, _build_cast(problem, cargo), least_s)


def copied(tape: Tape) -> Tape:
    return Tape(*(column.copy() for column in tape))


@st.composite
def benches(draw: st.DrawFn, *, links: Links | None = None, idle_ops: bool = False) -> Bench:
    """A problem in which every transfer takes time, and (unless `idle_ops`) every op; a plan and keys."""
    problem = draw(problems(10, 4, links=links, issue=False))
    sent_s = np.where(problem.costs.transfer_s == BY_ROUTE, BY_ROUTE, problem.costs.transfer_s + 0.5)
    seconds = problem.costs.compute_s
    if not idle_ops:
        seconds = np.where(seconds == 0, 1.5, seconds)
    graph = replace(problem.graph, tensor_bytes=problem.graph.tensor_bytes + 1)
    costs = replace(problem.costs, transfer_s=sent_s, compute_s=seconds)
    problem = replace(problem, graph=graph, costs=costs)
    cargo = load_lists(problem).cargo
    choices = [np.flatnonzero(row) for row in cargo.fits]
    codes = picks(draw, range(256), cargo.num_units)
    place = [
        own[(code + unit) % len(own)] for unit, (own, code) in enumerate(zip(choices, codes, strict=True))
    ]
    key = draw(st.permutations(range(problem.graph.num_ops)))
    return bench(problem, [place[unit] for unit in cargo.of_op], np.array(key, dtype=np.float64))


def climbed(case: Bench, seed: int, num_tries: int = 40) -> tuple[Bench, float, int, int]:
    """The plan after some tries, its seconds as the climb says, tries made and where it resumed."""
    tape, present_s = case.recorded()
    cargo, fixed = case.lists.cargo, case.lists.fixed
    found = np.empty(len(case.key), dtype=np.int32)
    critical = found[: critical_units(fixed, tape, cargo.of_op, found)]
    device, key, move = case.device.copy(), case.key.copy(), blank_move(len(case.key))
    where = case.device[case.cast.unit_op[case.cast.unit_ptr[:-1]]]
    used_bytes = np.bincount(where, cargo.held_bytes, cargo.fits.shape[1]).astype(np.float64)
    rng, fixed = np.random.default_rng(seed), case.lists.fixed
    plan, scratch = (case.links, device, key, tape, move), (used_bytes, case.least_s, critical)
    seconds, tried, begin = climb(rng, fixed, case.weights, case.cast, *plan, *scratch, num_tries, present_s)
    assert not move.marked.any()
    assert tape.at_s[begin] < np.inf or begin == 0
    return replace(case, device=device, key=key), seconds, tried, begin
