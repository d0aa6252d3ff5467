"""Where to cut, what to pin, who steps: the plan of a trial under a byte cap, proved by replaying it.

Cuts: for each number of shards the ones whose largest shard is least; of these the number with the least
predicted time. What room is left holds pinned shards, from the first: their update is done when the
next step wants them. The rest streams; which of it is stepped on the host comes from the rates.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from loadmaster.core.errors import DeviceMemoryError
from loadmaster.core.units import format_bytes
from loadmaster.shards.model.built_model import BuiltModel
from loadmaster.shards.model.torch_containers import find_unopened
from loadmaster.shards.plan.layout import Layout, Placement, lay_out
from loadmaster.shards.plan.rates import Rates
from loadmaster.shards.plan.shard_plan import IN_FLIGHT, ShardPlan, measure_plan, ring_bytes_of
from loadmaster.shards.plan.sizes import Sizes, measure_sizes
from loadmaster.shards.plan.step_forecast import forecast_step_s
from loadmaster.shards.plan.step_limits import Limit, Work, find_step_limit
from loadmaster.shards.plan.unit_order import least_slots
from loadmaster.shards.spec.trial import COMPUTE_DTYPE

_LIBRARIES_BYTES = 128 << 20  # workspaces of matrix products, two threads on two streams, and of attention
_SCATTERED = 0.04  # of the cap: holes, and blocks rounded up to 2 MiB
_ISSUED = 1.05  # a measured step to its forecast at the rates of its trace: 1.03 (1.64 B, 6.5 GiB, one H200)
_PLACES_TRIED = 8
_EXCHANGES = 40
_NEAR_ENOUGH = 1.02  # times the limit: no forecast is better than that
_STEPPED: tuple[Placement, ...] = ("host", "device")
_MOST_TRIED = 6  # cuts, those with the least peaks first


def make_plan(
    built: BuiltModel,
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
    sizes = measure_sizes(built)
    room = cap_bytes - reserve_bytes(built, cap_bytes) - more_reserve_bytes
    if built.chain.by_call:
        layouts = _list_call_layouts(built)
    else:
        candidates = [list(cuts)] if cuts is not None else _list_cuts(built, sizes)
        layouts = [_lay_out_built(built, starts) for starts in candidates]
    # Rings for state take room that updates on the host do not: where there is none, the host takes all.
    wishes = ("auto", "host") if optimizer_placement == "auto" else (optimizer_placement,)
    for wish in wishes:
        bases = [_plan_base(built, layout, sizes, wish, num_slots, room, share) for layout in layouts]
        fitting = sorted(
            (base for base in bases if base.peak_bytes <= room), key=lambda base: base.peak_bytes
        )
        if fitting:
            break
    if not fitting:
        _refuse_trial(built, sizes, room, min(base.peak_bytes for base in bases))
    plans = []
    for base in fitting if built.chain.by_call else fitting[:_MOST_TRIED]:
        pinned = _pin_pieces(built, base, sizes, room, share)
        plans.append(_place_updates(built, pinned, sizes, rates, optimizer_placement, share))
    found = min(plans, key=lambda plan: (plan.limit.predicted_s, plan.peak_bytes))
    clock = _Forecaster(built, sizes, rates, share)
    if optimizer_placement != "auto":
        return clock.add_forecast(found)
    return _exchange_placements(_refine_split(found, clock, room), clock, room)


def _lay_out_built(built: BuiltModel, starts: Sequence[int]) -> Layout:
    return lay_out(
        built.chain,
        starts,
        compute_dtype=COMPUTE_DTYPE[built.trial.precision],
        castable=built.facts.castable,
    )


def _list_call_layouts(built: BuiltModel) -> list[Layout]:
    """By call, the shards are found; open is which of them run twice: all but the last ones, or fewer."""
    calls = built.facts.calls
    assert calls is not None, "a chain by call has its facts"
    bare = replace(_lay_out_built(built, ()), calls=calls.order)
    order = list(dict.fromkeys(shard for shard in calls.order if calls.may_recompute[shard]))
    found: list[Layout] = []
    for kept in sorted({len(order) * eighths // 8 for eighths in range(9)} | {min(1, len(order))}):
        twice = set(order[: len(order) - kept])
        layout = replace(bare, recompute=tuple(shard in twice for shard in range(bare.num_shards)))
        found.append(layout)
    return found


@dataclass
class _Forecaster:
    """Forecasts of one trial's plans."""

    built: BuiltModel
    sizes: Sizes
    rates: Rates
    share: int

    def add_forecast(self, plan: ShardPlan) -> ShardPlan:
        """The plan with its predicted step."""
        taken = forecast_step_s(self.built, plan, self.sizes, self.rates, num_trials=min(self.share, 2))
        return replace(plan, step_s=_ISSUED * max(taken, plan.limit.seconds))

    def split(self, plan: ShardPlan, count: int, num_rings: int) -> ShardPlan:
        """So many of what is not pinned stepped on the device, spread evenly."""
        large = _find_too_large(plan.layout, self.sizes)
        free = [p.index for p in plan.layout.pieces if plan.placement[p.index] != "pinned"]
        free = [index for index in free if index not in large]
        placement = list(plan.placement)
        for order, index in enumerate(free):
            chosen = (order + 1) * count // len(free) > order * count // len(free)
            placement[index] = "device" if chosen else "host"
        return self.replace_placement(replace(plan, num_rings=num_rings), placement)

    def replace_placement(self, plan: ShardPlan, placement: Sequence[Placement]) -> ShardPlan:
        """The plan with another placement."""
        ring = ring_bytes_of(plan.layout, self.sizes, placement)
        tried = replace(plan, placement=tuple(placement), ring_bytes=ring)
        tried = measure_plan(self.built, tried, self.sizes, self.share)
        return self.add_forecast(replace(tried, limit=find_step_limit(tried.work, self.rates)))


