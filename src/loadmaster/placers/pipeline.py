"""Plans with a pipeline: stages cut so that their micro-batches in flight fit, recomputed where they must be.

What `chain_balance` (one order), `linear_dp` (many orders) and `ideal_dp` (every chain there is) answer when
a problem asks for a schedule. A stage's memory depends on how many stages come behind it, so the programme
goes from the last stage to the first (Piper, NeurIPS 2021); a stage is recomputed whole, and only if it has
no room otherwise: that is never faster. Bytes are those of `in_flight.py`; where the simulator's peak,
which knows temporary tensors too, is more than a device has, the stages are cut again with room left for
those, then with less and less room.
"""

from dataclasses import dataclass, replace

import numpy as np

from loadmaster.core.arrays import Ints, Longs
from loadmaster.core.pipelines.in_flight import find_mirrored_ops
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Pipeline, Plan, plan_of
from loadmaster.core.problem import Problem, allowed_devices
from loadmaster.core.run import Bound, Run
from loadmaster.core.units import format_bytes
from loadmaster.placers.answer import Tally, with_note
from loadmaster.placers.exact._maxload.answering import make_budget_check, with_bound
from loadmaster.placers.exact._maxload.chains import Ideals
from loadmaster.placers.exact._maxload.contract import chain_model
from loadmaster.placers.exact._maxload.model import MaxLoad
from loadmaster.placers.exact._maxload.prices import find_prices
from loadmaster.placers.exact._maxload.staged import (
    Flight,
    Staged,
    best_order,
    devices_needed,
    find_best_stages,
    find_reversed_ideals,
    make_flight,
    most_microbatches,
    num_states_of,
)
from loadmaster.placers.resident_memory import op_running_bytes
from loadmaster.simulator.events.throughput import steady_state

