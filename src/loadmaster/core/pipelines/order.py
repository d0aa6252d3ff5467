"""In which order each rank of a pipeline works: the one order that is simulated and that is run.

A rank runs its actions from first to last. Stage s of S lives on rank s mod R, so a rank with two stages has
one early and one late ("interleaved"). Four micro-batches, in stages of which each has a rank of its own
(F forward, B backward, I its part for inputs, W its part for weights; the number is the micro-batch):

    gpipe   rank 0   F0 F1 F2 F3          B0 B1 B2 B3        all forward, then all backward
            rank 1      F0 F1 F2 F3 B0 B1 B2 B3

    1f1b    rank 0   F0 F1       B0 F2 B1 F3 B2    B3        S - s forward, then backward and forward in turn
            rank 1      F0 B0 F1 B1 F2 B2 F3 B3

    zb-h1   rank 0   F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3     1f1b whose weight gradients fill the gaps:
            rank 1      F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3  rank r puts off r, so no rank holds more than S

`interleaved` (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", SC 2021, section 2.2) sends groups of about R micro-batches through a rank's v stages in turn; a
rank goes (v - 1) groups plus 2 (R - 1 - r) ahead before its first backward. `zb-h1` is the handcrafted
schedule of Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2. Both are the orders of
`torch.distributed.pipelining` where that has one: it refuses micro-batches that do not split into equal
groups. Here groups then differ by one, and ranks go further ahead where they would wait in a circle.

Each list ends with the sum of gradients of every stage (over replicas and tied copies) and its update.
Tensors go between neighbouring stages only: `with_transfers` writes down every send and receive, so that each
pair stands at the same place of one order of all ranks. `find_deadlock` runs lists under the hardest rule,
that a send waits for its receive, and says who waits for whom.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from loadmaster.core.errors import InputError, UnknownNameError

GPIPE, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE = "gpipe", "1f1b", "interleaved", "zb-h1"
SCHEDULES = (ONE_F_ONE_B, GPIPE, INTERLEAVED, ZERO_BUBBLE)
SEVERAL_STAGES = (GPIPE, INTERLEAVED, ZERO_BUBBLE)  # may have several stages on a rank
NO_MICROBATCH = -1


class Work(StrEnum):
    """What an action does with its stage."""

    FORWARD = "F"
    BACKWARD = "B"  # gradients of inputs and of weights
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_FORWARD = "SEND_F"
    RECEIVE_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECEIVE_BACKWARD = "RECV_B"
    REDUCE = "REDUCE"  # gradients of the stage, over replicas and tied copies
    UPDATE = "UPDATE"


SENDS = (Work.SEND_FORWARD, Work.SEND_BACKWARD)
RECEIVES = (Work.RECEIVE_FORWARD, Work.RECEIVE_BACKWARD)
_TO_INPUT = (Work.BACKWARD, Work.BACKWARD_INPUT)


@dataclass(frozen=True, slots=True)
class Action:
    """One thing a rank does for a stage and a micro-batch (NO_MICROBATCH for sums and updates)."""

    work: Work
    stage: int
    microbatch: int

    def __str__(self) -> str:
        """As torch writes it: stage, work, micro-batch, e.g. '1F0'."""
        count = "" if self.microbatch == NO_MICROBATCH else str(self.microbatch)
        return f"{self.stage}{self.work.value}{count}"


Order = tuple[tuple[Action, ...], ...]  # of every rank


def rank_of(stage: int, num_ranks: int) -> int:
    """The rank on which a stage lives."""
    return stage % num_ranks


@lru_cache(maxsize=1024)
def make_order(schedule: str, num_stages: int, num_microbatches: int, stages_per_rank: int = 1) -> Order:
    """What each rank computes, in order; `with_transfers` adds what it sends and receives."""
    num_ranks = _check(schedule, num_stages, num_microbatches, stages_per_rank)
    if schedule in (INTERLEAVED, ZERO_BUBBLE):
        lists = _grouped(num_ranks, stages_per_rank, num_microbatches, split=schedule == ZERO_BUBBLE)
    elif schedule == GPIPE:
        lists = [_gpipe(range(r, num_stages, num_ranks), num_microbatches) for r in range(num_ranks)]
    else:
        lists = [_one_f_one_b(s, num_stages, num_microbatches) for s in range(num_stages)]
    return tuple((*lists[r], *_ending(range(r, num_stages, num_ranks))) for r in range(num_ranks))


def forward_order(num_stages: int, num_microbatches: int, stages_per_rank: int = 1) -> Order:
    """Forward passes alone, as an evaluation runs them."""
    num_ranks = _check(GPIPE, num_stages, num_microbatches, stages_per_rank)
    return tuple(
        tuple(
            Action(Work.FORWARD, stage, batch)
            for stage in range(r, num_stages, num_ranks)
            for batch in range(num_microbatches)
        )
        for r in range(num_ranks)
    )


def _check(schedule: str, num_stages: int, num_microbatches: int, stages_per_rank: int) -> int:
    """The number of ranks of a pipeline that exists."""
    if schedule not in SCHEDULES:
        raise UnknownNameError("pipeline schedule", schedule, SCHEDULES)
    for name, value in (
        ("stages", num_stages),
        ("micro-batches", num_microbatches),
        ("stages per rank", stages_per_rank),
    ):
        if value < 1:
            raise InputError(f"a pipeline has {value} {name}; it needs at least 1")
    if stages_per_rank > 1 and schedule not in SEVERAL_STAGES:
        raise InputError(
            f"schedule {schedule!r} has {stages_per_rank} stages per rank, but allows 1;"
            f" use {INTERLEAVED!r}, or 1 stage per rank"
        )
    if num_stages % stages_per_rank:
        raise InputError(
            f"{num_stages} stages cannot be dealt to ranks of {stages_per_rank} each;"
            f" use a multiple of {stages_per_rank}"
        )
    return num_stages // stages_per_rank


def _ending(stages: range) -> list[Action]:
    return [Action(work, stage, NO_MICROBATCH) for work in (Work.REDUCE, Work.UPDATE) for stage in stages]


def _gpipe(stages: range, num_microbatches: int) -> list[Action]:
    """All forward passes stage by stage, then all backward passes, last stage first."""
    batches = range(num_microbatches)
    return [
        *(Action(Work.FORWARD, stage, batch) for stage in stages for batch in batches),
        *(Action(Work.BACKWARD, stage, batch) for stage in reversed(stages) for batch in batches),
    ]


def _one_f_one_b(stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """As many forward passes as stages follow, then one forward and one backward in turn."""
    ahead = min(num_stages - stage - 1, num_microbatches)
    actions = [Action(Work.FORWARD, stage, batch) for batch in range(ahead)]
    for batch in range(num_microbatches):
        if batch + ahead < num_microbatches:
            actions.append(Action(Work.FORWARD, stage, batch + ahead))
        actions.append(Action(Work.BACKWARD, stage, batch))
    return actions


def _grouped(
    num_ranks: int, stages_per_rank: int, num_microbatches: int, *, split: bool
) -> list[list[Action]]:
    """Groups of micro-batches through the stages of a rank in turn; the least run-ahead that never waits."""
    sizes = _group_sizes(num_ranks, num_microbatches)
    extra = 0
    while True:
        lists = [_grouped_rank(r, num_ranks, stages_per_rank, sizes, extra, split) for r in range(num_ranks)]
        if _runs(lists, num_ranks * stages_per_rank):
            return lists
        extra += 1


def _group_sizes(num_ranks: int, num_microbatches: int) -> list[int]:
    """About a micro-batch for each rank; sizes differ by one at most, larger groups first."""
    groups = max(1, num_microbatches // num_ranks)
    each, more = divmod(num_microbatches, groups)
    return [each + 1] * more + [each] * (groups - more)


def _grouped_rank(
    rank: int, num_ranks: int, stages_per_rank: int, sizes: list[int], extra: int, split: bool
) -> list[Action]:
    own = [local * num_ranks + rank for local in range(stages_per_rank)]
    forward, backward = _by_groups(own, sizes), _by_groups(own[::-1], sizes)
    ahead = (stages_per_rank - 1) * sizes[0] + (1 if split else 2) * (num_ranks - 1 - rank) + extra
    ahead = min(ahead, len(forward))
    put_off = rank if split else 0
    whole = Work.BACKWARD_INPUT if split else Work.BACKWARD
    actions = [Action(Work.FORWARD, *at) for at in forward[:ahead]]
    for i, at in enumerate(backward):
        if i + ahead < len(forward):
            actions.append(Action(Work.FORWARD, *forward[i + ahead]))
        actions.append(Action(whole, *at))
        if split and i >= put_off:
            actions.append(Action(Work.BACKWARD_WEIGHT, *backward[i - put_off]))
    if split:
        rest = backward[max(len(backward) - put_off, 0) :]
        actions.extend(Action(Work.BACKWARD_WEIGHT, *at) for at in rest)
    return actions


def _by_groups(stages: list[int], sizes: list[int]) -> list[tuple[int, int]]:
    """(stage, micro-batch): every group through all stages before the next group begins."""
    found, first = [], 0
    for size in sizes:
        found += [(stage, batch) for stage in stages for batch in range(first, first + size)]
        first += size
    return found


def in_flight_of(order: Order, num_stages: int) -> tuple[int, ...]:
    """[S] micro-batches that each stage holds at most: from forward to the last use of what was saved."""
    held, most = [0] * num_stages, [0] * num_stages
    for actions in order:
        for action in actions:
            if action.work == Work.FORWARD:
                held[action.stage] += 1
                most[action.stage] = max(most[action.stage], held[action.stage])
            elif action.work in (Work.BACKWARD, Work.BACKWARD_WEIGHT):
                held[action.stage] -= 1
    return tuple(most)


# ------------------------------------------------------------------------------- who needs what


def needs(action: Action, num_stages: int) -> tuple[tuple[Work, int, int], ...]:
    """What must have been computed before an action: (work, stage, micro-batch); the backward pass of inputs
    counts as done by BACKWARD and by BACKWARD_INPUT.
    """
    stage, batch = action.stage, action.microbatch
    if action.work == Work.FORWARD:
        return () if stage == 0 else ((Work.FORWARD, stage - 1, batch),)
    if action.work in _TO_INPUT:
        own = (Work.FORWARD, stage, batch)
        return (own,) if stage == num_stages - 1 else (own, (Work.BACKWARD_INPUT, stage + 1, batch))
    if action.work == Work.BACKWARD_WEIGHT:
        return ((Work.BACKWARD_INPUT, stage, batch),)
    return ()


def _done(action: Action) -> tuple[Work, int, int]:
    work = Work.BACKWARD_INPUT if action.work in _TO_INPUT else action.work
    return work, action.stage, action.microbatch


def _runs(lists: Sequence[Sequence[Action]], num_stages: int) -> bool:
    """Whether every action's inputs are made at last, however long sends may be kept."""
    done: set[tuple[Work, int, int]] = set()
    at = [0] * len(lists)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(lists):
            while at[rank] < len(actions) and all(n in done for n in needs(actions[at[rank]], num_stages)):
                done.add(_done(actions[at[rank]]))
                at[rank] += 1
                moved = True
    return all(at[rank] == len(actions) for rank, actions in enumerate(lists))


