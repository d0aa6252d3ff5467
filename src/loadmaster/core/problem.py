"""Costs and Problem: what each op takes where, and the whole question put to a placer."""

from dataclasses import dataclass
from enum import IntEnum, StrEnum

import numpy as np

from loadmaster.core.arrays import (
    Bools,
    Bytes8,
    Floats,
    Ints,
    content_digest,
    require_finite,
    require_range,
    set_column,
)
from loadmaster.core.cluster import Cluster
from loadmaster.core.errors import CostError, InputError, ProblemError
from loadmaster.core.graph import Graph, Phase, units
from loadmaster.core.pipelines.schedule import OF_THROUGHPUT, Schedule, parse_schedule

BY_ROUTE = -1.0  # a transfer time that follows from bytes and links
FREE = -1  # an op that is not pinned


class Origin(IntEnum):
    """Where an op's time comes from."""

    ANALYTIC = 0
    MEASURED = 1
    GIVEN = 2


class Objective(StrEnum):
    """What is minimised: one step's time, or a pipeline's steady-state time per sample."""

    STEP = "step"
    THROUGHPUT = "throughput"


class Links(StrEnum):
    """How transfers contend."""

    SHARED = "shared"  # one transfer at a time on every directed link of its route
    PARALLEL = "parallel"  # no contention
    HALF_DUPLEX = "half-duplex"  # one transfer at a time per device, in or out
    HOST = "host"  # through host memory: each accelerator pays its own reads and writes


class Split(StrEnum):
    """What a pipeline's device sets must look like."""

    CHAIN = "chain"  # the graph of devices is acyclic
    CONVEX = "convex"  # no path leaves a device's set and returns
    FREE = "free"


class Load(StrEnum):
    """How compute, reads and writes of an accelerator add up under `Links.HOST`."""

    SUM = "sum"  # compute + in + out
    MAX2 = "max2"  # max(compute, in + out)
    MAX3 = "max3"  # max(compute, in, out)


