"""Plan and Pipeline: where every op goes and in what order."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from loadmaster.core.arrays import (
    Bools,
    Floats,
    Ints,
    Longs,
    content_digest,
    require_finite,
    require_range,
    set_column,
)
from loadmaster.core.errors import PlanError

if TYPE_CHECKING:
    from loadmaster.core.device_map import DeviceMap
    from loadmaster.core.notebook import Picture
    from loadmaster.core.problem import Problem


@dataclass(frozen=True, slots=True, eq=False)
class Pipeline:
    """S stages through which micro-batches flow, with their devices and replicas."""

    stage: Ints  # [N]
    replicas: Ints  # [S]
    num_microbatches: int
    schedule: str  # e.g. '1f1b', 'gpipe'; `core/pipelines/order.py` has the order of each
    in_flight: Ints  # [S] micro-batches whose activations a stage holds at once
    stage_s: Floats  # [S] time of one micro-batch
    # What follows is of whole steps; files from before there were such have none of it.
    rank: tuple[int, ...] = ()  # [S] which process of a replica has the stage; () = stage s is rank s
    replica_device: tuple[tuple[int, ...], ...] = ()  # [R][S] devices; () = one replica, on Plan.device
    replica_microbatches: tuple[int, ...] = ()  # [R] of num_microbatches; () = all to the one replica
    microbatch_rows: tuple[int, ...] = ()  # [M] rows of each; () = the graph's batch, for every one

    def __post_init__(self) -> None:
        """Check every invariant once."""
        set_column(self, "replicas", np.int32, (-1,), PlanError)
        stages = len(self.replicas)
        if stages < 1:
            raise PlanError("Pipeline.replicas names 0 stages; a pipeline needs >= 1")
        if not isinstance(self.num_microbatches, int) or self.num_microbatches < 1:
            raise PlanError(
                f"Pipeline.num_microbatches is {self.num_microbatches!r}; needs a whole number >= 1"
            )
        if not isinstance(self.schedule, str):
            raise PlanError(f"Pipeline.schedule is {self.schedule!r}; needs a name such as '1f1b'")
        set_column(self, "stage", np.int32, (-1,), PlanError)
        for field in ("replicas", "in_flight"):
            set_column(self, field, np.int32, (stages,), PlanError)
            require_range(getattr(self, field), 1, 2**31 - 1, f"Pipeline.{field}", PlanError)
        set_column(self, "stage_s", np.float64, (stages,), PlanError)
        require_range(self.stage, 0, stages, "Pipeline.stage", PlanError)
        require_finite(self.stage_s, "Pipeline.stage_s", PlanError)
        self._check_ranks(stages)
        self._check_replicas(stages)

    def _check_ranks(self, stages: int) -> None:
        num = len(set(self.rank))
        if self.rank and self.rank != tuple(s % num for s in range(stages)):
            raise PlanError(
                f"Pipeline.rank is {list(self.rank)}; {stages} stages are dealt to {num} ranks in turn"
            )
        if self.rank and stages % num:
            raise PlanError(f"Pipeline.rank deals {stages} stages to {num} ranks; each has as many")

    def _check_replicas(self, stages: int) -> None:
        if any(len(row) != stages or min(row, default=0) < 0 for row in self.replica_device):
            raise PlanError(f"Pipeline.replica_device must name a device for each of {stages} stages")
        given, rows = self.replica_microbatches, self.microbatch_rows
        if given and (len(given) != self.num_replicas or min(given) < 1):
            raise PlanError(
                f"Pipeline.replica_microbatches is {list(given)}; {self.num_replicas} replicas need at least"
                " one micro-batch each"
            )
        if given and sum(given) != self.num_microbatches:
            raise PlanError(
                f"Pipeline.replica_microbatches add up to {sum(given)}, the step has {self.num_microbatches}"
            )
        if self.num_replicas > 1 and not given:
            raise PlanError("Pipeline.replica_microbatches is empty; say how many each replica takes")
        if self.replica_device and (self.replicas != self.num_replicas).any():
            raise PlanError(f"Pipeline.replicas and the {self.num_replicas} rows of replica_device differ")
        if rows and (len(rows) != self.num_microbatches or min(rows) < 1):
            raise PlanError(
                f"Pipeline.microbatch_rows has {len(rows)} numbers for {self.num_microbatches} micro-batches"
            )

    @property
    def num_stages(self) -> int:
        """S."""
        return len(self.replicas)

    @property
    def num_replicas(self) -> int:
        """R, of the whole pipeline."""
        return max(len(self.replica_device), 1)

    @property
    def num_ranks(self) -> int:
        """Processes of one replica."""
        return len(set(self.rank)) or self.num_stages

    @property
    def stages_per_rank(self) -> int:
        """More than one where stages are interleaved."""
        return self.num_stages // self.num_ranks

    @property
    def microbatches(self) -> tuple[int, ...]:
        """[R] how many micro-batches each replica takes; the first replica takes the first ones."""
        return self.replica_microbatches or (self.num_microbatches,)

    def devices_of(self, device: Ints) -> Ints:
        """[R, S] devices, of a plan that puts op n on `device[n]`."""
        if self.replica_device:
            return np.array(self.replica_device, dtype=np.int32)
        first = np.zeros(self.num_stages, dtype=np.int32)
        first[self.stage] = device
        return first[None, :]

    @property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of the content."""
        return content_digest(self)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Where each of N ops runs, in which order, and whether it is recomputed."""

    device: Ints  # [N]
    priority: Ints  # [N] lower first on a device; all equal = first come first served
    recompute: Bools  # [N]
    pipeline: Pipeline | None

    def __post_init__(self) -> None:
        """Check every invariant once."""
        set_column(self, "device", np.int32, (-1,), PlanError)
        num_ops = len(self.device)
        set_column(self, "priority", np.int32, (num_ops,), PlanError)
        set_column(self, "recompute", np.bool_, (num_ops,), PlanError)
        require_range(self.device, 0, 2**31 - 1, "Plan.device", PlanError)
        if self.pipeline is None:
            return
        if not isinstance(self.pipeline, Pipeline):
            raise PlanError(f"Plan.pipeline is a {type(self.pipeline).__name__}; needs a Pipeline or None")
        if len(self.pipeline.stage) != num_ops:
            raise PlanError(f"Plan.pipeline: stage has {len(self.pipeline.stage)} ops, the plan {num_ops}")

    def __repr__(self) -> str:
        """One line; the columns may be long."""
        counts = np.bincount(self.device).tolist()
        return f"<Plan: {len(self.device)} ops, per device {counts}>"

    @property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of the content."""
        return content_digest(self)

    @property
    def copies(self) -> Ints:
        """[R, N] the devices that run op n: more than one where its stage has replicas."""
        if self.pipeline is None or self.pipeline.num_replicas == 1:
            return self.device[None, :]
        found: Ints = self.pipeline.devices_of(self.device)[:, self.pipeline.stage]
        return found

    def count_ops(self, num_devices: int) -> Longs:
        """[D] ops that each device runs; every replica of a stage counts."""
        return np.bincount(self.copies.ravel(), minlength=num_devices)

    def plot(self, problem: "Problem") -> "Picture":
        """The Gantt of the plan on its problem, as a picture."""
        from loadmaster.core.notebook import picture_of

        return picture_of(self, problem)

    def _repr_html_(self) -> str:
        from loadmaster.core.notebook import html_of

        return html_of(self)

    def to_device_map(self, problem: "Problem") -> "DeviceMap":
        """Hugging Face's dict of modules and devices: coarser than the plan (`core/device_map.py`)."""
        from loadmaster.core.device_map import make_device_map

        if len(self.device) != problem.graph.num_ops:
            raise PlanError(f"the plan has {len(self.device)} ops, the graph {problem.graph.num_ops}")
        return make_device_map(problem.graph, self.device, problem.cluster)

    @classmethod
    def from_device_map(cls, device_map: "Mapping[str, int | str]", problem: "Problem") -> "Plan":
        """The plan that a dict of modules and devices means for a problem."""
        from loadmaster.core.device_map import devices_of

        order = np.arange(problem.graph.num_ops, dtype=np.int32)
        return plan_of(devices_of(device_map, problem.graph, problem.cluster), order)


def plan_of(device: Ints, priority: Ints | None = None) -> Plan:
    """The plan that puts op i on `device[i]`, first come first served unless ordered."""
    num_ops = len(device)
    order = np.zeros(num_ops, dtype=np.int32) if priority is None else priority
    return Plan(device=device, priority=order, recompute=np.zeros(num_ops, dtype=np.bool_), pipeline=None)


def in_graph_order(plan: Plan) -> Plan:
    """The plan with its ops in the graph's own order."""
    return replace(plan, priority=np.arange(len(plan.device), dtype=np.int32))
