"""What list-scheduling constructors share: a problem made ready, ranks, and plans from compiled passes."""

from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Bools, Floats, Ints
from loadmaster.core.graph import Phase, home_bytes
from loadmaster.core.plan import Plan, plan_of
from loadmaster.core.problem import Links, Problem
from loadmaster.cost.transfer import route_bytes_per_s, route_latency_s
from loadmaster.placers.heuristic._list_kernel import (
    NEVER,
    NOWHERE,
    Rules,
    construct_plan,
    downward_rank,
    upward_rank,
)
from loadmaster.placers.placement_units import Cargo, load_cargo
from loadmaster.simulator.events.engine import prepare
from loadmaster.simulator.events.kernel import HALF_DUPLEX, HOST, PARALLEL, SHARED, ProblemArrays

# How transfers may be thought of while placing, most promising first. A pass books a transfer when it places
# the consumer, the simulator when the producer ends: so the truth is not always the best guide.
VIEWS = {
    Links.SHARED: (HALF_DUPLEX, SHARED, PARALLEL),
    Links.PARALLEL: (PARALLEL,),
    Links.HALF_DUPLEX: (HALF_DUPLEX, PARALLEL),
    Links.HOST: (HOST, PARALLEL),
}


@dataclass(frozen=True, slots=True, eq=False)
class Lists:
    """A problem made ready for list scheduling."""

    problem: Problem
    fixed: ProblemArrays
    cargo: Cargo
    footprint: Floats  # [U] bytes a unit holds when the forward pass is over
    standing: Bools  # [T] still needed then, wherever it is
    room_bytes: Floats  # [D] for such bytes: what is usable less the largest workspace
    mean_s: Floats  # [N] over the devices an op may use
    transfer_s: Floats  # [T] mean over pairs of devices

    def compute_upward_rank(self, *, transfers: bool) -> Floats:
        """[N] mean time of the longest way from an op to an end, with or without transfers."""
        seconds = self.transfer_s if transfers else np.zeros(len(self.transfer_s))
        rank: Floats = upward_rank(self.fixed, self.mean_s, seconds)
        return rank

    def compute_downward_rank(self, *, transfers: bool) -> Floats:
        """[N] mean time of the longest way from a start to an op."""
        seconds = self.transfer_s if transfers else np.zeros(len(self.transfer_s))
        rank: Floats = downward_rank(self.fixed, self.mean_s, seconds)
        return rank

    def rules(
        self,
        key: Floats | None,
        links: int,
        *,
        favourite: Ints | None = None,
        awake: int = NEVER,
    ) -> Rules:
        """What a pass decides by; without a key ops come in the order of becoming ready."""
        num_ops = self.problem.graph.num_ops
        favourite = np.full(num_ops, NOWHERE, dtype=np.int32) if favourite is None else favourite
        return Rules(
            unit=self.cargo.of_op,
            allowed=self.cargo.fits,
            footprint=self.footprint,
            standing=self.standing,
            room=self.room_bytes,
            key=np.zeros(num_ops) if key is None else key.astype(np.float64),
            favourite=favourite,
            patience_s=self._patience_s(favourite) if awake != NEVER else np.zeros(num_ops),
            awake=awake,
            first_come=key is None,
            links=links,
        )

    def _patience_s(self, favourite: Ints) -> Floats:
        """[N] the transfer that an op's favourite saves by staying."""
        graph = self.problem.graph
        saved = np.zeros(graph.num_ops)
        maker = graph.tensor_op[graph.use_tensor]
        chosen = favourite[maker] == graph.use_op
        np.maximum.at(saved, maker[chosen], self.transfer_s[graph.use_tensor[chosen]])
        return saved

    def placed(
        self, key: Floats | None, links: int, *, favourite: Ints | None = None, awake: int = NEVER
    ) -> Plan:
        """The plan of one pass, in the order of its own starts."""
        device, position, _, _ = construct_plan(
            self.fixed, self.rules(key, links, favourite=favourite, awake=awake)
        )
        return plan_of(device, position)


def load_lists(problem: Problem) -> Lists:
    """Everything that no key changes."""
    graph, cluster = problem.graph, problem.cluster
    cargo, standing = load_cargo(problem), standing_tensors(problem)
    footprint = np.bincount(cargo.of_op, graph.resident_bytes, cargo.num_units).astype(np.float64)
    here = np.where(standing, home_bytes(graph), 0)
    footprint += np.bincount(cargo.of_op[graph.tensor_op], here, cargo.num_units)
    away = ~np.eye(cluster.num_devices, dtype=np.bool_)
    latency_s, pace = 0.0, 0.0
    if away.any():
        latency_s = float(route_latency_s(cluster)[away].mean())
        pace = float((1.0 / route_bytes_per_s(cluster)[away]).mean())
    given = problem.costs.transfer_s
    return Lists(
        problem=problem,
        fixed=prepare(problem).fixed,
        cargo=cargo,
        footprint=footprint,
        standing=standing,
        room_bytes=(cluster.usable_bytes - graph.workspace_bytes.max()).astype(np.float64),
        mean_s=_mean_s(problem, cargo),
        transfer_s=np.where(given >= 0, given, latency_s + graph.tensor_bytes * pace),
    )


def standing_tensors(problem: Problem) -> Bools:
    """[T] tensors alive when the forward pass is over: kept, or saved for a backward op."""
    graph = problem.graph
    stands = graph.keep.copy()
    later = np.isin(graph.phase[graph.use_op], (Phase.BACKWARD, Phase.UPDATE))
    made = np.isin(graph.phase[graph.tensor_op[graph.use_tensor]], (Phase.FORWARD, Phase.PARAM))
    stands[graph.use_tensor[later & made]] = True
    owns: Bools = graph.tensor_storage == np.arange(graph.num_tensors)
    return stands & owns


def _mean_s(problem: Problem, cargo: Cargo) -> Floats:
    """[N] seconds over the devices each op may use."""
    seconds = problem.device_compute_s
    if cargo.fits.all():
        return np.asarray(seconds.mean(axis=1))
    fits = cargo.fits[cargo.of_op]
    return np.asarray(np.where(fits, seconds, 0.0).sum(axis=1) / fits.sum(axis=1))
