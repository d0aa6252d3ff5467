"""Collecting decisions to learn from: groups of streams, here or on Ray's workers, with the same numbers.

Each group of streams has its own random numbers, so that what is collected depends on the number of groups
alone and not on where they run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from loadmaster.advisor.environments.batched import BatchedRamp
from loadmaster.advisor.environments.profile import JobGraph
from loadmaster.advisor.environments.streams import Stream
from loadmaster.advisor.environments.world import World
from loadmaster.advisor.learned.networks import Spec, make_network
from loadmaster.core.errors import InputError

Data = dict[str, Tensor]
_COLUMNS = ("seen", "mask", "model", "action", "log", "value", "reward")


@dataclass(frozen=True, slots=True)
class Collecting:
    """How decisions are collected."""

    steps: int  # decisions of each stream in a round
    discount: float
    smoothing: float
    joint: bool


class Group:
    """Streams in lockstep, and the random numbers of their decisions."""

    def __init__(self, world: World, how: Collecting, seed: Sequence[int]) -> None:
        self.world, self.how = world, how
        number = int(np.random.default_rng(seed).integers(2**62))
        self._draw = torch.Generator().manual_seed(number)
        self._batch: BatchedRamp | None = None
        self._seen: NDArray[np.float32]
        self._mask: NDArray[np.bool_]

    def start(self, streams: Sequence[Stream]) -> None:
        """Begin with other streams."""
        self._batch = BatchedRamp(self.world, streams, joint=self.how.joint)
        self._seen, self._mask = self._batch.reset()

    def collect(self, network: nn.Module) -> tuple[Data, bool]:
        """Decisions of all streams with their advantages (GAE), and whether the streams are over."""
        batch = self._batch
        assert batch is not None, "started before"
        rows: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
        with torch.no_grad():
            reading = network.read()
            for _ in range(self.how.steps):
                if batch.done:
                    break
                seen, mask = torch.as_tensor(self._seen), torch.as_tensor(self._mask)
                model = torch.as_tensor(batch.model.copy())
                logits, value = network(seen, mask, model, reading)
                log = torch.log_softmax(logits, dim=1)
                action = torch.multinomial(log.exp(), 1, generator=self._draw)[:, 0]
                self._seen, self._mask, accepted = batch.step(action.numpy())
                taken = log.gather(1, action[:, None])[:, 0]
                reward = torch.as_tensor(2 * accepted - 1, dtype=torch.float32)
                row = (seen, mask, model, action, taken, value, reward)
                for name, item in zip(_COLUMNS, row, strict=True):
                    rows[name].append(item)
            last = network(
                torch.as_tensor(self._seen),
                torch.as_tensor(self._mask),
                torch.as_tensor(batch.model.copy()),
                reading,
            )[1]
        values, rewards = torch.stack(rows["value"]), torch.stack(rows["reward"])
        gain, advantages = torch.zeros_like(last), torch.zeros_like(values)
        following = torch.zeros_like(last) if batch.done else last
        for t in range(len(values) - 1, -1, -1):
            error = rewards[t] + self.how.discount * following - values[t]
            gain = error + self.how.discount * self.how.smoothing * gain
            advantages[t], following = gain, values[t]
        data = {name: torch.cat(rows[name]) for name in _COLUMNS[:5]}
        data |= {"advantage": advantages.flatten(), "target": (advantages + values).flatten()}
        return data, batch.done


class Here:
    """All groups in this process, one after the other."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups

    def start(self, streams: Sequence[Sequence[Stream]]) -> None:
        """Other streams for each group."""
        for group, share in zip(self._groups, streams, strict=True):
            group.start(share)

    def collect(self, network: nn.Module) -> tuple[list[Data], bool]:
        """What each group collected."""
        found = [group.collect(network) for group in self._groups]
        return [data for data, _ in found], found[0][1]

    def close(self) -> None:
        """Nothing is held."""


class _RayGroup:
    """A group on a worker of Ray, with a network of its own."""

    def __init__(self, group: Group, spec: Spec, graphs: tuple[JobGraph, ...]) -> None:
        torch.set_num_threads(1)
        self._group, self._network = group, make_network(spec, graphs)

    def start(self, streams: Sequence[Stream]) -> None:
        self._group.start(streams)

    def collect(self, weights: dict[str, NDArray[Any]]) -> tuple[dict[str, NDArray[Any]], bool]:
        self._network.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})
        data, over = self._group.collect(self._network)
        return {name: value.numpy() for name, value in data.items()}, over


class OverRay:
    """Each group is an actor of Ray: on this machine, or on the cluster that is connected."""

    def __init__(self, groups: Sequence[Group], spec: Spec, graphs: tuple[JobGraph, ...]) -> None:
        try:
            import ray
        except ImportError:
            raise InputError(
                "training with workers needs Ray; install it: pip install 'loadmaster[ray]', or leave out"
                " --workers"
            ) from None
        self._ray = ray
        self._began = not ray.is_initialized()
        if self._began:
            ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
        actor = ray.remote(num_cpus=1)(_RayGroup)
        most = int(ray.cluster_resources().get("CPU", 1))
        if len(groups) > most:
            self.close()
            raise InputError(f"{len(groups)} workers need as many CPUs, and the Ray cluster has {most}")
        self._actors = [actor.remote(group, spec, graphs) for group in groups]

    def start(self, streams: Sequence[Sequence[Stream]]) -> None:
        """Other streams for each worker."""
        self._ray.get([a.start.remote(share) for a, share in zip(self._actors, streams, strict=True)])

    def collect(self, network: nn.Module) -> tuple[list[Data], bool]:
        """What each worker collected with these weights."""
        weights = self._ray.put({name: value.numpy() for name, value in network.state_dict().items()})
        found = self._ray.get([actor.collect.remote(weights) for actor in self._actors])
        data = [{name: torch.tensor(value) for name, value in part.items()} for part, _ in found]
        return data, bool(found[0][1])

    def close(self) -> None:
        """Stop Ray where it was started here."""
        if self._began:
            self._ray.shutdown()
