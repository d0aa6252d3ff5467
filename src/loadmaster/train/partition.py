"""Where to cut, what to pin, who steps: the plan of a trial under a byte cap, proved by replaying it.

Cuts: for each number of shards the ones whose largest shard is least; of these the number with the least
predicted time. What room is left holds pinned shards, from the first: their update is done when the
next step wants them. The rest streams; which of it is stepped on the host comes from the rates.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from loadmaster.core.errors import DeviceMemoryError
from loadmaster.core.units import format_bytes
from loadmaster.train.arena import Arena, aligned
from loadmaster.train.boundaries import boundary_bytes
from loadmaster.train.chunks import ring_size
from loadmaster.train.layout import Layout, Placement, lay_out
from loadmaster.train.limits import Limit, Work, limit
from loadmaster.train.places import need_of
from loadmaster.train.profile import Profile
from loadmaster.train.rates import Rates
from loadmaster.train.slots import least_slots, unit_order
from loadmaster.train.state import Built, Sizes, sizes_of
from loadmaster.train.step_forecast import forecast_step_s
from loadmaster.train.trial import COMPUTE_DTYPE

_WORKSPACE = 1.25  # of what autograd keeps: gradients of activations while a backward pass runs
_LIBRARIES_BYTES = 128 << 20  # workspaces of matrix products, two threads on two streams, and of attention
_SCATTERED = 0.04  # of the cap: holes, and blocks rounded up to 2 MiB
_ISSUED = 1.05  # a measured step to its forecast at the rates of its trace: 1.03 (1.64 B, 6.5 GiB, one H200)
_PLACES_TRIED = 8
_MOST_TRIED = 6  # cuts, those with the least peaks first
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
    own_bytes: int  # of this trial, beside the places trials share
    work: Work
    limit: Limit
    load_bytes: int  # to bring what is pinned
    num_rings: int = 2
    num_in_flight: int = IN_FLIGHT  # pieces whose gradients may be on their way down
    slot_bytes: int = 0  # what a turn of another trial pushes out
    step_s: float = 0.0  # as predicted
    moving_bytes: int = 0  # the most that comes and goes in a step: activations, batches, updates


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


def make_plan(
    built: Built,
    *,
    cap_bytes: int,
    rates: Rates,
    optimizer_placement: str = "auto",
    num_slots: int = 4,
    cuts: Sequence[int] | None = None,
    share: int = 1,
    more_reserve_bytes: int = 0,
) -> ShardPlan:
    """The plan of one trial; `share` trials like it are to stand on the device at once, and take turns."""
    sizes = sizes_of(built)
    room = cap_bytes - reserve_bytes(built, cap_bytes) - more_reserve_bytes
    candidates = [list(cuts)] if cuts is not None else _candidates(built, sizes)
    bases = []
    for starts in candidates:
        layout = lay_out(
            built.chain,
            starts,
            compute_dtype=COMPUTE_DTYPE[built.trial.precision],
            castable=built.facts.castable,
        )
        bases.append(_base(built, layout, sizes, optimizer_placement, num_slots, room, share))
    fitting = sorted((base for base in bases if base.peak_bytes <= room), key=lambda base: base.peak_bytes)
    if not fitting:
        _refuse(built, sizes, room, min(base.peak_bytes for base in bases))
    plans = []
    for base in fitting[:_MOST_TRIED]:
        pinned = _pin(built, base, sizes, room, share)
        plans.append(_place(built, pinned, sizes, rates, optimizer_placement, share))
    found = min(plans, key=lambda plan: (plan.limit.predicted_s, plan.peak_bytes))
    clock = _Clock(built, sizes, rates, share)
    if optimizer_placement != "auto":
        return clock.told(found)
    return _refined(found, clock, room)


@dataclass
class _Clock:
    """Forecasts of one trial's plans."""

    built: Built
    sizes: Sizes
    rates: Rates
    share: int

    def told(self, plan: ShardPlan) -> ShardPlan:
        """The plan with its predicted step."""
        taken = forecast_step_s(self.built, plan, self.sizes, self.rates, num_trials=min(self.share, 2))
        return replace(plan, step_s=_ISSUED * max(taken, plan.limit.seconds))

    def split(self, plan: ShardPlan, count: int, num_rings: int) -> ShardPlan:
        """So many of what is not pinned stepped on the device, spread evenly."""
        large = _too_large(plan.layout, self.sizes)
        free = [p.index for p in plan.layout.pieces if plan.placement[p.index] != "pinned"]
        free = [index for index in free if index not in large]
        placement = list(plan.placement)
        for order, index in enumerate(free):
            chosen = (order + 1) * count // len(free) > order * count // len(free)
            placement[index] = "device" if chosen else "host"
        ring = _ring_bytes(plan.layout, self.sizes, placement)
        tried = replace(plan, placement=tuple(placement), ring_bytes=ring, num_rings=num_rings)
        tried = _measured(self.built, tried, self.sizes, self.share)
        return self.told(replace(tried, limit=limit(tried.work, self.rates)))


