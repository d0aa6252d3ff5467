"""What a group takes of a device: adapters, one unit at a time, boundaries if they fit, and a weight stream.

The rest of the cap is places of the stream: each holds a frozen shard that need not be loaded at the next
turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from loadmaster.core.errors import DeviceMemoryError
from loadmaster.core.units import format_bytes
from loadmaster.shards.device.arena import align_bytes
from loadmaster.shards.model.blocks import Chain
from loadmaster.shards.model.built_model import BuiltModel
from loadmaster.shards.model.profile import Profile
from loadmaster.shards.plan.layout import Layout
from loadmaster.shards.plan.sizes import Sizes
from loadmaster.shards.spec.trial import Trial
from loadmaster.train.backbone.adapter_weights import lowest_trained_shard, visit_bytes
from loadmaster.train.backbone.frozen_weights import is_frozen, piece_bytes
from loadmaster.train.backbone.weight_stream import stream_bytes

_PARTS = 16  # of the cap: a shard of several small blocks is at most so large
_MARGIN = 0.12  # of a GPU's cap: work space of its libraries and what its allocator cannot use
_FEWEST_PLACES = 2  # one in use, one on its way


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """How a group stands on its device."""

    order: tuple[tuple[str, int], ...]  # units of a step
    num_places: int
    on_device: bool  # boundaries
    peak_bytes: int
    up_bytes: int  # of one step, for all members together, if nothing stayed
    streamed_bytes: int  # of it what does not stay on the device


def group_cuts(built: BuiltModel, cap_bytes: int) -> list[int]:
    """Starts of shards: small blocks run together, up to a part of the cap."""
    facts, chain = built.facts, built.chain
    weight = [
        sum(chain.parameters[slot.tensor].nbytes for slot in slots) + facts.saved_bytes[block]
        for block, slots in enumerate(chain.parameter_slots)
    ]
    bound = cap_bytes // _PARTS
    starts, total = [0], 0
    for block, each in enumerate(weight):
        if total and total + each > bound:
            starts.append(block)
            total = 0
        total += each
    return starts


class PlannableTrial(Protocol):
    """What planning needs of a trial: a `TrialState`, or a sketch of one."""

    @property
    def trial(self) -> Trial:
        """What is trained."""

    @property
    def chain(self) -> Chain:
        """Its blocks."""

    @property
    def facts(self) -> Profile:
        """What they make."""

    @property
    def layout(self) -> Layout:
        """Its shards, frozen and trained pieces apart."""

    @property
    def sizes(self) -> Sizes:
        """Bytes of its parameters."""


def plan_group(
    states: Sequence[PlannableTrial], *, cap_bytes: int, on_gpu: bool, num_places: int | None = None
) -> GroupPlan:
    """The plan of these members; raises where not even two places are left."""
    room = cap_bytes
    if on_gpu:
        room -= int(_MARGIN * room)
    first = states[0]
    last = first.layout.num_shards - 1
    lowest = min(lowest_trained_shard(state) for state in states)
    order = (
        *(("F", shard) for shard in range(last)),
        ("L", last),
        *(("B", shard) for shard in range(last - 1, lowest - 1, -1)),
    )
    sizes = {
        piece.index: piece_bytes(piece, first.layout, first.chain)
        for piece in first.layout.pieces
        if is_frozen(piece, first.chain)
    }
    at_once = max(sum(p in sizes for p in first.layout.pieces_of[shard]) for shard in range(last + 1))
    fewest = max(at_once, min(len(sizes), at_once + _FEWEST_PLACES - 1))
    base = _base_bytes(states)
    kept = sum(boundary_bytes(state) for state in states)
    crossing = _crossing_bytes(states)
    on_device = base + kept + stream_bytes(sizes, fewest) <= room
    used = base + (kept if on_device else crossing)
    wanted = min(num_places or len(sizes), len(sizes))
    places = next(
        (n for n in range(wanted, min(fewest, wanted) - 1, -1) if used + stream_bytes(sizes, n) <= room), None
    )
    if places is None:
        _refuse_group(states, used + stream_bytes(sizes, fewest), room)
    assert places is not None
    up = sum(sizes[p] for _, shard in order for p in first.layout.pieces_of[shard] if p in sizes)
    # A zig-zag: what stands when it turns is used again, so each place saves its shard twice a step.
    streamed = int(up * max(0, len(sizes) - places) / max(1, len(sizes)))
    return GroupPlan(order, places, on_device, used + stream_bytes(sizes, places), up, streamed)


def _base_bytes(states: Sequence[PlannableTrial]) -> int:
    """Adapters, buffers, batches and slopes of all members, and the largest visit of any."""
    total = 0
    for state in states:
        sizes, facts = state.sizes, state.facts
        trained = [n for n, wanted in enumerate(sizes.trained) if wanted]
        total += sum(align_bytes(sizes.update_bytes[n]) + align_bytes(sizes.copy_bytes[n]) for n in trained)
        total += 2 * align_bytes(1) * len(state.layout.pieces)
        total += sum(sizes.grad_bytes[n] for n in trained) + len(state.layout.pieces)
        total += sum(buffer.nbytes for buffer in state.chain.buffers)
        total += state.trial.accumulate * (2 * facts.input_bytes + max(facts.output_bytes))
    kinds = [
        ("L" if s == states[0].layout.num_shards - 1 else "B") for s in range(states[0].layout.num_shards)
    ]
    largest = max(visit_bytes(state, shard, kind) for state in states for shard, kind in enumerate(kinds))
    forward = max(visit_bytes(state, shard, "F") for state in states for shard in range(len(kinds)))
    return total + max(largest, forward)


def boundary_bytes(state: PlannableTrial) -> int:
    """All boundaries of a step of one member."""
    ends = [high - 1 for _, high in state.layout.cuts[:-1]]
    return state.trial.accumulate * sum(state.facts.output_bytes[block] for block in ends)


def _crossing_bytes(states: Sequence[PlannableTrial]) -> int:
    """With boundaries in host memory: two for each member and two on their way."""
    each = [
        state.trial.accumulate
        * max((state.facts.output_bytes[high - 1] for _, high in state.layout.cuts[:-1]), default=0)
        for state in states
    ]
    return 2 * sum(each) + 2 * max(each)


def _refuse_group(states: Sequence[PlannableTrial], needed: int, room: int) -> None:
    names = ", ".join(repr(state.trial.name) for state in states[:3])
    raise DeviceMemoryError(
        f"a group of {len(states)} trials ({names}) needs {format_bytes(needed)} of {format_bytes(room)};"
        " raise memory_cap, cut into smaller blocks, take a smaller batch or fewer trials at once"
    )
