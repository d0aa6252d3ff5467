"""Layout: the stages, the device and the rows of a batch of each process."""

from dataclasses import dataclass

import numpy as np

from loadmaster.core.errors import InputError, PlanError
from loadmaster.core.graph import Phase
from loadmaster.core.pipelines.order import Order, find_deadlock, forward_order, make_order, with_transfers
from loadmaster.core.placement import Placement


@dataclass(frozen=True, slots=True)
class PipelineLayout:
    """R replicas of P ranks each; rank r * P + p of the run is place p of replica r."""

    num_stages: int
    num_places: int
    micro_batches: tuple[int, ...]  # [R] of each replica
    rows: tuple[int, ...]  # [M] planned rows of each micro-batch, () = as many in each
    device: tuple[tuple[int, ...], ...]  # [R][S] device of the cluster
    schedule: str
    recompute: frozenset[int]  # stages

    @property
    def num_replicas(self) -> int:
        """Copies of the pipeline."""
        return len(self.micro_batches)

    @property
    def world(self) -> int:
        """Processes."""
        return self.num_replicas * self.num_places

    def ranks(self, replica: int) -> tuple[int, ...]:
        """[P] of one replica."""
        first = replica * self.num_places
        return tuple(range(first, first + self.num_places))

    def device_of(self, rank: int) -> int:
        """The device of a process."""
        replica, place = divmod(rank, self.num_places)
        return self.device[replica][place]

    def actions(self, rank: int, *, train: bool = True) -> Order:
        """What every place of a rank's replica does in a step."""
        replica = rank // self.num_places
        each, count = self.num_stages // self.num_places, self.micro_batches[replica]
        if train:
            order = make_order(self.schedule, self.num_stages, count, each)
        else:
            order = forward_order(self.num_stages, count, each)
        full = with_transfers(order, self.num_stages)
        stuck = find_deadlock(full, self.num_stages)
        if stuck:
            raise PlanError(f"the order of this pipeline would hang: {stuck}")
        return full

    def split_rows(self, rows: int) -> tuple[int, ...]:
        """[M] rows of each micro-batch of a batch: as planned, or as equal as may be."""
        count = sum(self.micro_batches)
        if rows < count:
            raise InputError(
                f"a batch of {rows} cannot be split into {count} micro-batches; give at"
                f" least {count} rows, or"
                " plan fewer micro-batches"
            )
        if self.rows and sum(self.rows) == rows:
            return self.rows
        each, more = divmod(rows, count)
        return (each + 1,) * more + (each,) * (count - more)


def layout_of(placement: Placement) -> PipelineLayout:
    """The layout of a plan; refuses what is not run."""
    plan = placement.plan
    if plan is None or plan.pipeline is None:
        raise PlanError("the plan has no pipeline; run it with lm.place or `loadmaster run` without --launch")
    pipeline = plan.pipeline
    stages = len(pipeline.replicas)
    device = tuple(tuple(int(d) for d in row) for row in pipeline.replica_device)
    if not device:
        if (pipeline.replicas > 1).any():
            raise PlanError(
                f"the plan copies single stages {pipeline.replicas.tolist()} times; only"
                " replicas of the whole"
                " pipeline are run. Plan with --pipeline auto"
            )
        device = (_stage_devices(placement, stages),)
    places = max(pipeline.rank, default=stages - 1) + 1
    for row in device:
        for stage, at in enumerate(row):
            if at != row[stage % places]:
                raise PlanError(
                    f"stages {stage % places} and {stage} share a process, but the plan has"
                    " them on two devices"
                )
    batches = tuple(pipeline.replica_microbatches) or (pipeline.num_microbatches,)
    again = frozenset(s for s in range(stages) if _is_recomputed(placement, s))
    return PipelineLayout(
        stages, places, batches, tuple(pipeline.microbatch_rows), device, pipeline.schedule, again
    )


def _stage_devices(placement: Placement, stages: int) -> tuple[int, ...]:
    plan = placement.plan
    assert plan is not None, "asked of plans"
    assert plan.pipeline is not None, "asked of pipelines"
    found = []
    for stage in range(stages):
        own = plan.device[plan.pipeline.stage == stage]
        if not len(own):
            raise PlanError(f"stage {stage} of {stages} has no op; plan fewer stages")
        if len(set(own.tolist())) > 1:
            raise PlanError(
                f"stage {stage} has ops on {len(set(own.tolist()))} devices; a stage is run"
                " by one process on one device"
            )
        found.append(int(own[0]))
    return tuple(found)


def _is_recomputed(placement: Placement, stage: int) -> bool:
    """Whether most forward ops of a stage are computed again; a stage is, or is not, as a whole."""
    plan, graph = placement.plan, placement.problem.graph
    assert plan is not None, "asked of plans"
    assert plan.pipeline is not None, "asked of pipelines"
    own = (plan.pipeline.stage == stage) & (graph.phase == Phase.FORWARD)
    return bool(own.any()) and bool(np.mean(plan.recompute[own]) > 0.5)
