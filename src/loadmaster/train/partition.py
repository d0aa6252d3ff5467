"""Where to cut, what to pin, who steps: the plan of a trial under a byte cap, proved by replaying it.

Cuts: for each number of shards the ones whose largest shard is least; of these the number that
leaves most room. What room is left holds pinned shards, from the first: their update is done when the
next step wants them. The rest streams; which of it is stepped on the host comes from the rates.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from loadmaster.core.errors import DeviceMemoryError
from loadmaster.core.units import format_bytes
from loadmaster.train.arena import Arena, aligned
from loadmaster.train.layout import Layout, Placement, lay_out
from loadmaster.train.limits import Limit, Work, limit
from loadmaster.train.profile import Profile
from loadmaster.train.rates import Rates
from loadmaster.train.slots import least_slots, unit_order
from loadmaster.train.state import Built, Sizes, sizes_of
from loadmaster.train.trial import COMPUTE_DTYPE

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
    peak_bytes: int
    work: Work
    limit: Limit
    load_bytes: int  # to bring what is pinned


def unit_bytes(
    facts: Profile, layout: Layout, sizes: Sizes, placement: Sequence[Placement], shard: int, kind: str
) -> int:
    """Device memory a unit takes beside weights and boundaries."""
    low, high = layout.cuts[shard]
    if kind == "F":
        return 2 * max(facts.output_bytes[low:high])
    numbers = [n for piece in layout.pieces_of[shard] for n in layout.pieces[piece].parameters]
    grads = sum(sizes.grad_bytes[n] for n in numbers)
    saved = sum(facts.saved_bytes[low:high])
    return int(_WORKSPACE * saved) + 2 * facts.output_bytes[high - 1] + grads


def make_plan(
    built: Built,
    *,
    cap_bytes: int,
    rates: Rates,
    optimizer_placement: str = "auto",
    num_slots: int = 4,
    cuts: Sequence[int] | None = None,
    share: int = 1,
) -> ShardPlan:
    """The plan of one trial; `share` trials are to stand on the device at once."""
    sizes = sizes_of(built)
    room = cap_bytes // share
    candidates = [list(cuts)] if cuts is not None else _candidates(built, sizes)
    best: tuple[int, ShardPlan] | None = None
    least = None
    for starts in candidates:
        layout = lay_out(
            built.chain,
            starts,
            compute_dtype=COMPUTE_DTYPE[built.trial.precision],
            castable=built.facts.castable,
        )
        plan = _base(built, layout, sizes, rates, optimizer_placement, num_slots, room)
        peak = plan.peak_bytes
        if least is None or peak < least:
            least = peak
        if peak <= room and (best is None or peak < best[0]):
            best = (peak, plan)
    if best is None:
        _refuse(built, sizes, room, least or 0)
    assert best is not None
    return _place(built, _pin(built, best[1], sizes, room), sizes, rates, optimizer_placement)


def _candidates(built: Built, sizes: Sizes) -> list[list[int]]:
    """For each number of shards, starts of runs of blocks whose largest is least."""
    facts = built.facts
    weight = [
        3 * sum(sizes.compute_bytes[slot.tensor] for slot in slots) + facts.saved_bytes[block] + 1
        for block, slots in enumerate(built.chain.parameter_slots)
    ]
    found: list[list[int]] = []
    bounds = {sum(weight)}
    bound = sum(weight)
    while bound > max(weight):
        bound = max(max(weight), int(bound / 1.15))
        bounds.add(bound)
    for bound in sorted(bounds):
        starts, total = [0], 0
        for block, each in enumerate(weight):
            if total and total + each > bound:
                starts.append(block)
                total = 0
            total += each
        if starts not in found:
            found.append(starts)
    return found


def _base(
    built: Built, layout: Layout, sizes: Sizes, rates: Rates, placement: str, num_slots: int, room: int
) -> ShardPlan:
    """Nothing pinned; as many slots as fit, up to the number asked for."""
    where: Placement = "host" if placement == "host" else "device"
    everything = (where,) * len(layout.pieces)
    streamed = frozenset(range(len(layout.pieces)))
    fewest = least_slots(layout, streamed)
    ring = 0 if placement == "host" else _ring_bytes(layout, sizes, everything)
    plan: ShardPlan | None = None
    for slots in range(max(num_slots, fewest), fewest - 1, -1):
        depth = max(0, slots - fewest)
        plan = _measured(
            built, ShardPlan(layout, everything, slots, depth, ring, 0, _NO_WORK, _NO_LIMIT, 0), sizes
        )
        if plan.peak_bytes <= room:
            break
    assert plan is not None
    return plan


_NO_WORK = Work(flops=0, up_bytes=0, down_bytes=0, host_stepped=0, host_bytes=0)
_NO_LIMIT = Limit(0.0, "", {})


def _ring_bytes(layout: Layout, sizes: Sizes, placement: Sequence[Placement]) -> int:
    return max(
        (
            sizes.update_bytes[number]
            for piece in layout.pieces
            if placement[piece.index] == "device"
            for number in piece.parameters
            if sizes.trained[number]
        ),
        default=0,
    )


def _pin(built: Built, plan: ShardPlan, sizes: Sizes, room: int) -> ShardPlan:
    """Pin pieces from the first shard on while they fit."""
    for piece in sorted(plan.layout.pieces, key=lambda each: each.shards[0]):
        placement = list(plan.placement)
        placement[piece.index] = "pinned"
        tried = _measured(built, replace(plan, placement=tuple(placement)), sizes)
        if tried.peak_bytes > room:
            break
        plan = tried
    return plan


def _place(built: Built, plan: ShardPlan, sizes: Sizes, rates: Rates, wish: str) -> ShardPlan:
    """Who steps what is not pinned: as asked, or the split with the least time."""
    free = [piece.index for piece in plan.layout.pieces if plan.placement[piece.index] != "pinned"]
    if wish in ("device", "host"):
        counts = [len(free) if wish == "host" else 0]
    elif wish == "hybrid":
        counts = [len(free) // 2]
    else:
        counts = list(range(len(free) + 1))
    tried = []
    for count in counts:
        placement = list(plan.placement)
        for order, index in enumerate(free):  # spread evenly
            host = (order + 1) * count // max(1, len(free)) > order * count // max(1, len(free))
            placement[index] = "host" if host else "device"
        ring = _ring_bytes(plan.layout, sizes, placement)
        each = _measured(built, replace(plan, placement=tuple(placement), ring_bytes=ring), sizes)
        tried.append(replace(each, limit=limit(each.work, rates)))
    return min(tried, key=lambda each: (each.limit.seconds, sum(each.limit.terms.values())))


def _measured(built: Built, plan: ShardPlan, sizes: Sizes) -> ShardPlan:
    """Peak by replay, work by counting."""
    pinned = sum(
        sizes.pinned_bytes[number]
        for piece in plan.layout.pieces
        if plan.placement[piece.index] == "pinned"
        for number in piece.parameters
    )
    return replace(
        plan, peak_bytes=replay(built, plan, sizes), work=_work(built, plan, sizes), load_bytes=pinned
    )


def replay(built: Built, plan: ShardPlan, sizes: Sizes) -> int:
    """Every unit of a step against an arena without a cap: the most it held."""
    arena = Arena("plan", 1 << 62, lambda size: torch.empty(0, dtype=torch.uint8))
    layout, facts = plan.layout, built.facts
    up = [sum(aligned(sizes.compute_bytes[n]) for n in piece.parameters) for piece in layout.pieces]
    streamed = [piece.index for piece in layout.pieces if plan.placement[piece.index] != "pinned"]
    for piece in layout.pieces:
        if plan.placement[piece.index] == "pinned":
            arena.book("pinned", sum(aligned(sizes.pinned_bytes[n]) for n in piece.parameters))
    if streamed:
        usual = sorted(up[index] for index in streamed)[len(streamed) // 2]
        large = [index for index in streamed if up[index] > 1.5 * usual]
        rest = [up[index] for index in streamed if index not in large]
        arena.book("slots", sum(up[index] for index in large))
        arena.book("slots", min(plan.num_slots, len(rest)) * max(rest, default=0))
    arena.book("ring", 2 * aligned(plan.ring_bytes) if plan.ring_bytes else 0)
    grads = [sum(sizes.grad_bytes[n] for n in piece.parameters) for piece in layout.pieces]
    arena.book("gradients in flight", sum(sorted(grads)[-IN_FLIGHT:]) if layout.num_shards > 1 else 0)
    arena.book("buffers", sum(buffer.numel() * buffer.element_size() for buffer in built.chain.buffers))
    micro = built.trial.accumulate
    arena.book("batch", 2 * micro * facts.input_bytes)
    boundaries = []
    for kind, shard in unit_order(layout.num_shards):
        with arena.hold("activations", unit_bytes(facts, layout, sizes, plan.placement, shard, kind)):
            if kind == "F":
                boundaries.append(micro * facts.output_bytes[layout.cuts[shard][1] - 1])
                arena.book("boundaries", boundaries[-1])
        if kind == "B" and boundaries:
            arena.release("boundaries", boundaries.pop())
    return arena.peak_bytes


def _work(built: Built, plan: ShardPlan, sizes: Sizes) -> Work:
    """Bytes and FLOPs of one step, turns of the order left out."""
    up = down = host = stepped = 0.0
    last = plan.layout.num_shards - 1
    for piece in plan.layout.pieces:
        where = plan.placement[piece.index]
        if where == "pinned":
            continue
        weights = sum(sizes.compute_bytes[n] for n in piece.parameters)
        visits = 1 if piece.shards == (last,) else 2
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


def _refuse(built: Built, sizes: Sizes, room: int, least: int) -> None:
    facts = built.facts
    weights = [sum(sizes.compute_bytes[s.tensor] for s in slots) for slots in built.chain.parameter_slots]
    block = max(range(len(weights)), key=lambda each: weights[each] + facts.saved_bytes[each])
    raise DeviceMemoryError(
        f"trial {built.trial.name!r} needs {format_bytes(least)} of a cap of {format_bytes(room)} however"
        f" it is cut; its largest block {built.chain.block_name[block]} has"
        f" {format_bytes(weights[block])} of weights and keeps {format_bytes(facts.saved_bytes[block])} of"
        " activations; raise memory_cap, take a smaller batch (with accumulate) or give smaller blocks"
    )
