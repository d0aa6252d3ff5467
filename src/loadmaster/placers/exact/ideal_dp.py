"""The best chain of stages, by dynamic programming over ideals, with a proof.

Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators", NeurIPS 2020, section 5:
a chain of stages is a chain of ideals, sets of classes closed under predecessors. We keep no pairs of ideals,
carry transfers along a walk, ask in threshold form whether anything beats the best cut of an order
(`linear_dp`), and leave out what the devices before and after an ideal cannot carry (`_maxload/`). Time: one
step for each pair of nested ideals whose difference one device can take; memory: some hundred bytes an ideal.

Several types of devices are counted exactly while there are at most 4,096 counts and they fit in memory;
beyond, devices are taken in a few fixed sequences (as named, fastest first, largest first, and backwards),
which is a heuristic, and the answer says so. Beyond `max_ideals`, `max_bytes` or the budget the answer is
that of `linear_dp`, and says so. Where the load of a device depends on more than its own set (links other
than `host` and `parallel`, devices that share an engine), the split is an estimate's, which is then scored.

It supports every split, a chain being convex and free; it proves the best chain only.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from loadmaster.core.errors import InputError
from loadmaster.core.graph import held_bytes
from loadmaster.core.placement import Placement
from loadmaster.core.problem import Objective, Problem, Split
from loadmaster.core.run import Bound, Run
from loadmaster.core.units import format_bytes
from loadmaster.placers.answer import best_repaired, with_note
from loadmaster.placers.exact._maxload.answering import (
    chain_builder,
    make_budget_check,
    with_bound,
)
from loadmaster.placers.exact._maxload.chains import (
    MOST_STATES,
    Ideals,
    best_chain,
    devices_needed,
    exact_states_fit,
    find_ideals,
)
from loadmaster.placers.exact._maxload.closing import free_bound
from loadmaster.placers.exact._maxload.lines import Stages, best_line
from loadmaster.placers.exact._maxload.model import MaxLoad, allowed_types, free_model
from loadmaster.placers.exact._maxload.prices import find_prices
from loadmaster.placers.pipeline import RAISED, Effort, find_pipeline
from loadmaster.placers.registry import Placer

_ROUNDS = 10  # of shuffling after each pass of the programme
_FALLBACK_ROUNDS = 300
_BELOW = 6e-10  # what a pass leaves open, and rounding
_LEAST_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class IdealDp:
    """`max_ideals` and `max_bytes` of memory: beyond them the answer is that of `linear_dp`."""

    max_ideals: int = 1_000_000
    max_bytes: int = 2**30
    objectives: ClassVar[tuple[Objective, ...]] = (Objective.THROUGHPUT,)
    pipelines: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse limits under which nothing can be done."""
        for name, least in (("max_ideals", 1), ("max_bytes", _LEAST_BYTES)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(f"ideal_dp: {name} is {value!r}; give a whole number >= {least}")

    def __call__(self, problem: Problem, run: Run) -> Placement:
        """Solve the model, then state what was found and what it proves."""
        if problem.pipeline:
            effort = Effort(16, _ROUNDS, max_ideals=self.max_ideals, max_bytes=self.max_bytes)
            return find_pipeline(problem, run, effort, algorithm="ideal_dp")
        search = _Search(self, problem, run)
        build, cargo = chain_builder(problem, search.solve)
        placement = best_repaired(
            problem,
            run,
            cargo,
            [build],
            algorithm="ideal_dp",
            hopeless=lambda: bool(search.bound.infeasible),
        )
        bound = search.bound
        if placement.score_s is not None and bound.seconds == 0.0 and not make_budget_check(run)(0):
            bound = free_bound(free_model(problem), placement.score_s, probes=0)
        return with_note(with_bound(placement, bound), "ideal_dp", search.note)


@dataclass(slots=True)
class _Search:
    """What is proven and to be said so far; the first model solved is the problem's own."""

    limits: IdealDp
    problem: Problem
    run: Run
    bound: Bound = field(default_factory=lambda: Bound(0.0, "none"))
    note: str = ""

    def solve(self, model: MaxLoad) -> Stages | None:
        """The best chain of a model."""
        spent = make_budget_check(self.run)
        price = find_prices(model)
        rng = np.random.default_rng(self.run.rng.integers(2**63))

        def improve(begin: Stages | None, rounds: int = _ROUNDS) -> Stages | None:
            return best_line(
                model, rng, rounds=rounds, bound_s=price.bound_s, spent=lambda: spent(0), start=begin
            )

        if not allowed_types(model).any(axis=1).all():
            self._record_unplaceable_class(model)
            return None
        start = improve(None, 0)
        if start is not None and start.value_s <= price.bound_s * (1 + 1e-12):
            self._raise_bound(model, start.value_s, "work")
            return start
        most = self._max_ideals()
        ideals = find_ideals(model, most=most, max_bytes=self.limits.max_bytes)
        if ideals is None:
            return self._give_up(start and improve(start, _FALLBACK_ROUNDS), most)
        self.run.progress(f"ideal_dp: {ideals.num:,} ideals", 0.0)
        exact = exact_states_fit(model, ideals, max_bytes=self.limits.max_bytes)
        found = best_chain(
            model, ideals, price, start, exact=exact, spent=spent, improve=lambda s: improve(s) or s
        )
        self._note(model, exact, found.proven)
        if found.proven and found.stages is not None:
            self._raise_bound(model, found.stages.value_s, f"best chain, {ideals.num:,} ideals")
        elif found.proven:
            self._record_no_chain(model, ideals)
        return found.stages

    def _max_ideals(self) -> int:
        """Ideals that are worth finding within the time there is."""
        seconds = self.run.budget.seconds
        return (
            self.limits.max_ideals
            if seconds is None
            else min(self.limits.max_ideals, 10_000 + int(200_000 * seconds))
        )

    def _give_up(self, start: Stages | None, most: int) -> Stages | None:
        self.note = (
            f"more than {most:,} ideals, or more than fit in {format_bytes(self.limits.max_bytes)}: the best"
            f" cut of several orders instead; for a proof give {RAISED}"
        )
        self.run.progress(f"ideal_dp: {self.note}", 0.0)
        return start

    def _note(self, model: MaxLoad, exact: bool, proven: bool) -> None:
        if not exact:
            self.note = (
                f"devices of {model.num_types} types have more than {MOST_STATES:,} counts, or more than fit"
                f" in {format_bytes(self.limits.max_bytes)}: taken in a few fixed sequences, so not proven"
            )
        elif not proven:
            self.note = "the budget ended before the proof; give it more, e.g. --budget 60s"
        elif model.restricted and self.problem.split == Split.CHAIN:
            self.note = f"the best of its kind: {model.restricted}"

    def _bounds_all_plans(self, model: MaxLoad) -> bool:
        own = self._has_own_memory(model)
        return own and self.problem.split == Split.CHAIN and model.bounding and not model.restricted

    def _has_own_memory(self, model: MaxLoad) -> bool:
        """Whether the model asks for no more bytes and has no less room than the problem."""
        held, own = np.zeros(model.num_classes, dtype=np.int64), held_bytes(self.problem.graph)
        np.add.at(held, model.of_op, own)
        usable = np.minimum(self.problem.cluster.usable_bytes, int(model.num_bytes.sum()))
        room = {d: int(model.room[t]) for t, alike in enumerate(model.devices) for d in alike}
        roomy = all(room[d] >= int(usable[d]) for d in room)
        return bool((model.num_bytes <= held).all()) and roomy

    def _raise_bound(self, model: MaxLoad, value_s: float, name: str) -> None:
        if self._bounds_all_plans(model) and value_s * (1 - _BELOW) > self.bound.seconds:
            self.bound = Bound(value_s * (1 - _BELOW), name)

    def _record_unplaceable_class(self, model: MaxLoad) -> None:
        """A class that no device may hold: which, and what it lacks."""
        if not self._bounds_all_plans(model):
            return
        names, devices = self.problem.graph.op_name, self.problem.cluster.num_devices
        v = int(np.flatnonzero(~allowed_types(model).any(axis=1))[0])
        ops = np.flatnonzero(model.of_op == v)
        few = ", ".join(repr(names[op]) for op in ops[:3]) + (f" and {len(ops) - 3} more" * (len(ops) > 3))
        need, most = int(model.num_bytes[v]), int(model.room[np.isfinite(model.seconds[v])].max(initial=0))
        lack = f"they need {format_bytes(need)}, the largest allowed device has {format_bytes(most)}"
        lack = lack if np.isfinite(model.seconds[v]).any() else f"none of {devices} devices may run them all"
        reason = (
            f"ops {few} must share a stage of a chain, but {lack}; use a split of any shape (--split free),"
            " a smaller batch, other pins or larger devices"
        )
        self.bound = Bound(0.0, "none", infeasible=reason)

    def _record_no_chain(self, model: MaxLoad, ideals: Ideals) -> None:
        """No chain has room: how many devices would do."""
        if not self._bounds_all_plans(model):
            return
        common = max(model.devices, key=len)
        name = self.problem.cluster.device_name[common[0]]
        need = devices_needed(model, ideals, spent=make_budget_check(self.run))
        more = f"{need} devices like {name} instead of {len(common)} would do, or" if need else "try"
        devices = self.problem.cluster.num_devices
        reason = (
            f"no chain of stages has room for all ops on {devices} devices; {more} a split of any shape"
            " (--split free), or a smaller batch"
        )
        self.bound = Bound(0.0, "none", infeasible=reason)


PLACER: type[Placer] = IdealDp