# --------------------------------------------------------------------------- sends and receives


def with_transfers(order: Order, num_stages: int) -> Order:
    """The order with every send and receive, each pair at one place of a common order of all ranks.

    A send stands right after what it sends was computed, its receive at that moment at the end of what the
    other rank has done so far: so lists run to the end even where a send waits for its receive.
    """
    num_ranks = len(order)
    lists: list[list[Action]] = [[] for _ in order]
    done: set[tuple[Work, int, int]] = set()
    at = [0] * num_ranks
    while any(at[r] < len(order[r]) for r in range(num_ranks)):
        moved = False
        for rank in range(num_ranks):  # one action each, so that receives come as late as may be
            if at[rank] == len(order[rank]):
                continue
            action = order[rank][at[rank]]
            if not all(need in done for need in needs(action, num_stages)):
                continue
            moved = True
            at[rank] += 1
            lists[rank].append(action)
            done.add(_done(action))
            pair = transfer_of(action, num_stages)
            if pair is not None and rank_of(pair[1].stage, num_ranks) != rank:
                lists[rank].append(pair[0])
                lists[rank_of(pair[1].stage, num_ranks)].append(pair[1])
        if not moved:
            raise InputError(find_deadlock(order, num_stages) or "the order of the pipeline never ends")
    return tuple(map(tuple, lists))


