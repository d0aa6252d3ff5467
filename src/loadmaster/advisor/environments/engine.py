"""Replays streams on a world: one compiled loop for table policies, for rollouts and for many streams at
once.

The state is a bit mask of free servers and the ends of running jobs. A `Rule` is a policy as numbers;
`policies/` makes them. Cost per decision: the running jobs, and the blocks of the degrees that are tried.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
# Kernels are typed by numba.

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadmaster.advisor.environments.blocks import DEGREES, NUM_SERVERS
from loadmaster.advisor.environments.streams import Stream
from loadmaster.advisor.environments.world import World
from loadmaster.core.errors import InputError
from loadmaster.simulator.jit import kernel

TOLERANCE = 1e-7  # a job ends when less than this of it remains


class Kind(IntEnum):
    """How a rule chooses."""

    PARA_MAX = 0
    PARA_MIN = 1
    RANDOM = 2
    CONSTANT = 3  # floor: the degree
    MEETS = (
        4  # smallest degree >= floor that meets the deadline; `go_on` to larger ones where no block is free
    )
    BEST_FIT = 5  # the degree of MEETS, on the block that destroys fewest free blocks of larger degrees
    PRICED = 6  # largest value less the price of the devices and of the blocks lost
    GIVEN = 7  # degrees are given, one for each arrival
    GIVEN_BLOCK = 8  # blocks are given


class Cause(IntEnum):
    """What became of an arrival."""

    ACCEPTED = 0
    REJECTED = 1
    NO_BLOCK = 2
    LATE = 3
    HORIZON = 4
    NOT_DECIDED = 5


@dataclass(frozen=True, slots=True)
class Rule:
    """A policy as numbers."""

    kind: Kind
    floor: int = 1
    go_on: bool = True
    device_price: float = 0.0  # value per device and time unit
    block_price: tuple[float, ...] = (0.0,) * len(DEGREES)  # value per free block of each degree that is lost
    rollout: tuple[int, int] = (0, 0)  # horizon in arrivals, sampled futures; none if 0

    @property
    def chooses_block(self) -> bool:
        """Whether it names a block rather than leaving it to the placer."""
        return self.kind in (Kind.BEST_FIT, Kind.PRICED, Kind.GIVEN_BLOCK)

    @property
    def numbers(self) -> NDArray[np.float64]:
        """For the kernel."""
        if self.floor not in DEGREES:
            raise InputError(f"degree {self.floor} has no block here; choose one of {DEGREES}")
        return np.array(
            [self.kind, DEGREES.index(self.floor), self.go_on, self.device_price, *self.block_price]
        )


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What became of every arrival of a stream."""

    cause: NDArray[np.int8]  # [J] values of Cause
    degree: NDArray[np.int8]  # [J] degree of those that ran, else 0
    block: NDArray[np.int16]  # [J] block they ran on, else -1
    start: NDArray[np.float64] = field(repr=False)  # [J] nan where they did not run
    num_free: NDArray[np.int8] = field(repr=False)  # [J] free servers when it was decided, -1 if never
    is_fragmented: NDArray[np.bool_] = field(repr=False)  # [J] no block of 4 was free though 4 servers were
    busy_time: float  # server time used until the last arrival
    utilisation: float  # of all server time between the first and the last arrival

    @property
    def num_blocked(self) -> int:
        """Arrivals that were decided and did not finish in time."""
        return int(np.isin(self.cause, [1, 2, 3, 4]).sum())

    @property
    def blocking(self) -> float:
        """Blocked over arrived, the undecided last arrival among them."""
        return self.num_blocked / len(self.cause)

    @property
    def fragmented(self) -> float:
        """Share of decisions at which no block of 4 was free though 4 servers were."""
        return float(self.is_fragmented.sum() / max(1, len(self.cause) - 1))

    def count(self, cause: Cause) -> int:
        """How many arrivals ended so."""
        return int((self.cause == cause).sum())


def replay(
    world: World, stream: Stream, rule: Rule, *, given: NDArray[np.int64] | None = None, seed: int = 0
) -> Outcome:
    """One stream under one rule."""
    _require_fitting(world, stream)
    _require_blocks_to_choose(world, [rule])
    rows = np.full(len(stream.model), -1, np.int64) if given is None else np.asarray(given, np.int64)
    arguments: Any = (
        *_tables(world),
        *_columns(stream, world),
        rule.numbers,
        rows,
        np.array(rule.rollout),
        seed,
    )
    cause, degree, block, start, num_free, is_fragmented, busy = _replay(*arguments)
    span = float(stream.arrival[-1] - stream.arrival[0])
    share = busy / (NUM_SERVERS * span) if span > 0 else 0.0
    return Outcome(cause, degree, block, start, num_free, is_fragmented, busy, share)


