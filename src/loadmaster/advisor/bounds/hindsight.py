"""What a policy could have done had it known all arrivals: a stream's answers, improved one by one.

Starts from the answers of the best of some rules. Each try changes the answers of up to three arrivals at or
shortly before one that was blocked, replays the whole stream, and keeps the change unless more are blocked.
The result is an incumbent: least blocking lies between the bounds of `ramp` and it. Cost: a replay a try.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
# Kernels are typed by numba.

from collections.abc import Sequence
from typing import Any

import numpy as np

from loadmaster.advisor.environments.blocks import DEGREES
from loadmaster.advisor.environments.engine import (
    Kind,
    Outcome,
    Rule,
    _columns,
    _next_random,
    _replay,
    _tables,
    replay,
)
from loadmaster.advisor.environments.streams import Stream
from loadmaster.advisor.environments.world import World
from loadmaster.core.errors import InputError
from loadmaster.simulator.jit import kernel

_MOST_CHANGES = 3
_LOOK_BACK = 24  # arrivals before a blocked one whose answers may be in its way


def best_found(
    world: World, stream: Stream, rules: Sequence[Rule], *, tries: int = 20_000, seed: int = 0
) -> Outcome:
    """The outcome with least blocking that was found; never worse than that of any of the rules."""
    if not rules or tries < 0:
        raise InputError(f"a search in hindsight starts from rules and has 0 or more tries, not {tries}")
    outcomes = [replay(world, stream, rule, seed=seed) for rule in rules]
    best = min(outcomes, key=lambda o: o.num_blocked)
    chooses_block = not world.rules.leak
    rule = Rule(Kind.GIVEN_BLOCK if chooses_block else Kind.GIVEN)
    level = {degree: k for k, degree in enumerate(DEGREES)} | {0: -1}
    given = best.block.astype(np.int64) if chooses_block else np.array([level[int(d)] for d in best.degree])
    arguments: Any = (
        *_tables(world),
        *_columns(stream, world),
        rule.numbers,
        given,
        chooses_block,
        tries,
        seed,
    )
    found = replay(world, stream, rule, given=_climb(*arguments))
    return found if found.num_blocked <= best.num_blocked else best


@kernel
def _climb(jct, nominal, seq, needs, masks, first, flags, degrees, conflict, model, deadline, arrival,
           uniform, future, horizon, period, rule, given, chooses_block, tries, seed):  # fmt: skip
    num = len(model) - 1
    state = np.zeros(1, np.uint64)
    state[0] = np.uint64(seed)
    none = np.zeros(2, np.int64)
    cause = _replay(jct, nominal, seq, needs, masks, first, flags, degrees, conflict, model, deadline,
                    arrival, uniform, future, horizon, period, rule, given, none, 0)[0]  # fmt: skip
    blocked = np.sum((cause[:num] > 0) & (cause[:num] < 5))
    places = np.empty(_MOST_CHANGES, np.int64)
    before = np.empty(_MOST_CHANGES, np.int64)
    for _ in range(tries):
        target = int(_next_random(state) * num)
        for step in range(num):  # the next one that is blocked
            if 0 < cause[(target + step) % num] < 5:
                target = (target + step) % num
                break
        changes = 1 + int(_next_random(state) * _MOST_CHANGES)
        for c in range(changes):
            back = 0 if c == 0 else int(_next_random(state) * _LOOK_BACK)
            j = max(0, target - back)
            places[c], before[c] = j, given[j]
            given[j] = -1
            for _ in range(8):  # a degree that is in time, or a rejection
                k = int(_next_random(state) * (len(degrees) + 1)) - 1
                if k < 0:
                    break
                block = first[k]
                if chooses_block:
                    block += int(_next_random(state) * (first[k + 1] - first[k]))
                if jct[model[j], block] <= deadline[j]:
                    given[j] = block if chooses_block else k
                    break
        after = _replay(jct, nominal, seq, needs, masks, first, flags, degrees, conflict, model, deadline,
                        arrival, uniform, future, horizon, period, rule, given, none, 0)[0]  # fmt: skip
        now_blocked = np.sum((after[:num] > 0) & (after[:num] < 5))
        if now_blocked <= blocked:
            blocked, cause = now_blocked, after
        else:
            for c in range(changes - 1, -1, -1):
                given[places[c]] = before[c]
    return given
