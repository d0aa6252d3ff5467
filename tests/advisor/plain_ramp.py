"""A second simulator of the published cluster, slow and plain: sets of (group, rack, server), policies as
called.

Written from the rules apart from the engine: its own blocks, its own occupancy, `Policy.__call__` instead
of rules.
"""

import math
from itertools import product

import numpy as np

from loadmaster.advisor.environments.blocks import DEGREES
from loadmaster.advisor.environments.streams import Stream
from loadmaster.advisor.environments.world import World
from loadmaster.advisor.jobs.curve import ScalingCurve
from loadmaster.advisor.jobs.job import Job
from loadmaster.advisor.jobs.state import Block, ClusterState, Layout
from loadmaster.advisor.policies.registry import Policy, Run

Server = tuple[int, int, int]
ALL: list[Server] = list(product(range(4), range(4), range(2)))


def plain_blocks(k: int) -> list[tuple[str, list[Server]]]:
    """Shapes and their blocks, as section 2.3 of the rules says it."""
    shapes: list[tuple[str, tuple[int, int, int] | None]] = []
    for i in range(1, k + 1):
        if k % i:
            continue
        p = k // i
        if math.isqrt(p) ** 2 == p:
            shapes.append(("square", (math.isqrt(p), math.isqrt(p), i)))
        if p <= 4 and i <= 2:
            shapes += [("row", (p, 1, i)), ("row", (p, i, 1))]
    shapes += [("diagonal", None), ("line", (k, 1, 1))]
    found: list[tuple[str, list[Server]]] = []
    seen: set[frozenset[Server]] = set()
    for name, box in shapes:
        for origin in ALL:
            if box is None:
                members = [(origin[0] + j, origin[1] + j, origin[2]) for j in range(k)]
            else:
                members = [tuple(np.add(origin, o)) for o in product(*map(range, box))]  # type: ignore[misc]
            if all(m in ALL for m in members) and frozenset(members) not in seen:
                seen.add(frozenset(members))
                found.append((f"{name}{box}", [tuple(int(x) for x in m) for m in members]))  # type: ignore[misc]
    return found


BLOCKS = {k: plain_blocks(k) for k in DEGREES}


class _Given(np.random.Generator):
    """A generator that gives the stream's own draws."""

    def __init__(self, draw: float) -> None:
        super().__init__(np.random.PCG64(0))
        self.draw = draw

    def random(self, *_: object, **__: object) -> float:  # type: ignore[override]
        return self.draw


def layout(world: World) -> Layout:
    return Layout(
        name=tuple(map(str, ALL)),
        host=np.zeros(32, np.int64),
        kind=np.zeros(32, np.int64),
        kinds=("",),
        blocks={
            k: tuple(Block(tuple(ALL.index(m) for m in members), "", name) for name, members in blocks)
            for k, blocks in BLOCKS.items()
        },
        mask_by_count=world.rules.shape_mask,
    )


def curve(world: World, model: int) -> ScalingCurve:
    seconds = {}
    for i, k in enumerate(DEGREES):
        for j, (name, _) in enumerate(BLOCKS[k]):
            seconds.setdefault(("", k, name), float(world.jct[model, world.blocks.first[i] + j]))
    return ScalingCurve(seconds)


def play(
    world: World, stream: Stream, policy: Policy, num_jobs: int
) -> list[tuple[str, int, frozenset[int]]]:
    """What became of each of the first jobs: word, degree, servers."""
    where = layout(world)
    curves = [curve(world, m) for m in range(len(world.models))]
    needs = [
        {k: tuple(DEGREES[c] for c in np.flatnonzero(world.needs[m, i])) for i, k in enumerate(DEGREES)}
        for m in range(len(world.models))
    ]
    running: list[tuple[float, frozenset[int]]] = []
    told = []
    for j in range(num_jobs):
        now = float(stream.arrival[j])
        running = [(end, held) for end, held in running if end > now + 1e-7]
        free_at = np.zeros(32)
        for end, held in running:
            for server in held:
                assert free_at[server] == 0, "a server holds two jobs"
                free_at[server] = end
        state = ClusterState(where, free_at, now, period_s=stream.period)
        m = int(stream.model[j])
        limit = float(stream.beta[j] * world.sequential[m])
        if not world.rules.tick_overshoot:
            limit *= 1 + 1e-9
        job = Job(
            str(j),
            curves[m],
            limit,
            sequential_s=float(world.sequential[m]),
            needs=needs[m] if world.rules.leak else {},
        )
        decision = policy(job, state, Run(_Given(float(stream.uniform[j]))))
        if not decision.admit:
            told.append(("rejected", 0, frozenset()))
            continue
        block = decision.block or state.place(job, decision.degree)
        if block is None:
            told.append(("no block", 0, frozenset()))
            continue
        time = job.curve.time(decision.degree, "", block.form)
        if time > limit:
            told.append(("late", 0, frozenset()))
            continue
        running.append((now + time, frozenset(block.devices)))
        late = world.rules.horizon_blocks and now + time > stream.horizon + 1e-7
        told.append(("horizon" if late else "accepted", decision.degree, frozenset(block.devices)))
    return told