def _refined(plan: ShardPlan, clock: _Clock, room: int) -> ShardPlan:
    """Of even splits, with as many rings and with one more, the one with the least forecast."""
    best = clock.told(plan)
    large = _too_large(plan.layout, clock.sizes)
    free = [p.index for p in plan.layout.pieces if plan.placement[p.index] != "pinned"]
    most = len([index for index in free if index not in large])
    more_rings = 1 if clock.share == 1 else 0  # trials in turn fill each other's gaps
    for num_rings in range(plan.num_rings, plan.num_rings + more_rings + 1):
        wide = max(1, most // _PLACES_TRIED)
        counts = range(0, most + 1, wide) if most else ()
        tried = {count: clock.split(plan, count, num_rings) for count in counts}
        fitting = {count: each for count, each in tried.items() if each.peak_bytes <= room}
        if not fitting:
            continue
        near = min(fitting, key=lambda count: fitting[count].step_s)
        for count in range(max(0, near - wide + 1), min(most, near + wide - 1) + 1):
            each = tried.get(count) or clock.split(plan, count, num_rings)
            if each.peak_bytes <= room and each.step_s < best.step_s:
                best = each
    return best


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


def reserve_bytes(built: Built, cap_bytes: int) -> int:
    """What is kept free on a GPU: workspaces of its libraries, and what its allocator scatters."""
    return 0 if built.device.type == "cpu" else int(_LIBRARIES_BYTES + _SCATTERED * cap_bytes)


def _base(
    built: Built, layout: Layout, sizes: Sizes, wish: str, num_slots: int, room: int, share: int
) -> ShardPlan:
    """Nothing pinned; as many slots as fit, up to the number asked for."""
    large = _too_large(layout, sizes) if wish in ("auto", "hybrid") else frozenset()
    everything: tuple[Placement, ...] = tuple(
        "host" if wish == "host" or piece.index in large else "device" for piece in layout.pieces
    )
    streamed = frozenset(range(len(layout.pieces)))
    fewest = least_slots(layout, streamed)
    ring = _ring_bytes(layout, sizes, everything)
    plan: ShardPlan | None = None
    most = max(num_slots, fewest)
    ways = [(slots, 2, IN_FLIGHT) for slots in range(most, fewest - 1, -1)]
    for slots, num_rings, num_in_flight in [*ways, (fewest, 2, 1), (fewest, 1, 1)]:
        depth = max(0, slots - fewest)
        bare = ShardPlan(layout, everything, slots, depth, ring, 0, 0, _NO_WORK, _NO_LIMIT, 0)
        bare = replace(bare, num_rings=num_rings, num_in_flight=num_in_flight)
        plan = _measured(built, bare, sizes, share)
        if plan.peak_bytes <= room:
            break
    assert plan is not None
    return plan


_NO_WORK = Work(flops=0, up_bytes=0, down_bytes=0, host_stepped=0, host_bytes=0)
_NO_LIMIT = Limit(0.0, "", {})


def _ring_bytes(layout: Layout, sizes: Sizes, placement: Sequence[Placement]) -> int:
    return max(
        (
            ring_size(sizes.update_bytes[number] for number in piece.parameters if sizes.trained[number])
            for piece in layout.pieces
            if placement[piece.index] == "device"
        ),
        default=0,
    )


def _too_large(layout: Layout, sizes: Sizes) -> frozenset[int]:
    """Pieces with one parameter so large that a ring for it would take the room of several others."""
    largest = [max((sizes.update_bytes[n] for n in piece.parameters), default=0) for piece in layout.pieces]
    usual = sorted(largest)[len(largest) // 2] if largest else 0
    return frozenset(piece.index for piece in layout.pieces if largest[piece.index] > 2 * usual)


def _pin(built: Built, plan: ShardPlan, sizes: Sizes, room: int, share: int) -> ShardPlan:
    """Pin pieces from the first shard on, those that fit."""
    for piece in sorted(plan.layout.pieces, key=lambda each: each.shards[0]):
        placement = list(plan.placement)
        placement[piece.index] = "pinned"
        tried = _measured(built, replace(plan, placement=tuple(placement)), sizes, share)
        if tried.peak_bytes <= room:
            plan = tried
    return plan


def _place(built: Built, plan: ShardPlan, sizes: Sizes, rates: Rates, wish: str, share: int) -> ShardPlan:
    """Who steps what is not pinned: as asked, or the split with the least time."""
    free = [piece.index for piece in plan.layout.pieces if plan.placement[piece.index] == "device"]
    if wish in ("device", "host"):
        counts = [len(free) if wish == "host" else 0]
    elif wish == "hybrid":
        counts = [-(-len(free) // 2)]
    else:
        counts = list(range(len(free) + 1))
    tried = []
    for count in counts:
        placement = list(plan.placement)
        for order, index in enumerate(free):  # spread evenly
            host = (order + 1) * count // max(1, len(free)) > order * count // max(1, len(free))
            placement[index] = "host" if host else "device"
        ring = _ring_bytes(plan.layout, sizes, placement)
        each = _measured(built, replace(plan, placement=tuple(placement), ring_bytes=ring), sizes, share)
        tried.append(replace(each, limit=limit(each.work, rates)))
    return min(tried, key=lambda each: each.limit.predicted_s)


def _measured(built: Built, plan: ShardPlan, sizes: Sizes, share: int) -> ShardPlan:
    """Peak by replay, work by counting."""
    pinned = sum(
        sizes.pinned_bytes[number]
        for piece in plan.layout.pieces
        if plan.placement[piece.index] == "pinned"
        for number in piece.parameters
    )
    shared, standing, moving, slot_bytes = replay(built, plan, sizes)
    return replace(
        plan,
        peak_bytes=shared + share * standing + moving,
        own_bytes=standing + moving,
        work=_work(built, plan, sizes),
        load_bytes=pinned,
        slot_bytes=slot_bytes,
        moving_bytes=moving,
    )


def replay(built: Built, plan: ShardPlan, sizes: Sizes) -> tuple[int, int, int, int]:
    """Bytes of places, of what stands of a trial, the most that comes and goes in a step; and of slots."""
    arena = Arena("plan", 1 << 62, lambda size: torch.empty(0, dtype=torch.uint8))
    layout, facts = plan.layout, built.facts
    streamed = frozenset(p.index for p in layout.pieces if plan.placement[p.index] != "pinned")
    need = need_of(
        [sum(aligned(sizes.compute_bytes[n]) for n in piece.parameters) for piece in layout.pieces],
        streamed,
        num_slots=plan.num_slots,
        ring_bytes=plan.ring_bytes,
        num_rings=plan.num_rings,
        flight_bytes=flight_bytes(layout, sizes, streamed, plan.num_in_flight, ring_bytes=plan.ring_bytes),
        boundary_bytes=boundary_bytes(facts, layout, micro_batches=built.trial.accumulate),
    )
    standing = sum(aligned(buffer.numel() * buffer.element_size()) for buffer in built.chain.buffers)
    for piece in layout.pieces:
        if plan.placement[piece.index] == "pinned":
            standing += aligned(sum(aligned(sizes.pinned_bytes[n]) for n in piece.parameters))
    arena.book("batch", 2 * built.trial.accumulate * facts.input_bytes)
    deferred = built.trial.deferred
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
