"""A strategy that was run, with prediction and measurement; `--json` prints exactly this."""

from dataclasses import dataclass

from loadmaster.core.answers.run_report import Pair

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class RankRan:
    """One process in the last step."""

    rank: int
    device: str
    where: str  # as torch names it
    rows: tuple[int, ...]  # of each share of the batch that it computes
    forward_s: float
    backward_s: float
    waited_s: float  # for tensors of other ranks, in the forward pass
    meeting_s: float  # for gradients of other ranks, after the backward pass
    update_s: float
    weight_bytes: int
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class StrategyRan:
    """A strategy that was run over processes."""

    loadmaster: str  # always 'strategy run'
    schema: int
    source: str
    graph: str
    answer_digest: str
    strategy: str
    processes: int
    groups: int
    steps_asked: int
    steps_done: int
    ended: str
    losses: tuple[float | None, ...]
    step_times_s: tuple[float, ...]
    step_s: Pair  # median of all but the first, where there are others
    ranks: tuple[RankRan, ...]
    sent_bytes: dict[str, int]  # of all ranks in a step: allreduce, ps, sfb (factors), move (between groups)
    comparisons: int  # of copies of weights
    largest_drift: float  # relative difference of copies when they were compared
    drifted_weight: str
    checkpoint: str | None
    notes: tuple[str, ...]
