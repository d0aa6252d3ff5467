"""A network trained by masked PPO on the published cluster with its errors removed; needs torch.

The shipped weights are an MLP's, for deadlines spread evenly. Other worlds need weights of their own.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadmaster.advisor.environments.batched import OBSERVATION_SIZE
from loadmaster.advisor.environments.blocks import DEGREES, NUM_SERVERS
from loadmaster.advisor.jobs.job import Job
from loadmaster.advisor.jobs.state import REJECT, ClusterState, Decision
from loadmaster.advisor.policies.registry import Run
from loadmaster.core.errors import InputError

_SHIPPED = Path(__file__).parents[1] / "learned" / "weights" / "fixed_A_blocks.safetensors"


@dataclass(frozen=True, slots=True)
class Learned:
    """A file of weights and the world it was trained in; '' is the shipped one."""

    weights: str = ""
    world: str = "fixed"

    def __call__(self, job: Job, state: ClusterState, run: Run) -> Decision:
        """The most likely action that the mask offers."""
        if tuple(sorted(state.layout.blocks)) != DEGREES or state.layout.num_devices != NUM_SERVERS:
            raise InputError(
                f"these weights decide for {NUM_SERVERS} servers with blocks of {DEGREES}, not for"
                f" {state.layout.num_devices} devices on hosts; use another policy, for example smallest"
            )
        import torch

        network, joint = _network(self.weights or str(_SHIPPED), self.world)
        seen, mask = observe(job, state, joint=joint)
        with torch.no_grad():
            logits, _ = network(torch.as_tensor(seen[None]), torch.as_tensor(mask[None]))
        action = int(logits.argmax())
        if not action:
            return REJECT
        if not joint:
            return Decision(DEGREES[action - 1])
        block = [b for degree in DEGREES for b in state.layout.blocks[degree]][action - 1]
        return Decision(len(block.devices), block)


@cache
def _network(path: str, world: str) -> tuple[Any, bool]:
    from loadmaster.advisor.learned.networks import JOINT, load_network

    network, spec = load_network(path, world=world)
    return network, spec.num_actions == JOINT


def observe(
    job: Job, state: ClusterState, *, joint: bool = False
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """What the batched environment shows of the same moment (`environments.batched`)."""
    seen, mask = np.zeros(OBSERVATION_SIZE, np.float32), np.zeros(1 + len(DEGREES), np.bool_)
    mask[0] = True
    offered = [True]
    num, limit = len(DEGREES), job.deadline_s * (1 + 1e-9)
    for k, degree in enumerate(DEGREES):
        blocks = state.layout.blocks[degree]
        free = list(state.free_blocks(degree))
        seen[k] = min(4.0, job.curve.time(degree, blocks[0].kind, blocks[0].form) / max(limit, 1e-9)) / 4
        seen[num + k] = bool(free)
        seen[2 * num + k] = len(free) / len(blocks)
        mask[1 + k] = bool(free) and job.curve.time(degree, free[0].kind, free[0].form) <= limit
        now = {block.devices for block in free}
        offered += [b.devices in now and job.curve.time(degree, b.kind, b.form) <= limit for b in blocks]
    left = np.maximum(state.free_at_s - state.now_s, 0.0)
    seen[3 * num : 3 * num + NUM_SERVERS] = np.minimum(1.0, np.where(state.is_free, 0.0, left) / 2e4)
    seen[-4:-1] = min(10.0, job.work_s / 4e4), min(10.0, limit / 4e4), state.num_free / NUM_SERVERS
    seen[-1] = len(np.unique(state.free_at_s[~state.is_free])) / NUM_SERVERS
    return seen, np.array(offered) if joint else mask


POLICY = Learned