def replay_many(world: World, streams: Sequence[Stream], rules: Sequence[Rule]) -> NDArray[np.int64]:
    """Counts by cause, [streams, rules, causes]: the fast way for whole tables."""
    found = np.zeros((len(streams), len(rules), len(Cause)), np.int64)
    tables = _tables(world)
    numbers = np.array([rule.numbers for rule in rules])
    if any(rule.rollout[0] for rule in rules):
        raise InputError("replay_many supports only rules without a rollout; use replay")
    _require_blocks_to_choose(world, rules)
    for i, stream in enumerate(streams):
        _require_fitting(world, stream)
        arguments: Any = (*tables, *_columns(stream, world), numbers, found[i])
        _count_causes(*arguments)
    return found


def _require_fitting(world: World, stream: Stream) -> None:
    if stream.model.max(initial=0) >= len(world.models):
        raise InputError(
            f"the stream names model {stream.model.max()}, the world has {len(world.models)};"
            " draw the stream with num_models of the world"
        )


def _require_blocks_to_choose(world: World, rules: Sequence[Rule]) -> None:
    if world.rules.leak and any(rule.chooses_block for rule in rules):
        raise InputError(
            "blocks can be chosen only where jobs stay inside them; use a world without the leak (own, fixed)"
        )


def _tables(world: World) -> Any:
    b = world.blocks
    flags = np.array([world.rules.shape_mask, world.rules.horizon_blocks])
    return (
        world.jct,
        world.nominal,
        world.sequential,
        world.needs,
        b.mask,
        b.first,
        flags,
        np.array(DEGREES, np.int64),
        world.conflict,
    )


def _columns(stream: Stream, world: World) -> Any:
    deadline = stream.beta * world.sequential[stream.model]
    if not world.rules.tick_overshoot:
        deadline = deadline * (1 + 1e-9)
    return (
        stream.model,
        deadline,
        stream.arrival,
        stream.uniform,
        stream.future_beta,
        stream.horizon,
        stream.period,
    )


@kernel
def _first_fit(k, free, masks, first):
    for b in range(first[k], first[k + 1]):
        if masks[b] & ~free == 0:
            return b
    return -1


@kernel
def _footprint(m, k, free, needs, masks, first):
    """The servers a degree takes under the placer, and its block; no servers where a block is missing."""
    taken = np.uint64(0)
    block = -1
    for i in range(needs.shape[2]):
        if needs[m, k, i]:
            b = _first_fit(i, free, masks, first)
            if b < 0:
                return np.uint64(0), -1
            taken |= masks[b]
            if i == k:
                block = b
    return taken, block


