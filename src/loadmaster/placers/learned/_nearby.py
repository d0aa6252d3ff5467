"""Plans near to what a network proposes: keys with noise sliced again, and stretches of the order moved.

Every plan that is asked about is an evaluation, refused ones included. What is no worse is kept. For a step
the neighbours of the best plan are its order with noise, and its devices with a stretch or a group on another
device; for throughput its order with noise, or shuffled inside of the stages, cut again, and where
the split is free a stretch of the busiest device given away.
"""

from dataclasses import dataclass, replace

import numpy as np

from loadmaster.core.arrays import Floats, Ints, Longs
from loadmaster.core.plan import Plan, plan_of
from loadmaster.core.problem import FREE, Problem, Split
from loadmaster.core.run import Score
from loadmaster.placers.answer import Meter, Tally
from loadmaster.placers.exact._maxload.packed import loads_s
from loadmaster.placers.exact.linear_dp import LinearDp
from loadmaster.placers.learned._groups import Groups
from loadmaster.placers.learned._proposals import Opinion, Proposal, first_plans
from loadmaster.placers.learned._searcher import is_over
from loadmaster.placers.learned._slicers import LoadSlicer, Sliced, Slicer, StepSlicer
from loadmaster.placers.learned._stages import device_ranks

# up to these shares of the moves of a step
_FREE_DEVICES, _ONE_GROUP, _STRETCH, _FREE_STRETCH = 0.25, 0.4, 0.6, 0.9
_SCREENED = 4  # neighbours made for each that is evaluated
_OP_BY_OP, _MOVED_STRETCH = 0.25, 0.5  # how often ops move out of their groups, and many at once
_LEAST_ROOM = 0.5  # of what a device has, while no plan fits
_AHEAD, _WAITING = 3, 0.25  # first plans evaluated at once, and how often one of the others is
_CUT_AGAIN, _INSIDE = 0.1, 0.5  # of free splits: cut another order; and half of those inside of stages
_SINGLE, _TRADED = 0.45, 0.65  # up to these shares of the other moves of free splits
_WIDEST = 0.25  # of the order
_HALVINGS = 6.0


@dataclass(slots=True)
class _Best:
    """Where the search stands."""

    key: Floats  # [N] places in the order, from 0 to 1
    row: Ints  # [U] devices
    time_s: float


def search_nearby(
    problem: Problem,
    groups: Groups,
    tally: Tally,
    slicer: Slicer,
    opinion: Opinion,
    noise: float,
    orders: int = 16,
) -> None:
    """The network's plans, the usual ones, then their neighbours until the budget ends."""
    bound_s = tally.run.bound.seconds
    first = first_plans(slicer, opinion, bound_s, orders=orders, noise=noise)
    if not first:
        _fall_back(problem, tally)
        return
    if isinstance(slicer, StepSlicer):
        _search_step(groups, tally, slicer, first, noise)
    else:
        _search_throughput(problem, groups, tally, slicer, opinion, first, noise)
    if tally.best_score.overflow_bytes > 0 and not tally.spent:
        _fall_back(problem, tally)


def _fall_back(problem: Problem, tally: Tally) -> None:
    """Where nothing fits, who is best at that: a chain made with less room, else the plan repaired."""
    if problem.objective == "throughput":
        meter = Meter(tally.run)
        meter.charge(tally.scored)
        run = replace(meter.member(), repair=tally.run.repair and problem.split == Split.FREE)
        tally.adopt(LinearDp()(problem, run))
        tally.scored = max(tally.scored, meter.count)
        return
    tally.mend()


def _places(key: Floats) -> Floats:
    """Keys as places in the order from 0 to 1."""
    place = np.empty(len(key))
    place[np.lexsort((np.arange(len(key)), key))] = np.arange(len(key))
    return place / max(len(key) - 1, 1)


