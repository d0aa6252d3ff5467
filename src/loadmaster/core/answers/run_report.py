"""A plan that was run, with prediction and measurement; `--json` prints exactly this (docs/schemas)."""

from dataclasses import dataclass

from loadmaster.core.placement import Placement
from loadmaster.core.timeline import Timeline

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Pair:
    """A prediction and a measurement; None: not measured."""

    predicted: float
    measured: float | None

    @property
    def error(self) -> float | None:
        """predicted / measured - 1: negative where the prediction was too fast or too small."""
        return self.predicted / self.measured - 1.0 if self.measured else None


@dataclass(frozen=True, slots=True)
class DeviceRan:
    """One device of the plan."""

    device: str
    where: str  # as torch names it
    memory_bytes: int
    busy_s: Pair
    peak_bytes: Pair


@dataclass(frozen=True, slots=True)
class Ran:
    """A plan that was run."""

    loadmaster: str  # always 'run'
    schema: int
    source: str
    graph: str
    placement_digest: str
    engine: str
    steps_asked: int
    steps_done: int
    ended: str  # 'done', 'interrupted' or 'loss is nan' (or inf)
    losses: tuple[float | None, ...]  # of every step; None: not a finite number
    step_times_s: tuple[float, ...]  # of every step; the first also makes the graph
    step_s: Pair  # median of all but the first, where there are others
    uncounted_step_s: float | None  # of steps under the clock, where bytes are counted otherwise
    num_transfers: Pair
    transfer_s: Pair
    devices: tuple[DeviceRan, ...]
    median_op_error: float | None  # of |predicted / measured - 1| over ops in both
    num_ops_measured: int
    num_calibrated: int  # rows written to the cost database
    database: str | None
    notes: tuple[str, ...]
    step_rel_error: float | None = None  # to expect of the predicted step, where it rests on measured costs
    busy: bool = False  # other work took processors that the run needed, so that it took longer than usual
    others_cores: float = 0.0  # processors that other work used meanwhile, on average


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What came of a run: the report, and the timelines it compares."""

    ran: Ran
    placement: Placement
    predicted: Timeline
    measured: Timeline | None


@dataclass(frozen=True, slots=True)
class StageRan:
    """One stage of one replica, in the last step."""

    stage: int
    rank: int
    device: str
    where: str  # as torch names it
    microbatch_s: Pair  # forward and backward of one micro-batch
    forward_s: float
    backward_s: float
    update_s: float
    bubble_share: float  # of the step, in which its process computed nothing
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class LinkRan:
    """What a stage of one replica sends another for a micro-batch, in the last step."""

    stage: int
    to_stage: int
    rank: int
    to_rank: int
    num_bytes: int
    transfer_s: Pair  # measured where it was waited for


@dataclass(frozen=True, slots=True)
class PipelineRan:
    """A pipeline that was run over processes; `--json` prints exactly this."""

    loadmaster: str  # always 'pipeline run'
    schema: int
    source: str
    graph: str
    placement_digest: str
    processes: int
    replicas: int
    schedule: str
    num_microbatches: int
    steps_asked: int
    steps_done: int
    ended: str
    losses: tuple[float | None, ...]
    step_times_s: tuple[float, ...]
    step_s: Pair  # median of all but the first, where there are others
    bubble_share: Pair
    stages: tuple[StageRan, ...]
    sent_bytes: int  # of all ranks in a step
    checkpoint: str | None
    notes: tuple[str, ...]
    links: tuple[LinkRan, ...] = ()
