"""The cluster as a Gymnasium environment with action masks. Needs the extra `advisor`."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from loadmaster.advisor.environments.batched import OBSERVATION_SIZE, BatchedRamp
from loadmaster.advisor.environments.streams import draw_stream
from loadmaster.advisor.environments.world import World
from loadmaster.core.errors import InputError


def require_action(action: np.int64 | int, space: spaces.Space[np.int64]) -> int:
    """The action as a number; one that is outside of the space is refused."""
    if not space.contains(np.int64(action)):
        raise InputError(f"action {action!r} is not in {space}; give a whole number from 0 on")
    return int(action)


class RampEnv(gymnasium.Env[NDArray[np.float32], np.int64]):
    """One stream an episode; reward +1 for a job in time, else -1. `info["action_mask"]` has the mask."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  # as Gymnasium declares it

    def __init__(
        self, world: World, distribution: str = "A", *, joint: bool = False, poisson: bool = False
    ) -> None:
        """A world of `environments.world`; with `joint` an action names a block."""
        self.world, self.distribution, self.joint, self.poisson = world, distribution, joint, poisson
        self._batch = self._draw(0)
        self.action_space = spaces.Discrete(self._batch.num_actions)
        self.observation_space = spaces.Box(0.0, 10.0, (OBSERVATION_SIZE,), np.float32)
        self._mask = np.ones(self._batch.num_actions, np.bool_)

    def _draw(self, seed: int) -> BatchedRamp:
        stream = draw_stream(self.distribution, seed, poisson=self.poisson, num_models=len(self.world.models))
        return BatchedRamp(self.world, [stream], joint=self.joint)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """A stream of this seed; without one, of the next number of the environment's generator."""
        super().reset(seed=seed)
        self._batch = self._draw(int(self.np_random.integers(2**31)))
        seen, mask = self._batch.reset()
        self._mask = mask[0]
        return seen[0], self._info()

    def step(self, action: np.int64 | int) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Decide one arrival; an action that the mask does not offer rejects."""
        chosen = require_action(action, self.action_space)
        seen, mask, accepted = self._batch.step(np.array([chosen if self._mask[chosen] else 0]))
        self._mask = mask[0]
        return seen[0], float(2 * accepted[0] - 1), self._batch.done, False, self._info()

    def action_masks(self) -> NDArray[np.bool_]:
        """Which actions are offered now."""
        return self._mask.copy()

    def _info(self) -> dict[str, Any]:
        return {"action_mask": self._mask.copy(), "model": int(self._batch.model[0])}
