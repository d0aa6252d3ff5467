"""What a plan of shards takes: its memory by replaying a step, its work by counting."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from loadmaster.shards.device.arena import Arena, align_bytes
from loadmaster.shards.model.built_model import BuildRecord, BuiltModel
from loadmaster.shards.model.profile import CallFacts, Profile
from loadmaster.shards.plan.layout import Layout, Placement
from loadmaster.shards.plan.ring_chunks import ring_size
from loadmaster.shards.plan.sizes import Sizes
from loadmaster.shards.plan.slot_needs import boundary_bytes, compute_memory_need
from loadmaster.shards.plan.step_limits import Limit, Work
from loadmaster.shards.plan.unit_order import count_forwards, unit_order

_WORKSPACE = 1.25  # of what autograd keeps: gradients of activations while a backward pass runs
IN_FLIGHT = 3  # pieces whose gradients may be on their way down


@dataclass(frozen=True, slots=True, eq=False)
class ShardPlan:
    """How a trial is to be run on one device."""

    layout: Layout
    placement: tuple[Placement, ...]  # [piece]
    num_slots: int
    depth: int
    ring_bytes: int
    peak_bytes: int  # of all trials that stand there
    own_bytes: int  # of this trial, beside the slots trials share
    work: Work
    limit: Limit
    load_bytes: int  # to bring what is pinned
    num_rings: int = 2
    num_in_flight: int = IN_FLIGHT  # pieces whose gradients may be on their way down
    slot_bytes: int = 0  # what a turn of another trial pushes out
    step_s: float = 0.0  # as predicted
    moving_bytes: int = 0  # the most that comes and goes in a step: activations, batches, updates


@dataclass(frozen=True, slots=True, eq=False)
class PlannedTrial:
    """A plan with all that a process needs to execute it; plain data, so that it can be sent to workers."""

    plan: ShardPlan
    device_type: str  # what it was planned for
    cap_bytes: int
    record: BuildRecord

    def suits(self, device_type: str, cap_bytes: int) -> bool:
        """Whether it is the plan of such a device: one with as much room.

        The room of a CPU is what was free at that moment, so there it is enough that the plan fits.
        """
        if self.device_type != device_type:
            return False
        return self.cap_bytes == cap_bytes or (device_type == "cpu" and self.plan.peak_bytes <= cap_bytes)


def unit_bytes(
    facts: Profile, layout: Layout, sizes: Sizes, placement: Sequence[Placement], shard: int, kind: str
) -> int:
    """Device memory a unit takes beside weights and boundaries."""
    low, high = layout.cuts[shard]
    casts = sum(
        sizes.copy_bytes[n]
        for piece in layout.pieces_of[shard]
        if placement[piece] == "pinned"
        for n in layout.pieces[piece].parameters
    )
    peaks = facts.peaks
    if kind == "F":
        blocks = peaks.forward[low:high] if peaks else [2 * size for size in facts.output_bytes[low:high]]
        return max(blocks) + casts
    numbers = [n for piece in layout.pieces_of[shard] for n in layout.pieces[piece].parameters]
    grads = sum(sizes.grad_bytes[n] for n in numbers)
    if peaks is None:
        saved = sum(facts.saved_bytes[low:high])
        return int(_WORKSPACE * saved) + 2 * facts.output_bytes[high - 1] + grads + casts
    kept, most = peaks.kept[low:high], peaks.backward[low:high]
    extra = max(peak - each for peak, each in zip(most, kept, strict=True))
    return sum(kept) + extra + (grads if high - low > 1 or facts.sums_grads else 0) + casts


def update_bytes(sizes: Sizes, numbers: Sequence[int], *, deferred: bool, on_device: bool) -> int:
    """Device memory a piece takes between its last backward and the end of its update, gradients included."""
    trained = [n for n in numbers if sizes.trained[n]]
    grads = sum(sizes.grad_bytes[n] for n in trained)
    if not on_device:
        return grads
    wide = sum(sizes.wide_bytes[n] for n in trained)
    if deferred:  # each factor makes one more
        wide += 2 * sum(max(sizes.wide_bytes[n], sizes.grad_bytes[n]) for n in trained)
    return grads + wide + sum(sizes.start_bytes[n] for n in trained)


def flight_bytes(
    layout: Layout, sizes: Sizes, streamed: frozenset[int], num_in_flight: int, *, ring_bytes: int
) -> int:
    """Gradients that may be on their way down at once, and what the update aside makes of one."""
    if layout.num_shards == 1:
        num_in_flight = 0  # the step ends with its only unit
    grads = [sum(sizes.grad_bytes[n] for n in layout.pieces[piece].parameters) for piece in streamed]
    aside = ring_bytes if any(sizes.start_bytes) else ring_bytes // 3  # new state; or the gradient, widened
    return sum(sorted(grads)[len(grads) - min(num_in_flight, len(grads)) :]) + aside


def ring_bytes_of(layout: Layout, sizes: Sizes, placement: Sequence[Placement]) -> int:
    """Bytes of a ring place for what is stepped on the device."""
    return max(
        (
            ring_size(sizes.update_bytes[number] for number in piece.parameters if sizes.trained[number])
            for piece in layout.pieces
            if placement[piece.index] == "device"
        ),
        default=0,
    )


def measure_plan(built: BuiltModel, plan: ShardPlan, sizes: Sizes, share: int) -> ShardPlan:
    """Peak by replay, work by counting."""
    pinned = sum(
        sizes.pinned_bytes[number]
        for piece in plan.layout.pieces
        if plan.placement[piece.index] == "pinned"
        for number in piece.parameters
    )
    shared, standing, moving, slot_bytes = replay_memory(built, plan, sizes)
    return replace(
        plan,
        peak_bytes=shared + share * standing + moving,
        own_bytes=standing + moving,
        work=_count_work(built, plan, sizes),
        load_bytes=pinned,
        slot_bytes=slot_bytes,
        moving_bytes=moving,
    )


def replay_memory(built: BuiltModel, plan: ShardPlan, sizes: Sizes) -> tuple[int, int, int, int]:
    """Bytes of places, of what stands of a trial, the most that comes and goes in a step; and of slots."""
    arena = Arena("plan", 1 << 62, lambda size: torch.empty(0, dtype=torch.uint8))
    layout, facts = plan.layout, built.facts
    streamed = frozenset(p.index for p in layout.pieces if plan.placement[p.index] != "pinned")
    need = compute_memory_need(
        [sum(align_bytes(sizes.compute_bytes[n]) for n in piece.parameters) for piece in layout.pieces],
        streamed,
        num_slots=plan.num_slots,
        ring_bytes=plan.ring_bytes,
        num_rings=plan.num_rings,
        flight_bytes=flight_bytes(layout, sizes, streamed, plan.num_in_flight, ring_bytes=plan.ring_bytes),
        boundary_bytes=boundary_bytes(facts, layout, micro_batches=built.trial.accumulate),
    )
    standing = sum(align_bytes(buffer.numel() * buffer.element_size()) for buffer in built.chain.buffers)
    for piece in layout.pieces:
        if plan.placement[piece.index] == "pinned":
            standing += align_bytes(sum(align_bytes(sizes.pinned_bytes[n]) for n in piece.parameters))
    arena.book("batch", 2 * built.trial.accumulate * facts.input_bytes)
    deferred = built.trial.deferred
    if layout.calls is not None:
        _replay_calls(arena, built, plan, sizes)
        return need.num_bytes, standing, arena.peak_bytes, need.slot_bytes
    for kind, shard in unit_order(layout.num_shards):
        with arena.hold("activations", unit_bytes(facts, layout, sizes, plan.placement, shard, kind)):
            pass
        if kind == "F":
            continue
        for index in layout.pieces_of[shard]:
            pinned = plan.placement[index] == "pinned"
            numbers = layout.pieces[index].parameters
            held = update_bytes(sizes, numbers, deferred=deferred, on_device=pinned or deferred)
            with arena.hold("update", held + max(facts.output_bytes)):
                pass
    return need.num_bytes, standing, arena.peak_bytes, need.slot_bytes


def _replay_calls(arena: Arena, built: BuiltModel, plan: ShardPlan, sizes: Sizes) -> None:
    """Activations of a micro-batch by call, and the largest update beside them."""
    facts, layout = built.facts, plan.layout
    assert facts.calls is not None, "its layout has calls"
    wide = built.trial.accumulate > 1
    with arena.hold("activations", call_activation_bytes(facts.calls, layout, sizes, plan.placement)):
        for piece in layout.pieces:
            on_device = plan.placement[piece.index] == "pinned" or built.trial.deferred
            held = update_bytes(sizes, piece.parameters, deferred=built.trial.deferred, on_device=on_device)
            sums = sum(sizes.grad_bytes[n] for n in piece.parameters) if wide else 0
            with arena.hold("update", held + sums):
                pass


def call_activation_bytes(
    calls: CallFacts, layout: Layout, sizes: Sizes, placement: Sequence[Placement]
) -> int:
    """The most that activations of one forward and backward take, each shard kept or made again."""
    again = layout.recompute or (False,) * layout.num_shards
    live = most = 0
    at_exit: list[int] = []
    for call, shard in enumerate(calls.order):
        live = max(0, live + calls.between_bytes[call])
        most = max(most, live + calls.forward_bytes[call])
        live += calls.lean_bytes[call] if again[shard] else calls.kept_bytes[call]
        at_exit.append(live)
    most = max(most, live + calls.tail_bytes)
    for call, shard in enumerate(calls.order):
        made = calls.kept_bytes[call] - calls.lean_bytes[call] if again[shard] else 0
        most = max(most, at_exit[call] + made + calls.inflow_bytes[call] + calls.backward_bytes[call])
    casts = [
        sum(
            sizes.copy_bytes[n]
            for piece in pieces
            if placement[piece] == "pinned"
            for n in layout.pieces[piece].parameters
        )
        for pieces in (*layout.pieces_of, () if layout.rest is None else (layout.rest,))
    ]
    return most + max(casts[:-1], default=0) + casts[-1]


def _count_call_work(built: BuiltModel, plan: ShardPlan, sizes: Sizes) -> Work:
    """The same by call: weights come once for every call, forward and backward, of every micro-batch."""
    layout, facts, m = plan.layout, built.facts, built.trial.accumulate
    assert facts.calls is not None, "its layout has calls"
    order = facts.calls.order
    up = down = host = stepped = 0.0
    for piece in layout.pieces:
        where = plan.placement[piece.index]
        weights = sum(sizes.compute_bytes[n] for n in piece.parameters)
        trained = [n for n in piece.parameters if sizes.trained[n]]
        grads = sum(sizes.grad_bytes[n] for n in trained)
        down, up, host = down + (m - 1) * grads, up + (m - 1) * grads, host + 2 * (m - 1) * grads
        if where == "pinned":
            continue
        calls = [shard for shard in order if shard in piece.shards]
        visits = 1 if piece.index == layout.rest else m * (2 * len(calls) - (list(order[-1:]) == calls[-1:]))
        up += visits * weights
        host += visits * weights
        if where == "host":
            down += grads
            stepped += sum(sizes.numel[n] for n in trained)
            host += 2 * grads + sum(2 * sizes.pinned_bytes[n] + sizes.copy_bytes[n] for n in trained)
        else:
            state = sum(sizes.pinned_bytes[n] for n in trained)
            copies = sum(sizes.copy_bytes[n] for n in trained)
            up, down, host = up + state, down + state + copies, host + 2 * state + copies
    again = layout.recompute or (False,) * layout.num_shards
    twice = sum(each for each, made in zip(facts.flops, again, strict=True) if made)
    return Work(
        flops=m * (3 * sum(facts.flops) + twice),
        up_bytes=up,
        down_bytes=down,
        host_stepped=stepped,
        host_bytes=host,
    )


def _count_work(built: BuiltModel, plan: ShardPlan, sizes: Sizes) -> Work:
    """Bytes and FLOPs of one step, turns of the order left out."""
    if plan.layout.calls is not None:
        return _count_call_work(built, plan, sizes)
    up = down = host = stepped = 0.0
    last = plan.layout.num_shards - 1
    for piece in plan.layout.pieces:
        where = plan.placement[piece.index]
        if where == "pinned":
            continue
        weights = sum(sizes.compute_bytes[n] for n in piece.parameters)
        visits = count_forwards(built.trial, built.facts) + (piece.shards != (last,))
        up += visits * weights
        host += visits * weights
        trained = [n for n in piece.parameters if sizes.trained[n]]
        if where == "host":
            grads = sum(sizes.grad_bytes[n] for n in trained)
            down += grads
            stepped += sum(sizes.numel[n] for n in trained)
            host += 2 * grads + sum(2 * sizes.pinned_bytes[n] + sizes.copy_bytes[n] for n in trained)
        else:
            state = sum(sizes.pinned_bytes[n] for n in trained)
            copies = sum(sizes.copy_bytes[n] for n in trained)
            up, down, host = up + state, down + state + copies, host + 2 * state + copies
    once = sum(built.facts.flops)
    again = once - sum(built.facts.flops[plan.layout.cuts[last][0] :])
    flops = built.trial.accumulate * (3 * once + again)
    return Work(flops=flops, up_bytes=up, down_bytes=down, host_stepped=stepped, host_bytes=host)