def transfer_of(action: Action, num_stages: int) -> tuple[Action, Action] | None:
    """The send and the receive that an action brings about, None where its result goes nowhere."""
    stage, batch = action.stage, action.microbatch
    if action.work == Work.FORWARD and stage < num_stages - 1:
        return Action(Work.SEND_FORWARD, stage, batch), Action(Work.RECEIVE_FORWARD, stage + 1, batch)
    if action.work in _TO_INPUT and stage > 0:
        return Action(Work.SEND_BACKWARD, stage, batch), Action(Work.RECEIVE_BACKWARD, stage - 1, batch)
    return None


def find_deadlock(lists: Sequence[Sequence[Action]], num_stages: int) -> str | None:
    """Who waits for whom in lists that never end; None where all end.

    Where lists have sends and receives, a send waits until the other rank has come to its receive, and what
    comes from another rank counts once it was received. Lists without any run as if all were sent at once.
    """
    num_ranks = len(lists)
    explicit = any(action.work in (*SENDS, *RECEIVES) for actions in lists for action in actions)
    seen: list[set[tuple[Work, int, int]]] = [set() for _ in lists]
    at = [0] * num_ranks

    def current(rank: int) -> Action | None:
        return lists[rank][at[rank]] if at[rank] < len(lists[rank]) else None

    def advance(rank: int) -> bool:
        action = current(rank)
        if action is None or action.work in RECEIVES:  # a receive moves with its send
            return False
        if action.work in SENDS:
            if _sent(action) not in seen[rank]:
                return False
            partner, expected = partner_of(action, num_ranks)
            if current(partner) != expected:
                return False
            seen[partner].add(_sent(action))
            at[partner] += 1
        elif not all(need in seen[rank] for need in needs(action, num_stages)):
            return False
        else:
            for other in [rank] if explicit else range(num_ranks):
                seen[other].add(_done(action))
        at[rank] += 1
        return True

    while any(advance(rank) for rank in range(num_ranks)):
        pass
    stuck = [rank for rank in range(num_ranks) if at[rank] < len(lists[rank])]
    if stuck:
        return "; ".join(_describe_wait(rank, current(rank), num_ranks, num_stages) for rank in stuck)
    return _find_repeated(lists)