_ATTEMPTS = 8
_BELOW = 6e-10  # what a pass leaves open, and rounding
_ANY_ROOM = 2**60
_IDEALS_PER_S = 100_000
RAISED = (  # how the limits of the programme over ideals are raised
    "a longer budget, or more ideals or memory in Python:"
    ' lm.plan(..., algorithm=lm.placer("ideal_dp", max_ideals=..., max_bytes=...))'
)


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is looked at: orders, reorderings, and ideals (0 = none) within bytes of memory."""

    orders: int
    rounds: int
    max_ideals: int = 0
    max_bytes: int = 2**30


def find_pipeline(problem: Problem, run: Run, effort: Effort, *, algorithm: str) -> Placement:
    """The best pipeline found for a problem that asks for a schedule."""
    search = _Search(problem, run, effort)
    tally, usable = Tally(problem, run), problem.cluster.usable_bytes
    room = usable
    for attempt in range(_ATTEMPTS):
        staged = search.solve(room, temporary=attempt > 0)
        if staged is None:
            break
        peak = np.array(
            tally.offer(make_pipeline_plan(problem, search.model, staged)).peak_bytes, dtype=np.int64
        )
        if tally.spent or (peak <= usable).all():
            break
        room = _shrink_room(problem, room, peak - usable) if attempt else room
    if tally.scored == 0:
        tally.offer(search.plan_without_memory_limits())
    answer = tally.answer(algorithm=algorithm)
    return with_note(with_bound(answer, search.bound), algorithm, search.note)


def make_pipeline_plan(problem: Problem, model: MaxLoad, staged: Staged) -> Plan:
    """The plan of stages, with what each holds and takes."""
    stage: Ints = staged.stage[model.of_op]
    again = find_mirrored_ops(problem.graph) & np.array(staged.again)[stage]
    return with_pipeline(problem, stage, np.array(staged.device, dtype=np.int32), recompute=again)


def with_pipeline(
    problem: Problem, stage: Ints, device: Ints, *, recompute: "np.typing.NDArray[np.bool_]"
) -> Plan:
    """A plan of op n in `stage[n]`, stage s on `device[s]`."""
    schedule, num = problem.schedule, len(device)
    assert schedule is not None
    bare = replace(plan_of(device[stage]), recompute=recompute)
    pipeline = Pipeline(
        stage=stage,
        replicas=np.ones(num, dtype=np.int32),
        num_microbatches=schedule.num_microbatches,
        schedule=schedule.name,
        in_flight=schedule.in_flight(num),
        stage_s=steady_state(problem, bare).load_s[device],
    )
    return replace(bare, pipeline=pipeline)


def _shrink_room(problem: Problem, room: Longs, over: Longs) -> Longs:
    """Less room on the devices that overflow and on those like them, which would be taken instead."""
    cluster, smaller = problem.cluster, room.copy()
    for d in np.flatnonzero(over > 0):
        alike = (cluster.kind == cluster.kind[d]) & (cluster.usable_bytes == cluster.usable_bytes[d])
        smaller[alike] = np.minimum(smaller[alike], max(int(room[d] - over[d]), 0))
    return smaller


class _Search:
    """The classes of a problem, and what is proven and to be said so far."""

    def __init__(self, problem: Problem, run: Run, effort: Effort) -> None:
        self.problem, self.run, self.effort = problem, run, effort
        self.model = chain_model(problem, merge=False).model
        self.bound, self.note = Bound(0.0, "none"), ""
        self.nothing: Longs = np.zeros(problem.graph.num_ops, dtype=np.int64)

    def solve(self, room: Longs, *, temporary: bool) -> Staged | None:
        """The best stages within room [D], with room left for `temporary` tensors or without."""
        running = op_running_bytes(self.problem.graph, workspace=True) if temporary else self.nothing
        flight, spent = make_flight(self.problem, self.model, room, running), make_budget_check(self.run)
        bound_s = find_prices(flight.model).bound_s
        rng = np.random.default_rng(self.run.rng.integers(2**63))
        start = best_order(
            flight,
            rng,
            most=self.effort.orders,
            rounds=self.effort.rounds,
            bound_s=bound_s,
            spent=lambda: spent(0),
        )
        if self.effort.max_ideals == 0:
            return start
        return self._search_ideals(flight, start, own=not temporary)

    def _search_ideals(self, flight: Flight, start: Staged | None, *, own: bool) -> Staged | None:
        seconds, spent = self.run.budget.seconds, make_budget_check(self.run)
        most = self.effort.max_ideals
        most = most if seconds is None else min(most, 10_000 + int(_IDEALS_PER_S * seconds))
        each = 16 * num_states_of(flight) + 64
        most = min(most, self.effort.max_bytes // (2 * each))
        ideals = find_reversed_ideals(flight.model, most=most, max_bytes=self.effort.max_bytes)
        if ideals is None:
            memory = format_bytes(self.effort.max_bytes)
            self.note = (
                f"more than {most:,} ideals, or more than fit in {memory}: the best cut of several orders"
                f" instead; for a proof give {RAISED}"
            )
            return start
        self.run.progress(f"{ideals.num:,} ideals", 0.0)
        upper = np.inf if start is None else start.value_s * (1 - _BELOW)
        found, proven = find_best_stages(flight, ideals, upper, spent=lambda: spent(0))
        best = found if found is not None else start
        if not proven:
            self.note = "the budget, or too many kinds of devices, left it without a proof"
        elif own and self.model.bounding and not self.model.restricted:
            self._record_proof(best, ideals)
        elif self.model.restricted:
            self.note = f"the best of its kind: {self.model.restricted}"
        return best

    def _record_proof(self, best: Staged | None, ideals: Ideals) -> None:
        if best is not None:
            self.bound = Bound(best.value_s * (1 - _BELOW), f"best pipeline, {ideals.num:,} ideals")
            return
        devices, asked = self.problem.cluster.num_devices, self.problem.pipeline
        reason = f"no pipeline {asked} has room for its micro-batches in flight on {devices} devices"
        remedies = [*self._find_remedies(ideals), "a smaller batch", "larger devices"]
        remedy = f"{', '.join(remedies[:-1])} or {remedies[-1]}"
        self.bound = Bound(0.0, "none", infeasible=f"{reason}, recomputed or not; use {remedy}")

    def _find_remedies(self, ideals: Ideals) -> list[str]:
        """What was tried and would do, with room for temporary tensors: more devices, fewer micro-batches."""
        running = op_running_bytes(self.problem.graph, workspace=True)
        flight = make_flight(self.problem, self.model, self.problem.cluster.usable_bytes, running)
        spent, common = make_budget_check(self.run), max(flight.model.devices, key=len)
        name, found = self.problem.cluster.device_name[common[0]], []
        need = devices_needed(flight, ideals, max_bytes=self.effort.max_bytes, spent=lambda: spent(0))
        if need is not None:
            found.append(f"{need} devices like {name} instead of {len(common)}")
        fewer = most_microbatches(flight, ideals, spent=lambda: spent(0))
        if fewer:
            found.append(f"{fewer} micro-batch{'es' if fewer > 1 else ''}")
        return found

    def plan_without_memory_limits(self) -> Plan:
        """Where nothing fits: the stages of a cluster with all the room in the world."""
        room = np.full(self.problem.cluster.num_devices, _ANY_ROOM, dtype=np.int64)
        flight = make_flight(self.problem, self.model, room, self.nothing)
        rng = np.random.default_rng(0)
        staged = best_order(flight, rng, most=1, rounds=0, bound_s=0.0, spent=lambda: False)
        if staged is not None:
            return make_pipeline_plan(self.problem, self.model, staged)
        allowed = allowed_devices(self.problem, self.model.of_op, self.model.num_classes)
        used, stage = np.unique(allowed.argmax(axis=1)[self.model.of_op], return_inverse=True)
        none = np.zeros(len(stage), dtype=np.bool_)
        return with_pipeline(
            self.problem, stage.reshape(-1).astype(np.int32), used.astype(np.int32), recompute=none
        )