def _refine_split(plan: ShardPlan, clock: _Forecaster, room: int) -> ShardPlan:
    """Of even splits, with as many slots and rings or one more of each, the one with the least forecast.

    One more slot lets weights come before state that would hold them up on the bus.
    """
    best = clock.add_forecast(plan)
    large = _find_too_large(plan.layout, clock.sizes)
    free = [p.index for p in plan.layout.pieces if plan.placement[p.index] != "pinned"]
    most = len([index for index in free if index not in large])
    more = (0, 1) if clock.share == 1 else (0,)  # trials in turn fill each other's gaps
    for more_slots, more_rings in itertools.product(more, more):
        wider = replace(plan, num_slots=plan.num_slots + more_slots, depth=plan.depth + more_slots)
        num_rings = plan.num_rings + more_rings
        wide = max(1, most // _PLACES_TRIED)
        counts = range(0, most + 1, wide) if most else ()
        tried = {count: clock.split(wider, count, num_rings) for count in counts}
        fitting = {count: each for count, each in tried.items() if each.peak_bytes <= room}
        if not fitting:
            continue
        near = min(fitting, key=lambda count: fitting[count].step_s)
        for count in range(max(0, near - wide + 1), min(most, near + wide - 1) + 1):
            each = tried.get(count) or clock.split(wider, count, num_rings)
            if each.peak_bytes <= room and each.step_s < best.step_s:
                best = each
    return best


def _exchange_placements(plan: ShardPlan, clock: _Forecaster, room: int) -> ShardPlan:
    """The plan after some exchanges of host and device that shorten its forecast; the same every time.

    An even split keeps bus and host alike busy; where weights come late for all that, the forecast knows.
    """
    kept = _find_too_large(plan.layout, clock.sizes)
    at = {
        where: [p for p, w in enumerate(plan.placement) if w == where and p not in kept] for where in _STEPPED
    }
    if clock.share > 1 or not all(at.values()):
        return plan
    pairs = [(host, device) for host in at["host"] for device in at["device"]]
    for host, device in random.Random(0).sample(pairs, min(_EXCHANGES, len(pairs))):
        if plan.step_s <= _NEAR_ENOUGH * _ISSUED * plan.limit.seconds:
            break
        placement = list(plan.placement)
        if placement[host] == placement[device]:  # by exchanges before this one
            continue
        placement[host], placement[device] = placement[device], placement[host]
        tried = clock.replace_placement(plan, placement)
        if tried.peak_bytes <= room and tried.step_s < plan.step_s:
            plan = tried
    return plan


def _list_cuts(built: BuiltModel, sizes: Sizes) -> list[list[int]]:
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


def reserve_bytes(built: BuiltModel, cap_bytes: int) -> int:
    """What is kept free on a GPU: workspaces of its libraries, and what its allocator scatters."""
    return 0 if built.device.type == "cpu" else int(_LIBRARIES_BYTES + _SCATTERED * cap_bytes)


def _plan_base(
    built: BuiltModel, layout: Layout, sizes: Sizes, wish: str, num_slots: int, room: int, share: int
) -> ShardPlan:
    """Nothing pinned; as many slots as fit, up to the number asked for."""
    large = _find_too_large(layout, sizes) if wish in ("auto", "hybrid") else frozenset()
    everything: tuple[Placement, ...] = tuple(
        "host" if wish == "host" or piece.index in large else "device" for piece in layout.pieces
    )
    streamed = frozenset(range(len(layout.pieces)))
    fewest = least_slots(layout, streamed)
    ring = ring_bytes_of(layout, sizes, everything)
    plan: ShardPlan | None = None
    most = max(num_slots, fewest)
    ways = [(slots, 2, IN_FLIGHT) for slots in range(most, fewest - 1, -1)]
    for slots, num_rings, num_in_flight in [*ways, (fewest, 2, 1), (fewest, 1, 1)]:
        depth = max(0, slots - fewest)
        bare = ShardPlan(layout, everything, slots, depth, ring, 0, 0, _NO_WORK, _NO_LIMIT, 0)
        bare = replace(bare, num_rings=num_rings, num_in_flight=num_in_flight)
        plan = measure_plan(built, bare, sizes, share)
        if plan.peak_bytes <= room:
            break
    assert plan is not None
    return plan


_NO_WORK = Work(flops=0, up_bytes=0, down_bytes=0, host_stepped=0, host_bytes=0)
_NO_LIMIT = Limit(0.0, "", {})


def _find_too_large(layout: Layout, sizes: Sizes) -> frozenset[int]:
    """Pieces with one parameter so large that a ring for it would take the room of several others."""
    largest = [max((sizes.update_bytes[n] for n in piece.parameters), default=0) for piece in layout.pieces]
    usual = sorted(largest)[len(largest) // 2] if largest else 0
    return frozenset(piece.index for piece in layout.pieces if largest[piece.index] > 2 * usual)


def _pin_pieces(built: BuiltModel, plan: ShardPlan, sizes: Sizes, room: int, share: int) -> ShardPlan:
    """Pin pieces from the first shard on, those that fit."""
    for piece in sorted(plan.layout.pieces, key=lambda each: each.shards[0]):
        placement = list(plan.placement)
        placement[piece.index] = "pinned"
        tried = measure_plan(built, replace(plan, placement=tuple(placement)), sizes, share)
        if tried.peak_bytes <= room:
            plan = tried
    return plan


def _place_updates(
    built: BuiltModel, plan: ShardPlan, sizes: Sizes, rates: Rates, wish: str, share: int
) -> ShardPlan:
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
        ring = ring_bytes_of(plan.layout, sizes, placement)
        each = measure_plan(built, replace(plan, placement=tuple(placement), ring_bytes=ring), sizes, share)
        tried.append(replace(each, limit=find_step_limit(each.work, rates)))
    return min(tried, key=lambda each: each.limit.predicted_s)


def _format_need(least: int, room: int) -> str:
    """What is needed and what there is, to the byte where they read alike."""
    needed, there = format_bytes(least), format_bytes(room)
    if needed == there:
        needed, there = f"{least:,} bytes", f"{room:,}"
    return f"{needed} of a cap of {there}"


def _refuse_trial(built: BuiltModel, sizes: Sizes, room: int, least: int) -> None:
    facts = built.facts
    weights = [sum(sizes.compute_bytes[s.tensor] for s in slots) for slots in built.chain.parameter_slots]
    block = max(range(len(weights)), key=lambda each: weights[each] + facts.saved_bytes[each])
    raise DeviceMemoryError(
        f"trial {built.trial.name!r} needs {_format_need(least, room)} however"
        f" it is cut; its largest block {built.chain.block_name[block]} has"
        f" {format_bytes(weights[block])} of weights and keeps {format_bytes(facts.saved_bytes[block])} of"
        " activations; raise memory_cap, take a smaller batch (with accumulate) or give smaller blocks"
        f"{_suggest_layers(built, block)}"
    )


def _suggest_layers(built: BuiltModel, block: int) -> str:
    """What to do about a container of torch.nn that a block holds unopened."""
    whole = find_unopened([built.chain.blocks[block]])
    if whole is None:
        return ""
    name = next((name for name, module in built.chain.model.named_modules() if module is whole), "")
    return f": {name or 'in it'} ({type(whole).__name__}) is not cut, give its layers as Trial(blocks=...)"
