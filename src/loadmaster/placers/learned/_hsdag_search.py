"""HSDAG's search: plans one after another, an update after so many, then from the original features again."""

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from loadmaster.core.arrays import Bools, Floats, Ints
from loadmaster.core.problem import Problem
from loadmaster.placers.learned._groups import Groups
from loadmaster.placers.learned._hsdag_features import make_hsdag_graph
from loadmaster.placers.learned._hsdag_network import HsdagNetwork

_FORBIDDEN = 1e10  # the published code's latency of a plan on one device
_LEAST_PER_DEVICE = 4  # groups that parsing leaves


class Settings(Protocol):
    """What `hsdag.Hsdag` says of a search."""

    @property
    def steps(self) -> int:
        """Plans an update."""

    @property
    def passes(self) -> int:
        """Of parsing, at most."""

    @property
    def width(self) -> int:
        """Of the network."""

    @property
    def dropout(self) -> float:
        """Share of features left out, as coded only."""

    @property
    def learning_rate(self) -> float:
        """Of Adam."""

    @property
    def discount(self) -> float:
        """Of returns."""

    @property
    def baseline(self) -> bool:
        """Whether returns have one."""

    @property
    def merge_chains(self) -> bool:
        """Whether chains are one node."""

    @property
    def as_coded(self) -> bool:
        """Whether it does what the published code does."""


class HsdagSearch:
    """A searcher (`_searcher.py`) with a network that is trained while it proposes."""

    def __init__(self, problem: Problem, groups: Groups, settings: Settings, seed: int) -> None:
        self.groups, self.settings = groups, settings
        coded = settings.as_coded
        self.graph = make_hsdag_graph(problem, groups, merge_chains=settings.merge_chains, as_coded=coded)
        self.features = torch.from_numpy(self.graph.features)
        self.source = torch.from_numpy(self.graph.source.astype(np.int64))
        self.target = torch.from_numpy(self.graph.target.astype(np.int64))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.network = HsdagNetwork(
                self.features.shape[1], groups.num_devices, settings.width, settings.dropout
            )
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=settings.learning_rate)
        self.dice = torch.Generator().manual_seed(seed)
        self.state = self.features
        self.reference_s = 0.0
        self.log_chances: list[Tensor] = []
        self.rewards: list[float] = []
        self.returns: list[float] = []  # of earlier episodes, for the baseline
        self.num_groups = 0  # of the plan proposed last

    def propose(self, rng: np.random.Generator) -> Ints:
        """[1, U] the devices that the policy draws for the groups of one parse."""
        coded = self.settings.as_coded
        passes = len(self.features) if coded else self.settings.passes
        least = 1 if coded else _LEAST_PER_DEVICE * self.groups.num_devices
        logits, label, added = self.network(
            self.state, self.source, self.target, passes=passes, least_groups=least, drop=self._drop
        )
        self.num_groups = len(logits)
        group_of = label[self.graph.node_of_group]
        device, masks = self._draw(logits.detach().numpy().astype(np.float64), group_of, rng)
        masked = logits.masked_fill(~torch.from_numpy(masks), -1e9)
        chance = torch.log_softmax(masked, dim=1).gather(1, torch.from_numpy(device)[:, None])
        self.log_chances.append(chance.sum())
        of_node = torch.from_numpy(label.astype(np.int64))
        self.state = (self.state + added[of_node]).detach()
        row = device[group_of].astype(np.int32)
        fits = self.groups.cargo.fits
        fastest = np.where(fits, self.groups.cargo.seconds, np.inf).argmin(axis=1)
        allowed = fits[np.arange(len(row)), row]
        return np.where(allowed, row, fastest).astype(np.int32)[None]

    def observe(self, rows: Ints, times_s: Floats) -> None:
        """A reward for each plan; after so many, an update."""
        for row, time_s in zip(rows, times_s.tolist(), strict=True):
            if self.settings.as_coded and len(np.unique(row)) == 1:
                time_s = _FORBIDDEN
            if self.reference_s == 0.0 and np.isfinite(time_s):
                self.reference_s = max(time_s, 1e-300)
            self.rewards.append(self.reference_s / time_s if np.isfinite(time_s) and time_s > 0 else 0.0)
        if len(rows) == 0 and self.log_chances:
            self.log_chances.pop()
        if len(self.rewards) >= self.settings.steps:
            self._update()

    def _drop(self, h: Tensor) -> Tensor:
        """Dropout with dice of its own, so that a seed repeats; off while sampling unless as coded."""
        share = self.settings.dropout
        if share == 0.0 or not self.settings.as_coded:
            return h
        kept = torch.rand(h.shape, generator=self.dice) >= share
        return h * kept / (1.0 - share)

    def _draw(self, logits: Floats, group_of: Ints, rng: np.random.Generator) -> tuple[Any, Bools]:
        """Devices of groups, those with most bytes first; without support or room a device is masked."""
        num, devices = logits.shape
        cargo = self.groups.cargo
        held = np.bincount(group_of, cargo.held_bytes, num)
        allowed = np.ones((num, devices), dtype=np.bool_)
        np.logical_and.at(allowed, group_of, cargo.fits)
        left = self.groups.room_bytes.copy()
        device, masks = np.zeros(num, dtype=np.int64), np.zeros((num, devices), dtype=np.bool_)
        for g in np.argsort(-held, kind="stable").tolist():
            may = allowed[g] & (left >= held[g])
            if not may.any():
                may = allowed[g] if allowed[g].any() else np.ones(devices, dtype=np.bool_)
                may = may & (left == left[may].max())
            chance = np.where(may, np.exp(logits[g] - logits[g][may].max()), 0.0)
            device[g] = int(np.searchsorted(np.cumsum(chance), rng.random() * chance.sum(), side="right"))
            device[g] = min(int(device[g]), int(np.flatnonzero(may)[-1]))
            masks[g] = may
            left[device[g]] -= held[g]
        return device, masks

    def _update(self) -> None:
        """REINFORCE: each choice with the return that follows it, or one return for all, as coded."""
        rewards, discount = self.rewards, self.settings.discount
        chances = torch.stack(self.log_chances[: len(rewards)])
        if self.settings.as_coded:  # the newest first
            whole = sum(discount**i * reward for i, reward in enumerate(reversed(rewards)))
            loss = -whole * chances.sum()
        else:
            value = np.array(rewards)
            if self.settings.baseline:
                self.returns.append(float(value.mean()))
                value = (value - value.mean()) / (value.std() + 1e-8)
            weight = discount ** np.arange(len(rewards)) if not self.settings.baseline else 1.0
            loss = -(torch.from_numpy((weight * value).astype(np.float32)) * chances).sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.rewards, self.log_chances, self.state = [], [], self.features