def _search_step(
    groups: Groups, tally: Tally, slicer: StepSlicer, first: list[Proposal], noise: float
) -> None:
    """Of a few neighbours the one that its own list pass reckons fastest is evaluated."""
    rng, waiting = tally.run.rng, list(first)
    best, best_plan = _Best(first[0].key, slicer.row(first[0].sliced.plan), np.inf), first[0].sliced.plan
    seen: set[bytes] = set()
    ordered = due = True  # not ordered: whoever evaluates has an order of its own, as torch has
    while not is_over(tally):
        in_turn = waiting and (len(first) - len(waiting) < _AHEAD or rng.random() < _WAITING)
        if due and ordered and len(seen) >= _AHEAD:
            plan, due = plan_of(best_plan.device), False  # first come first served
        elif in_turn:
            plan = waiting.pop(0).sliced.plan
        elif slicer.grouped is not None and rng.random() < _OP_BY_OP:
            plan = _move_ops(groups, best_plan, rng)
        else:
            room = 1.0 if tally.best_score.overflow_bytes == 0 else float(rng.uniform(_LEAST_ROOM, 1.0))
            tried = [_neighbour(slicer, best, rng, noise, room) for _ in range(_SCREENED)]
            fresh = [one for one in tried if _name(one.plan, ordered) not in seen] or tried[:1]
            plan = min(fresh, key=lambda one: one.rank).plan
        seen.add(_name(plan, ordered))
        time_s = groups.penalised_s(tally.offer(plan))
        tally.run.progress(f"{tally.scored:,} plans tried", 0.0)
        if ordered and len(seen) == 1:
            ordered = not (np.diff(tally.last.priority) == 1).all() or (np.diff(plan.priority) == 1).all()
            seen = {_name(plan, ordered)}
        if time_s <= best.time_s:
            started = slicer.earliest(tally.last.priority.astype(np.float64))
            best, best_plan = _Best(_places(started), slicer.row(plan), time_s), plan


def _neighbour(
    slicer: StepSlicer, best: _Best, rng: np.random.Generator, noise: float, room: float
) -> Sliced:
    """The best plan's order with noise, or its devices with a stretch of the order on another or on any."""
    groups, key = slicer.groups, best.key
    wanted: Ints | None = best.row
    kind, spread = rng.random(), noise * 2.0 ** (-4.0 * rng.random())
    if kind < _FREE_DEVICES:
        key, wanted = _moved(key, rng, spread), None
    elif kind < _ONE_GROUP:
        wanted = best.row.copy()
        wanted[int(rng.integers(groups.num))] = int(rng.integers(groups.num_devices))
    elif kind < _STRETCH:
        order = np.argsort(_first_places(groups, key), kind="stable")
        wanted = best.row.copy()
        wanted[_draw_stretch(order, rng)] = int(rng.integers(groups.num_devices))
    elif kind < _FREE_STRETCH:
        order = np.argsort(_first_places(groups, key), kind="stable")
        wanted = best.row.copy()
        wanted[_draw_stretch(order, rng)] = FREE
        key = _moved(key, rng, spread)
    else:
        key = _moved(key, rng, spread)
    sliced = slicer.slice(key, wanted, room=room)
    assert sliced is not None  # list scheduling always ends
    return sliced


def _move_ops(groups: Groups, plan: Plan, rng: np.random.Generator) -> Plan:
    """The plan with one unit of ops, or a stretch of them, on another device: what no grouped plan says."""
    row, to = groups.row(plan), int(rng.integers(groups.num_devices))
    moved: Ints | Longs = np.array([int(rng.integers(groups.num))])
    if rng.random() < _MOVED_STRETCH:
        started = plan.priority.astype(np.float64)
        moved = _draw_stretch(np.argsort(_first_places(groups, started), kind="stable"), rng)
    row[moved] = np.where(groups.cargo.fits[moved, to], to, row[moved])
    return replace(groups.plan(row), priority=plan.priority)


def _name(plan: Plan, ordered: bool) -> bytes:
    """What tells plans apart: devices, and the order where it counts."""
    return plan.device.tobytes() + (plan.priority.tobytes() if ordered else b"")


def _first_places(groups: Groups, key: Floats) -> Floats:
    """[U] place of the first op of each group."""
    first = np.full(groups.num, np.inf)
    np.minimum.at(first, groups.cargo.of_op, key)
    return first


def _moved(key: Floats, rng: np.random.Generator, spread: float) -> Floats:
    """Keys with noise, of all nodes or of some."""
    share = 1.0 if rng.random() < 0.5 else 0.2
    return np.asarray(key + spread * rng.normal(size=len(key)) * (rng.random(len(key)) < share))


def _draw_stretch(order: "Ints | Longs", rng: np.random.Generator) -> "Ints | Longs":
    width = max(1, int(_WIDEST * len(order) * 2.0 ** (-_HALVINGS * rng.random())))
    begin = int(rng.integers(max(1, len(order) - width + 1)))
    return order[begin : begin + width]