def _find_repeated(lists: Sequence[Sequence[Action]]) -> str | None:
    twice = [action for action, n in Counter(a for actions in lists for a in actions).items() if n > 1]
    return f"{twice[0]} stands in the order more than once" if twice else None


def partner_of(send: Action, num_ranks: int) -> tuple[int, Action]:
    """Which rank receives what is sent, and as what."""
    forward = send.work == Work.SEND_FORWARD
    stage = send.stage + (1 if forward else -1)
    work = Work.RECEIVE_FORWARD if forward else Work.RECEIVE_BACKWARD
    return rank_of(stage, num_ranks), Action(work, stage, send.microbatch)


def _sent(send: Action) -> tuple[Work, int, int]:
    """What a send carries."""
    work = Work.FORWARD if send.work == Work.SEND_FORWARD else Work.BACKWARD_INPUT
    return work, send.stage, send.microbatch


def _describe_wait(rank: int, action: Action | None, num_ranks: int, num_stages: int) -> str:
    """'rank 1 waits in 1RECV_F2 for rank 0'."""
    assert action is not None
    if action.work in SENDS:
        other = partner_of(action, num_ranks)[0]
    elif action.work == Work.RECEIVE_FORWARD:
        other = rank_of(action.stage - 1, num_ranks)
    elif action.work == Work.RECEIVE_BACKWARD:
        other = rank_of(action.stage + 1, num_ranks)
    else:
        wanted = needs(action, num_stages)
        other = rank_of(wanted[-1][1], num_ranks) if wanted else rank
    return f"rank {rank} waits in {action} for rank {other}"
