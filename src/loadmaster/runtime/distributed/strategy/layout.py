"""Layout: which ranks run which ops on which rows, and how the gradients of every weight meet.

    RowShare    the ranks of some groups and their rows, e.g. ranks (0, 1) with 5 and 3 of 8 rows
    Meeting     of a weight: who has it, who adds it up, who steps it

Rank r of the run is the r-th device that the strategy uses.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Ints
from loadmaster.core.errors import InputError, PlanError
from loadmaster.core.strategy import Mode, OpGroup, Strategy, Sync, share_rows
from loadmaster.core.strategy_answer import StrategyAnswer
from loadmaster.core.strategy_check import check_strategy
from loadmaster.core.units import format_bytes


@dataclass(frozen=True, slots=True)
class RowShare:
    """Ranks and the rows that each computes. `whole`: each has the whole batch."""

    ranks: tuple[int, ...]
    rows: tuple[int, ...]
    whole: bool

    def bounds(self, rank: int) -> tuple[int, int]:
        """First row of a rank, and the row after its last."""
        at = self.ranks.index(rank)
        begin = 0 if self.whole else sum(self.rows[:at])
        return begin, begin + self.rows[at]

    @property
    def is_split(self) -> bool:
        """Whether several ranks have different rows."""
        return not self.whole

    def scaled(self, batch: int, planned: int) -> "RowShare":
        """The same shares of a batch of another size."""
        if batch == planned:
            return self
        if self.whole:
            return RowShare(self.ranks, (batch,) * len(self.ranks), self.whole)
        rows = share_rows(batch, self.rows)
        if min(rows) < 1:
            raise InputError(
                f"a batch of {batch} rows leaves rank {self.ranks[rows.index(0)]} without any (shares"
                f" {list(self.rows)} of {planned}); give more rows, or leave the last batch out"
            )
        return RowShare(self.ranks, rows, self.whole)


@dataclass(frozen=True, slots=True)
class Meeting:
    """How the gradients of a weight meet; of `factors` the weight's gradient is made from rows of all."""

    ranks: tuple[int, ...]  # that have the weight
    sync: Sync
    server: int  # under `ps`, else -1
    factors: bool

    @property
    def owner(self) -> int:
        """Who counts its norm and writes it to checkpoints."""
        return self.server if self.sync == Sync.PS else self.ranks[0]

    def steps(self, rank: int) -> bool:
        """Whether a rank has an optimizer for the weight."""
        return self.sync != Sync.PS or rank == self.server


@dataclass(frozen=True, slots=True)
class StrategyLayout:
    """A strategy as ranks see it."""

    devices: tuple[int, ...]  # [world] of the cluster
    batch: int
    shares: tuple[RowShare, ...]  # distinct
    share_of_group: tuple[int, ...]  # [G]
    group_of_op: Mapping[str, int]
    groups: tuple[OpGroup, ...]
    factor_names: frozenset[str]  # weights whose gradients are made from factors

    @property
    def world(self) -> int:
        """Processes."""
        return len(self.devices)

    def device_of(self, rank: int) -> int:
        """The device of a process."""
        return self.devices[rank]

    def meeting_of(self, name: str, readers: Sequence[int]) -> Meeting:
        """How the gradient of a weight meets that groups of these shares read."""
        group = self.groups[self.group_of_op[name]] if name in self.group_of_op else None
        ranks = sorted({rank for share in readers for rank in self.shares[share].ranks})
        doubled = [s for s in readers if self.shares[s].whole and len(self.shares[s].ranks) > 1]
        if doubled and len(readers) > 1:
            raise PlanError(
                f"weight {name!r} is read by a duplicated group and by another one, so its gradients would"
                " be counted twice; put all ops that read it into one group"
            )
        if doubled or len(ranks) == 1:
            return Meeting(tuple(ranks), Sync.NONE, -1, factors=False)
        factors = name in self.factor_names
        if factors and len(readers) > 1:
            raise PlanError(
                f"weight {name!r} is made from factors and read by {len(readers)} groups; leave it out of sfb"
            )
        if group is not None and group.sync == Sync.PS:
            return Meeting(tuple(ranks), Sync.PS, self.devices.index(group.server), factors=False)
        return Meeting(tuple(ranks), Sync.ALLREDUCE, -1, factors)


def layout_of_strategy(answer: StrategyAnswer) -> StrategyLayout:
    """The layout of an answer; refuses what is not run."""
    problem, strategy = answer.problem, answer.strategy
    broken = check_strategy(problem, strategy)
    if broken:
        raise PlanError(f"the strategy cannot be run: {broken[0].message}")
    _require_links(answer)
    _require_memory(answer)
    modes = {group.mode for group in strategy.groups}
    if Mode.PIPELINE in modes and len(modes) > 1:
        raise PlanError(
            "a pipeline beside other modes is simulated, and not yet run; use one mode for all groups,"
            " or ask for a strategy without pipeline"
        )
    devices = strategy.devices
    rank_of = {device: rank for rank, device in enumerate(devices)}
    found: dict[RowShare, int] = {}
    share_of_group = []
    for group in strategy.groups:
        share = share_of(group, rank_of)
        share_of_group.append(found.setdefault(share, len(found)))
    graph = problem.graph
    owner = dict(zip(graph.op_name, strategy.group_of.tolist(), strict=True))
    factors = frozenset(graph.op_name[op] for group in strategy.groups for op in group.sfb)
    return StrategyLayout(
        devices, strategy.batch, tuple(found), tuple(share_of_group), owner, strategy.groups, factors
    )


def share_of(group: OpGroup, rank_of: Mapping[int, int]) -> RowShare:
    """The ranks of a group in order of their rows."""
    ranks = tuple(rank_of[device] for device in group.devices)
    whole = group.mode == Mode.DUPLICATE or len(ranks) == 1
    if group.mode == Mode.DUPLICATE:  # all the same: one order
        ranks = tuple(sorted(ranks))
    return RowShare(ranks, tuple(group.rows), whole)


def shares_of_ops(strategy: Strategy, layout: StrategyLayout) -> Ints:
    """[N] the share of every op."""
    return np.array(layout.share_of_group, dtype=np.int32)[strategy.group_of]


def _require_links(answer: StrategyAnswer) -> None:
    """Devices that work together need a way from each to each."""
    cluster = answer.problem.cluster
    for at, group in enumerate(answer.strategy.groups):
        for one in group.devices:
            for other in group.devices:
                apart = cluster.host[one] != cluster.host[other]
                if one != other and apart and not (cluster.route[one, other] >= 0).any():
                    raise PlanError(
                        f"group {at} is on {cluster.device_name[one]} and {cluster.device_name[other]}, which"
                        " no link joins; name devices that are joined, or add the link to the cluster"
                    )


def _require_memory(answer: StrategyAnswer) -> None:
    cluster = answer.problem.cluster
    for device in answer.strategy.devices:
        needs, has = int(answer.peak_bytes[device]), int(cluster.usable_bytes[device])
        if needs > has:
            raise PlanError(
                f"the strategy does not fit on {cluster.device_name[device]}: it needs {format_bytes(needs)},"
                f" {format_bytes(has)} are there; give that device fewer rows, or place fewer groups on it"
            )