def _offer(groups: Groups, tally: Tally, sliced: Sliced) -> float:
    score: Score = tally.offer(sliced.plan)
    tally.run.progress(f"{tally.scored:,} plans tried", 0.0)
    return groups.penalised_s(score)


def _search_throughput(
    problem: Problem,
    groups: Groups,
    tally: Tally,
    slicer: LoadSlicer,
    opinion: Opinion,
    first: list[Proposal],
    noise: float,
) -> None:
    rng, chain = tally.run.rng, slicer.chain
    of_unit, num = chain.class_of_unit, chain.model.num_classes
    bound_s = tally.run.bound.seconds
    begin = first[0].sliced
    best = _Best(_places(opinion.key), groups.row(begin.plan), _offer(groups, tally, begin))
    free = problem.split == Split.FREE
    while not is_over(tally):
        if free and rng.random() >= _CUT_AGAIN:
            device = np.zeros(num, dtype=np.int64)
            device[of_unit] = best.row
            given = _give_away(slicer, device, _order_of(slicer, device, best.key), rng)[of_unit]
            may = groups.cargo.fits[np.arange(groups.num), given]
            row: Ints = np.where(may, given, best.row).astype(np.int32)
            time_s = _offer(groups, tally, Sliced(groups.plan(row), 0.0))
            if time_s <= best.time_s:
                best = _Best(best.key, row, time_s)
            continue
        if rng.random() < _INSIDE:
            device = np.zeros(num, dtype=np.int64)
            device[of_unit] = best.row
            tried = _stage_ranks(slicer, device) + _places(_moved(best.key, rng, noise))
        else:
            tried = _moved(best.key, rng, noise)
        sliced = slicer.slice(tried, bound_s)
        if sliced is None:
            continue
        time_s = _offer(groups, tally, sliced)
        if time_s <= best.time_s:
            best = _Best(_places(tried), groups.row(sliced.plan), time_s)


def _stage_ranks(slicer: LoadSlicer, device: Longs) -> Floats:
    """[C] the stage of each class, as whole numbers two apart."""
    model = slicer.chain.model
    return np.asarray(2.0 * device_ranks(model.source, model.target, device)[device])


def _order_of(slicer: LoadSlicer, device: Longs, key: Floats) -> Ints:
    return slicer.order(_stage_ranks(slicer, device) + key)


def _give_away(slicer: LoadSlicer, device: Longs, order: Ints, rng: np.random.Generator) -> Longs:
    """The devices with some work of the busiest one given away: a class, a stretch, or one class for another.

    Loads of the best plan are known since it was evaluated; only moves that may relieve its busiest device
    are proposed.
    """
    model = slicer.chain.model
    load, moved = loads_s(model, device.astype(np.int32)), device.copy()
    busy = int(load.argmax())
    own = order[device[order] == busy]
    to = _draw_idle(load, busy, rng)
    spare_s = max(float(load[busy] - load[to]), 0.0)
    here, there = (model.seconds[:, slicer.kind[d]] for d in (busy, to))
    kind = rng.random()
    if kind < _SINGLE:
        small = own[there[own] <= spare_s]
        moved[_draw_one(small if len(small) else own, rng)] = to
        return moved
    if kind < _TRADED:
        given = _draw_one(own, rng)
        theirs = np.flatnonzero((device == to) & (there < there[given]))
        moved[given] = to
        if len(theirs):
            moved[_draw_one(theirs, rng)] = busy
        return moved
    begin = 0 if rng.random() < 0.3 else int(rng.integers(len(own)))
    if rng.random() < 0.3:
        own, begin = own[::-1], 0
    done_s = np.cumsum(here[own[begin:]])
    width = 1 + int(np.searchsorted(done_s, spare_s * rng.random()))
    moved[own[begin : begin + width]] = to
    return moved


def _draw_idle(load: Floats, busy: int, rng: np.random.Generator) -> int:
    """A device other than the busiest; the less it has to do, the likelier."""
    others = np.flatnonzero(np.arange(len(load)) != busy)
    if not len(others):
        return busy
    spare = (load[busy] - load[others]) / max(float(load[busy]), 1e-300) + 0.05
    return int(others[int(np.searchsorted(np.cumsum(spare), rng.random() * spare.sum()))])


def _draw_one(among: "Ints | Longs", rng: np.random.Generator) -> int:
    return int(among[int(rng.integers(len(among)))])