@kernel
def _ones(x):
    x = x - ((x >> np.uint64(1)) & np.uint64(0x5555555555555555))
    x = (x & np.uint64(0x3333333333333333)) + ((x >> np.uint64(2)) & np.uint64(0x3333333333333333))
    x = (x + (x >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((x * np.uint64(0x0101010101010101)) >> np.uint64(56))


@kernel
def _is_offered(k, free, masks, first, flags, degrees):
    """Whether the mask offers a degree: enough servers (published), or a free block."""
    if flags[0]:
        return degrees[k] <= _ones(free)
    return _first_fit(k, free, masks, first) >= 0


@kernel
def _lost_blocks(b, free, masks, first, k):
    """Free blocks of degree k that placing on b would end."""
    lost = 0
    for other in range(first[k], first[k + 1]):
        if masks[other] & ~free == 0 and masks[other] & masks[b] != 0:
            lost += 1
    return lost


@kernel
def _best_block(m, k, limit, free, jct, masks, first):
    """Of the blocks in time, the one that ends fewest free blocks of larger degrees, the largest first."""
    best, best_cost = -1, 1e18
    for b in range(first[k], first[k + 1]):
        if masks[b] & ~free == 0 and jct[m, b] <= limit:
            cost = 0.0
            for larger in range(k + 1, len(first) - 1):
                cost += _lost_blocks(b, free, masks, first, larger) * 100.0 ** (larger - k - 1)
            if cost < best_cost:
                best, best_cost = b, cost
    return best


@kernel
def _choose(
    m, limit, free, u, rule, period, jct, nominal, seq, needs, masks, first, flags, degrees, beta_limit
):
    """Degree index and block of a rule; -1 rejects, block -1 leaves the block to the placer."""
    kind = int(rule[0])
    floor = int(rule[1])
    num = len(degrees)
    if kind == 3:
        return (floor if _is_offered(floor, free, masks, first, flags, degrees) else -1), -1
    if kind == 0 or kind == 1:
        largest = -1
        for k in range(num):
            if _is_offered(k, free, masks, first, flags, degrees):
                if kind == 1 and degrees[k] >= np.ceil(seq[m] / beta_limit):
                    return k, -1
                largest = k
        return largest, -1
    if kind == 2:
        count = 0
        for k in range(num):
            count += _is_offered(k, free, masks, first, flags, degrees)
        pick = int(u * count)
        for k in range(num):
            if _is_offered(k, free, masks, first, flags, degrees):
                if pick == 0:
                    return k, -1
                pick -= 1
        return -1, -1
    if kind == 4:
        for k in range(floor, num):
            if rule[2] == 0:  # the smallest whose nominal time meets, or nothing
                if nominal[m, k] <= limit:
                    return k, -1
                continue
            _, block = _footprint(m, k, free, needs, masks, first)
            if block >= 0 and jct[m, block] <= limit:
                return k, -1
        return -1, -1
    if kind == 5:
        for k in range(floor, num):
            block = _best_block(m, k, limit, free, jct, masks, first)
            if block >= 0:
                return k, block
            if rule[2] == 0 and nominal[m, k] <= limit:
                return -1, -1
        return -1, -1
    best_k, best_block, best_value = -1, -1, 0.0
    for k in range(num):
        for b in range(first[k], first[k + 1]):
            if masks[b] & ~free == 0 and jct[m, b] <= limit:
                held = np.ceil(jct[m, b] / period) * period if period > 0 else jct[m, b]
                value = 1.0 - rule[3] * degrees[k] * held
                for lost in range(num):
                    if rule[4 + lost] > 0:
                        value -= rule[4 + lost] * _lost_blocks(b, free, masks, first, lost)
                if value > best_value + 1e-12:
                    best_k, best_block, best_value = k, b, value
    return best_k, best_block


@kernel
def _release(now, free, ends, held, count):
    i = 0
    while i < count:
        if ends[i] <= now + TOLERANCE:
            free |= held[i]
            count -= 1
            ends[i] = ends[count]
            held[i] = held[count]
        else:
            i += 1
    return free, count


@kernel
def _next_random(state):
    """Splitmix64: a uniform number, and the generator's state moves on."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    z = state[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return np.float64(z >> np.uint64(11)) / 9007199254740992.0


@kernel
def _count_causes(jct, nominal, seq, needs, masks, first, flags, degrees, conflict, model, deadline, arrival,
                  uniform, future, horizon, period, rules, found):  # fmt: skip
    none = np.full(len(model), -1)
    for r in range(len(rules)):
        cause = _replay(jct, nominal, seq, needs, masks, first, flags, degrees, conflict, model, deadline,
                        arrival, uniform, future, horizon, period, rules[r], none, np.zeros(2, np.int64),
                        0)[0]  # fmt: skip
        for j in range(len(cause)):
            found[r, cause[j]] += 1


@kernel
def _replay(jct, nominal, seq, needs, masks, first, flags, degrees, conflict, model, deadline, arrival,
            uniform, future, horizon, period, rule, given, rollout, seed):  # fmt: skip
    num = len(model)
    cause = np.full(num, 5, np.int8)
    degree = np.zeros(num, np.int8)
    blocks = np.full(num, -1, np.int16)
    start = np.full(num, np.nan)
    num_free = np.full(num, -1, np.int8)
    fragmented = np.zeros(num, np.bool_)
    busy = 0.0
    ends = np.empty(NUM_SERVERS)
    held = np.empty(NUM_SERVERS, np.uint64)
    count = 0
    free = np.uint64(0xFFFFFFFF)
    random = np.zeros(1, np.uint64)
    random[0] = np.uint64(seed)
    four = 2
    for j in range(num - 1):
        now = arrival[j]
        free, count = _release(now, free, ends, held, count)
        m, limit = model[j], deadline[j]
        num_free[j] = _ones(free)
        fragmented[j] = num_free[j] >= degrees[four] and _first_fit(four, free, masks, first) < 0
        block = -1
        if rule[0] == 7:
            k = given[j]
        elif rule[0] == 8:
            block = given[j]
            k = -1
            while block >= first[k + 1]:
                k += 1
            if block >= 0 and masks[block] & ~free != 0:
                cause[j] = 2
                continue
        elif rollout[0] > 0:
            k, block = _roll_out(j, now, free, ends, held, count, jct, nominal, seq, needs, masks, first,
                                 flags, degrees, model, deadline, uniform, future, horizon, period, rule,
                                 rollout, random)  # fmt: skip
        else:
            k, block = _choose(m, limit, free, uniform[j], rule, period, jct, nominal, seq, needs, masks,
                               first, flags, degrees, limit)  # fmt: skip
        if k < 0:
            cause[j] = 1
            continue
        if block >= 0:
            taken = masks[block]
        else:
            taken, block = _footprint(m, k, free, needs, masks, first)
        if block < 0:
            cause[j] = 2
            continue
        time = jct[m, block]
        if time > limit:
            cause[j] = 3
            continue
        free &= ~taken
        ends[count] = now + time
        held[count] = taken
        count += 1
        cause[j] = 4 if flags[1] and now + time > horizon + TOLERANCE else 0
        degree[j] = degrees[k]
        blocks[j] = block
        start[j] = now
        busy += max(0.0, min(time, arrival[num - 1] - now)) * _ones(taken)
    return cause, degree, blocks, start, num_free, fragmented, busy


@kernel
def _roll_out(j, now, free, ends, held, count, jct, nominal, seq, needs, masks, first, flags, degrees,
              model, deadline, uniform, future, horizon, period, rule, rollout, random):  # fmt: skip
    """The action with most jobs accepted over sampled futures under the base rule; ties keep the base action.

    Futures are drawn once for a decision and shared by all actions. Only distributions are known, not
    arrivals.
    """
    horizon_jobs, num_futures = rollout[0], rollout[1]
    num_models = len(seq)
    m, limit = model[j], deadline[j]
    base_k, base_block = _choose(m, limit, free, uniform[j], rule, period, jct, nominal, seq, needs, masks,
                                 first, flags, degrees, limit)  # fmt: skip
    own = rule[0] >= 5
    begin = random[0]
    best_k, best_block, best_value = -1, -1, -1.0
    end2 = np.empty(NUM_SERVERS)
    held2 = np.empty(NUM_SERVERS, np.uint64)
    for step in range(-1, len(degrees) + 1):
        if step == -1:  # the base action first, so that ties keep it
            k, block = base_k, base_block
        elif step == len(degrees):
            k, block = -1, -1
        else:
            k, block = step, -1
            if own:
                block = _best_block(m, k, limit, free, jct, masks, first)
        if step >= 0 and k == base_k:
            continue
        taken = np.uint64(0)
        gain = 0.0
        time = 0.0
        if k >= 0:
            if block >= 0:
                taken = masks[block]
            elif not own:
                taken, block = _footprint(m, k, free, needs, masks, first)
            if block < 0 or jct[m, block] > limit:
                if step >= 0:
                    continue
                taken = np.uint64(0)
            else:
                time = jct[m, block]
                gain = 0.0 if flags[1] and now + time > horizon + TOLERANCE else 1.0
        random[0] = begin
        value = gain * num_futures
        for _ in range(num_futures):
            free2 = free & ~taken
            count2 = count
            for i in range(count):
                end2[i] = ends[i]
                held2[i] = held[i]
            if taken != 0:
                end2[count2] = now + time
                held2[count2] = taken
                count2 += 1
            then = now
            for _ in range(horizon_jobs):
                draw = _next_random(random)
                m2 = min(int(draw * num_models), num_models - 1)
                limit2 = future[min(int(_next_random(random) * len(future)), len(future) - 1)] * seq[m2]
                if period > 0:
                    then += period
                else:
                    then -= np.log(1.0 - _next_random(random)) * 1000.0
                if then >= horizon:
                    break
                free2, count2 = _release(then, free2, end2, held2, count2)
                k2, b2 = _choose(m2, limit2, free2, draw, rule, period, jct, nominal, seq, needs, masks,
                                 first, flags, degrees, limit2)  # fmt: skip
                if k2 < 0:
                    continue
                if b2 >= 0:
                    t2 = masks[b2]
                else:
                    t2, b2 = _footprint(m2, k2, free2, needs, masks, first)
                if b2 < 0 or jct[m2, b2] > limit2:
                    continue
                free2 &= ~t2
                end2[count2] = then + jct[m2, b2]
                held2[count2] = t2
                count2 += 1
                value += 0.0 if flags[1] and end2[count2 - 1] > horizon + TOLERANCE else 1.0
        if value > best_value:
            best_k, best_block, best_value = k, block, value
    # where a future ended early the generator stands elsewhere: set it on by a fixed stride instead
    random[0] = begin + np.uint64(0x9E3779B97F4A7C15) * np.uint64(3 * horizon_jobs * num_futures + 1)
    return best_k, best_block if own else -1