@dataclass(frozen=True, slots=True, eq=False)
class Costs:
    """Seconds of N ops on K device kinds, and of T tensors between devices."""

    compute_s: Floats  # [N, K] inf = cannot run there
    issue_s: Floats  # [N] host time to launch, 0 = ignored
    transfer_s: Floats  # [T] given time of one transfer (one hop under Links.HOST), or BY_ROUTE
    origin: Bytes8  # [N] Origin
    rel_error: Floats  # [N] expected relative error of compute_s

    def __post_init__(self) -> None:
        """Check every invariant once."""
        set_column(self, "compute_s", np.float64, (-1, -1), CostError)
        num_ops = len(self.compute_s)
        set_column(self, "issue_s", np.float64, (num_ops,), CostError)
        set_column(self, "transfer_s", np.float64, (-1,), CostError)
        set_column(self, "origin", np.int8, (num_ops,), CostError)
        set_column(self, "rel_error", np.float64, (num_ops,), CostError)
        bad = np.isnan(self.compute_s) | (self.compute_s < 0)
        if bad.any():
            op, kind = (int(axis[0]) for axis in np.nonzero(bad))
            value = self.compute_s[op, kind]
            raise CostError(
                f"Costs.compute_s: op {op} takes {value} s on kind {kind}; a cost is a number >= 0"
            )
        require_finite(self.issue_s, "Costs.issue_s", CostError)
        require_finite(self.rel_error, "Costs.rel_error", CostError)
        given = self.transfer_s[self.transfer_s != BY_ROUTE]
        require_finite(given, "Costs.transfer_s", CostError)
        require_range(self.origin, 0, len(Origin), "Costs.origin", CostError)

    @property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of the content."""
        return content_digest(self)


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """A graph, a cluster, the costs, and the question: objective, link model, pins."""

    graph: Graph
    cluster: Cluster
    costs: Costs
    objective: Objective
    links: Links
    split: Split
    load: Load
    pinned: Ints  # [N] device, or FREE
    pipeline: str = ""  # the graph is one of so many micro-batches, e.g. '1f1b:8'; '' = none is asked

    def __post_init__(self) -> None:
        """Check that the parts belong together."""
        for field, part in (("graph", Graph), ("cluster", Cluster), ("costs", Costs)):
            if not isinstance(getattr(self, field), part):
                given = type(getattr(self, field)).__name__
                raise ProblemError(f"Problem.{field} is a {given}; needs a {part.__name__}")
        for field, word in _WORDS.items():
            _require_enum_member(self, field, word)
        num_ops, num_devices = self.graph.num_ops, self.cluster.num_devices
        set_column(self, "pinned", np.int32, (num_ops,), ProblemError)
        require_range(self.pinned, FREE, num_devices, "Problem.pinned", ProblemError)
        kinds = len(self.cluster.kind_name)
        if self.costs.compute_s.shape != (num_ops, kinds):
            raise ProblemError(
                f"Costs.compute_s has shape {list(self.costs.compute_s.shape)}, but the graph has"
                f" {num_ops} ops and the cluster {kinds} device kinds"
            )
        if len(self.costs.transfer_s) != self.graph.num_tensors:
            raise ProblemError(
                f"Costs.transfer_s has {len(self.costs.transfer_s)} tensors, the graph"
                f" {self.graph.num_tensors}"
            )
        hosted = self.cluster.on_host[self.cluster.kind].any()
        if self.links == Links.HOST and not hosted and (self.costs.transfer_s == BY_ROUTE).any():
            raise ProblemError("links 'host' go through a host-side device; add one, e.g. cpu-64GB")
        self._check_somewhere_to_run(num_devices)
        if self.pipeline:
            self._check_pipeline()

    def _check_pipeline(self) -> None:
        try:
            object.__setattr__(self, "pipeline", str(parse_schedule(self.pipeline)))
        except InputError as problem:
            raise ProblemError(f"Problem.pipeline: {problem}") from None
        asked, schedule = f"pipeline {self.pipeline!r}", self.schedule
        assert schedule is not None
        if self.objective == Objective.THROUGHPUT:
            if schedule.name not in OF_THROUGHPUT or schedule.stages_per_rank > 1:
                raise ProblemError(
                    f"{asked} is for the time of a step; ask for --objective step, or for"
                    f" {' or '.join(OF_THROUGHPUT)}"
                )
            if self.split != Split.CHAIN:
                raise ProblemError(
                    f"{asked} is a chain of stages for throughput, not for split {self.split.value!r};"
                    " leave that out, or the pipeline"
                )
        if not (self.graph.phase == Phase.BACKWARD).any():
            raise ProblemError(
                f"{asked} is a schedule of training, and graph {self.graph.name!r} has no backward op;"
                " leave the pipeline out"
            )

    @property
    def schedule(self) -> Schedule | None:
        """The schedule asked for, None where none is."""
        return parse_schedule(self.pipeline) if self.pipeline else None

    @property
    def is_stepped(self) -> bool:
        """Whether a whole step of micro-batches is asked for, from the first forward pass to the update."""
        return self.pipeline != "" and self.objective == Objective.STEP

    def _check_somewhere_to_run(self, num_devices: int) -> None:
        runs = np.isfinite(self.device_compute_s)
        if not runs.any(axis=1).all():
            op = self.graph.op_name[int(np.flatnonzero(~runs.any(axis=1))[0])]
            raise ProblemError(f"op {op!r} can run on none of the {num_devices} devices; add one that can")
        if runs.all() and (self.pinned == FREE).all():
            return
        unit, num_units = units(self.graph)
        stuck = np.flatnonzero(~allowed_devices(self, unit, num_units).any(axis=1))
        if len(stuck):
            ops = [self.graph.op_name[i] for i in np.flatnonzero(unit == stuck[0])[:3]]
            raise ProblemError(
                f"ops {', '.join(map(repr, ops))} belong together but no device may run them all;"
                " change the pins"
            )

    @property
    def device_compute_s(self) -> Floats:
        """[N, D] seconds of each op on each device."""
        return self.costs.compute_s[:, self.cluster.kind]

    def __repr__(self) -> str:
        """One line; the parts may be long."""
        return f"<Problem {self.objective.value} of {self.graph!r} on {self.cluster!r}>"

    @property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of the content."""
        return content_digest(
            self, leave_out=() if self.pipeline else ("pipeline",)
        )  # files without stay valid


_WORDS: dict[str, type[StrEnum]] = {
    "objective": Objective,
    "links": Links,
    "split": Split,
    "load": Load,
}


def _require_enum_member(problem: Problem, field: str, word: type[StrEnum]) -> None:
    """Replace a field of a problem under construction by the member of its enumeration."""
    value = getattr(problem, field)
    try:
        object.__setattr__(problem, field, word(value))
    except ValueError:
        known = ", ".join(member.value for member in word)
        raise ProblemError(f"Problem.{field}: {value!r} is none of {known}") from None


def allowed_devices(problem: Problem, unit: Ints, num_units: int) -> Bools:
    """[units, D] where a whole unit (see `graph.units`) can run, pins respected."""
    runs = np.isfinite(problem.device_compute_s)
    pinned = problem.pinned != FREE
    runs[pinned] &= problem.pinned[pinned, None] == np.arange(problem.cluster.num_devices)
    allowed = np.ones((num_units, problem.cluster.num_devices), dtype=np.bool_)
    if not runs.all():
        np.logical_and.at(allowed, unit, runs)
    return allowed


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """A graph as its source gave it, with the cluster, costs and question the source brings."""

    graph: Graph
    cluster: Cluster | None = None
    costs: Costs | None = None
    objective: Objective = Objective.STEP
    links: Links = Links.SHARED
    optimizer: str | None = None  # applied to parameters unless the user names another
    split: Split | None = None
    load: Load | None = None
    pinned: Ints | None = None  # [N]
    pipeline: str = ""
