"""Many streams of the published or corrected cluster in lockstep: observations, masks and steps in
compiled loops.

Unlike the published observation this one shows which servers are free and when the others come free
(defect O1). An action is 0 (reject), a degree, or with `joint` a block.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
# Kernels are typed by numba.

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadmaster.advisor.environments.blocks import DEGREES, NUM_SERVERS
from loadmaster.advisor.environments.engine import (
    TOLERANCE,
    _columns,
    _footprint,
    _is_offered,
    _ones,
    _release,
    _require_fitting,
    _tables,
)
from loadmaster.advisor.environments.streams import Stream
from loadmaster.advisor.environments.world import World
from loadmaster.core.errors import InputError
from loadmaster.simulator.jit import kernel

NUM_DEGREES = len(DEGREES)
OBSERVATION_SIZE = 3 * NUM_DEGREES + NUM_SERVERS + 4


class BatchedRamp:
    """S streams of one length; `reset`, then `step` with one action each until `done`."""

    def __init__(self, world: World, streams: Sequence[Stream], *, joint: bool = False) -> None:
        """With `joint` the placer obeys a block and nothing leaks; the world must be one without the leak."""
        if not streams or len({len(s.model) for s in streams}) != 1:
            raise InputError("batched streams need at least one stream, all with the same number of arrivals")
        if joint and world.rules.leak:
            raise InputError(
                "blocks can be chosen only where jobs stay inside them; use the world without the leak"
            )
        for stream in streams:
            _require_fitting(world, stream)
        self.world, self.streams, self.joint = world, tuple(streams), joint
        self.num_actions = 1 + (len(world.blocks.mask) if joint else NUM_DEGREES)
        columns = [_columns(s, world) for s in streams]
        self._model = np.stack([c[0] for c in columns])
        self._deadline = np.stack([c[1] for c in columns])
        self._arrival = np.stack([c[2] for c in columns])
        self._tables = _tables(world)
        self._horizon = streams[0].horizon
        self.reset()

    def reset(self) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Back to empty clusters and the first arrivals."""
        count = len(self.streams)
        self._at = 0
        self._free = np.full(count, (1 << NUM_SERVERS) - 1, np.uint64)
        self._ends = np.zeros((count, NUM_SERVERS))
        self._held = np.zeros((count, NUM_SERVERS), np.uint64)
        self._running = np.zeros(count, np.int64)
        return self._observe()

    @property
    def model(self) -> NDArray[np.int64]:
        """[S] model of the job that is to be decided."""
        return self._model[:, min(self._at, self._model.shape[1] - 2)]

    @property
    def done(self) -> bool:
        """Whether every arrival but the last was decided."""
        return bool(self._at >= self._model.shape[1] - 1)

    def step(
        self, actions: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_], NDArray[np.float64]]:
        """Observations and masks of the next arrivals, and 1 for each job that was accepted."""
        if self.done:
            raise InputError("the streams are over; call reset()")
        accepted = np.zeros(len(self.streams))
        arguments: Any = (
            self._at,
            np.asarray(actions, np.int64),
            self.joint,
            *self._tables,
            self._model,
            self._deadline,
            self._arrival,
            self._horizon,
            self._free,
            self._ends,
            self._held,
            self._running,
            accepted,
        )
        _step_all(*arguments)
        self._at += 1
        return *self._observe(), accepted

    def _observe(self) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        count = len(self.streams)
        seen = np.zeros((count, OBSERVATION_SIZE), np.float32)
        mask = np.zeros((count, self.num_actions), np.bool_)
        at = min(self._at, self._model.shape[1] - 2)
        arguments: Any = (
            at,
            self.joint,
            *self._tables,
            self._model,
            self._deadline,
            self._arrival,
            self._free,
            self._ends,
            self._held,
            self._running,
            seen,
            mask,
        )
        _observe_all(*arguments)
        return seen, mask


def trimmed(stream: Stream, num_jobs: int) -> Stream:
    """The first jobs of a stream, so that streams have one length."""
    return replace(
        stream,
        model=stream.model[:num_jobs],
        beta=stream.beta[:num_jobs],
        arrival=stream.arrival[:num_jobs],
        uniform=stream.uniform[:num_jobs],
    )


@kernel
def _observe_all(
    at,
    joint,
    jct,
    nominal,
    seq,
    needs,
    masks,
    first,
    flags,
    degrees,
    conflict,
    model,
    deadline,
    arrival,
    free_of,
    ends,
    held,
    running,
    seen,
    mask,
):
    num = len(degrees)
    for s in range(len(free_of)):
        now = arrival[s, at]
        free, count = _release(now, free_of[s], ends[s], held[s], running[s])
        free_of[s], running[s] = free, count
        m, limit = model[s, at], deadline[s, at]
        mask[s, 0] = True
        for k in range(num):
            seen[s, k] = min(4.0, nominal[m, k] / limit) / 4
            offered = _is_offered(k, free, masks, first, flags, degrees)
            seen[s, num + k] = offered
            free_blocks = 0
            for b in range(first[k], first[k + 1]):
                if masks[b] & ~free == 0:
                    free_blocks += 1
                    if joint and jct[m, b] <= limit:
                        mask[s, 1 + b] = True
            seen[s, 2 * num + k] = free_blocks / (first[k + 1] - first[k])
            if not joint:
                if flags[0]:
                    mask[s, 1 + k] = offered
                else:
                    _, block = _footprint(m, k, free, needs, masks, first)
                    mask[s, 1 + k] = block >= 0 and jct[m, block] <= limit
        for i in range(count):
            for d in range(NUM_SERVERS):
                if (held[s, i] >> np.uint64(d)) & np.uint64(1):
                    seen[s, 3 * num + d] = min(1.0, (ends[s, i] - now) / 2e4)
        at_end = 3 * num + NUM_SERVERS
        seen[s, at_end] = min(10.0, seq[m] / 4e4)
        seen[s, at_end + 1] = min(10.0, limit / 4e4)
        seen[s, at_end + 2] = _ones(free) / NUM_SERVERS
        seen[s, at_end + 3] = count / NUM_SERVERS


@kernel
def _step_all(
    at,
    actions,
    joint,
    jct,
    nominal,
    seq,
    needs,
    masks,
    first,
    flags,
    degrees,
    conflict,
    model,
    deadline,
    arrival,
    horizon,
    free_of,
    ends,
    held,
    running,
    accepted,
):
    for s in range(len(free_of)):
        action = actions[s]
        if action <= 0:
            continue
        m, limit, now, free = model[s, at], deadline[s, at], arrival[s, at], free_of[s]
        if joint:
            block = action - 1
            if masks[block] & ~free != 0:
                continue
            taken = masks[block]
        else:
            taken, block = _footprint(m, action - 1, free, needs, masks, first)
            if block < 0:
                continue
        time = jct[m, block]
        if time > limit:
            continue
        free_of[s] = free & ~taken
        ends[s, running[s]] = now + time
        held[s, running[s]] = taken
        running[s] += 1
        accepted[s] = 0.0 if flags[1] and now + time > horizon + TOLERANCE else 1.0


__all__ = ["OBSERVATION_SIZE", "BatchedRamp", "trimmed"]
