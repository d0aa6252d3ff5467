"""Recorded arrivals as a Gymnasium environment with action masks. Needs the extra `advisor`.

One stream an episode, one decision for each job at its arrival: 0 rejects it, any other action is a kind and
a number of devices. The job starts as soon as so many devices of that kind are free, at once or later, and
keeps them to its end. The mask offers exactly the actions that end by the deadline. A device that waits for a
job that was let in is not lent to others.
"""

import math
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from loadmaster.advisor.environments.gym_env import require_action
from loadmaster.advisor.environments.trace import LEVELS, Throughputs, Trace, TraceStream, draw_trace_stream
from loadmaster.core.errors import InputError

_LONG_S = 86400.0


class TraceEnv(gymnasium.Env[NDArray[np.float32], np.int64]):
    """Reward +1 for a job in time, else 0; rejected jobs are not in time."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  # as Gymnasium declares it

    def __init__(
        self,
        trace: Trace,
        throughputs: Throughputs,
        hosts: NDArray[np.int64],
        *,
        kinds: tuple[str, ...] = ("v100",),
        host_kind: NDArray[np.int64] | None = None,
        deadline: str = "default",
    ) -> None:
        """Hosts of so many devices, of the kinds that `host_kind` points to (the first if it is left out)."""
        kind = np.zeros(len(hosts), np.int64) if host_kind is None else np.asarray(host_kind, np.int64)
        if len(kind) != len(hosts) or kind.max(initial=0) >= len(kinds):
            raise InputError(
                f"host_kind is {kind.tolist()} for {len(hosts)} hosts and {len(kinds)} kinds;"
                " give the index of a kind for each host"
            )
        self._trace, self._rates, self._kinds, self._deadline = trace, throughputs, kinds, deadline
        self._host = np.repeat(np.arange(len(hosts)), hosts)
        self._kind = np.repeat(kind, hosts)
        self._stream = self._draw(0)
        self._begin()
        actions = len(kinds) * len(LEVELS)
        self.action_space = spaces.Discrete(1 + actions)
        self.observation_space = spaces.Box(0.0, 10.0, (2 * actions + 2 * len(kinds) + 1,), np.float32)

    def _draw(self, seed: int) -> TraceStream:
        return draw_trace_stream(self._trace, self._rates, seed, kinds=self._kinds, deadline=self._deadline)

    def _begin(self) -> None:
        self._at = 0
        self.free_at = np.zeros(len(self._host))  # [D] when each device is free of all that is planned
        self._look()

    def _look(self) -> None:
        """Start, end and devices of every action for the job that has come."""
        j = min(self._at, len(self._stream.due_s) - 1)
        self._plans = [self._earliest(j, g, q) for g in range(len(self._kinds)) for q in range(len(LEVELS))]
        due = self._stream.due_s[j]
        self._mask = np.array([True, *(end <= due * (1 + 1e-12) for _, end, _ in self._plans)])

    def _earliest(self, j: int, kind: int, level: int) -> tuple[float, float, NDArray[np.int64]]:
        """The first moment with enough free devices of a kind: on one host if one has them, else spread."""
        count, now = LEVELS[level], float(self._stream.arrival_s[j])
        mine = np.flatnonzero(self._kind == kind)
        nothing = (math.inf, math.inf, np.empty(0, np.int64))
        if len(mine) < count:
            return nothing
        best = nothing
        for start in np.unique(np.maximum(self.free_at[mine], now)):
            free = mine[self.free_at[mine] <= start]
            if len(free) < count:
                continue
            ids, room = np.unique(self._host[free], return_counts=True)
            inside = ids[room >= count]
            if len(inside):
                tight = inside[np.argmin(room[room >= count])]
                devices, form = free[self._host[free] == tight][:count], 0
            else:
                devices, form = free[:count], 1
            end = start + float(self._stream.duration_s[j, kind, form, level])
            if end < best[1]:
                best = (float(start), end, devices)
            if form == 0:
                break  # later starts on one host end later
        return best

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """A stream of this seed; without one, of the next number of the environment's generator."""
        super().reset(seed=seed)
        self._stream = self._draw(int(self.np_random.integers(2**31)))
        self._begin()
        return self._seen(), self._info()

    def step(self, action: np.int64 | int) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Decide one arrival; an action that the mask does not offer rejects."""
        if self._at >= len(self._stream.due_s):
            raise InputError("the stream is over; call reset()")
        chosen = require_action(action, self.action_space)
        taken = chosen > 0 and bool(self._mask[chosen])
        if taken:
            _, end, devices = self._plans[chosen - 1]
            self.free_at[devices] = end
        self._at += 1
        over = self._at >= len(self._stream.due_s)
        self._look()
        return self._seen(), float(taken), over, False, self._info()

    def action_masks(self) -> NDArray[np.bool_]:
        """Which actions are offered now."""
        return self._mask.copy()

    def plan_of(self, action: int) -> tuple[float, float, NDArray[np.int64]]:
        """Start, end and devices of an action other than 0; inf where the job cannot run so."""
        return self._plans[action - 1]

    def _seen(self) -> NDArray[np.float32]:
        """Wait and end of each action over the deadline, free and planned devices by kind, the deadline."""
        j = min(self._at, len(self._stream.due_s) - 1)
        now = float(self._stream.arrival_s[j])
        window = max(float(self._stream.due_s[j]) - now, 1e-9)
        waits = [(start - now) / window for start, _, _ in self._plans]
        ends = [(end - now) / window for _, end, _ in self._plans]
        left = np.maximum(self.free_at - now, 0.0)
        kinds = [self._kind == g for g in range(len(self._kinds))]
        free = [float((left[k] == 0).mean()) if k.any() else 0.0 for k in kinds]
        busy = [float(left[k].mean() / _LONG_S) if k.any() else 0.0 for k in kinds]
        return np.clip(np.array([*waits, *ends, *free, *busy, window / _LONG_S]), 0.0, 10.0).astype(
            np.float32
        )

    def _info(self) -> dict[str, Any]:
        return {"action_mask": self._mask.copy()}
