"""Masked PPO on batched streams, warm-started by imitating a rollout (Schulman et al. 2017; Huang &
Ontanon 2022).

Reads top to bottom: imitate, then rounds of collect, advantages (GAE), clipped updates. The checkpoint is
chosen on selection seeds, never on those a figure is told of. The same settings give the same weights.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from loadmaster.advisor.environments.batched import BatchedRamp
from loadmaster.advisor.environments.blocks import DEGREES
from loadmaster.advisor.environments.engine import Kind, Outcome, Rule, replay
from loadmaster.advisor.environments.profile import JobGraph, read_profiles
from loadmaster.advisor.environments.streams import Stream, draw_stream
from loadmaster.advisor.environments.world import World
from loadmaster.advisor.learned.collecting import Collecting, Group, Here, OverRay
from loadmaster.advisor.learned.networks import Spec, make_network, save_network
from loadmaster.core.errors import InputError
from loadmaster.core.run import ignore_progress

TRAINING_SEED = 100_000  # training streams count up from here
SELECTION_SEEDS = range(1000, 1010)


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """What is trained, and how."""

    distribution: str = "A"
    network: str = "mlp"
    iterations: int = 400
    seed: int = 0
    joint: bool = False  # choose a block, not a degree
    imitate: int = 20  # streams of the rollout that are imitated; 0: none
    teacher: tuple[int, int] = (30, 60)  # arrivals that the rollout looks ahead, and sampled futures
    streams: int = 24  # at once
    steps: int = 250  # decisions of each stream in a round
    epochs: int = 4
    minibatch: int = 1000
    learning_rate: float = 3e-4
    discount: float = 0.99
    smoothing: float = 0.95
    clip: float = 0.2
    entropy: float = 0.003
    models: tuple[int, ...] = ()  # job graphs that are trained on; none: all
    workers: int = 0  # groups of streams on Ray's workers; 0: one group, here
    ray: bool = True  # without it the groups are collected here, with the same numbers

    def __post_init__(self) -> None:
        """Counts that make sense."""
        if (
            self.iterations < 0
            or self.seed < 0
            or min(self.streams, self.steps, self.epochs, self.minibatch) < 1
        ):
            raise InputError("a training needs 0 or more iterations, a seed >= 0 and positive counts")
        if not 0 <= self.workers <= self.streams:
            raise InputError(f"{self.workers} workers share {self.streams} streams; give 0 to {self.streams}")


def train_policy(
    world: World,
    settings: TrainSettings,
    *,
    graphs: str | Path | None = None,
    out: str | Path | None = None,
    progress: Callable[[str, float], None] = ignore_progress,
) -> dict[str, Any]:
    """Train, write the best checkpoint of the selection seeds, and tell its blocking there."""
    began = time.process_time()
    torch.manual_seed(settings.seed)
    rng = np.random.default_rng([settings.seed, 7])
    num_actions = 1 + (len(world.blocks.mask) if settings.joint else len(DEGREES))
    spec = Spec(settings.network, world.name, num_actions, settings.distribution)
    jobs = read_profiles(graphs) if graphs is not None and settings.network != "mlp" else ()
    network = make_network(spec, jobs)
    optimizer = torch.optim.Adam(network.parameters(), lr=settings.learning_rate)
    if settings.imitate:
        progress("imitating a rollout", 0.0)
        _imitate(network, optimizer, world, settings, rng)
    select = [_stream(world, settings, seed) for seed in SELECTION_SEEDS]
    best, kept = float(evaluate(network, world, select, joint=settings.joint).mean()), _copy(network)
    collector = _collector(world, settings, spec, jobs)
    try:
        best, kept = _improve(network, optimizer, world, settings, collector, rng, best, kept, progress)
    finally:
        collector.close()
    network.load_state_dict(kept)
    if out is not None:
        save_network(network, spec, out)
    return {"blocking": best, "seconds": time.process_time() - began, "network": network}


def _improve(
    network: nn.Module, optimizer: torch.optim.Optimizer, world: World, settings: TrainSettings,
    collector: Here | OverRay, rng: np.random.Generator, best: float, kept: dict[str, Tensor],
    progress: Callable[[str, float], None],
) -> tuple[float, dict[str, Tensor]]:  # fmt: skip
    """Rounds of PPO; the best blocking of the selection seeds and its weights."""
    select = [_stream(world, settings, seed) for seed in SELECTION_SEEDS]
    over, rounds = True, 0
    for i in range(settings.iterations):
        progress(
            f"round {i + 1} of {settings.iterations}, blocking {best:.4f}", i / max(1, settings.iterations)
        )
        if over:
            collector.start(_shares(world, settings, rounds))
            rounds += 1
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * (1 - i / settings.iterations)
        parts, over = collector.collect(network)
        data = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        _update(network, optimizer, data, settings, rng)
        if i % 10 == 9 or i == settings.iterations - 1:
            blocking = float(evaluate(network, world, select, joint=settings.joint).mean())
            if blocking < best:
                best, kept = blocking, _copy(network)
    return best, kept


def _collector(
    world: World, settings: TrainSettings, spec: Spec, graphs: tuple[JobGraph, ...]
) -> Here | OverRay:
    how = Collecting(settings.steps, settings.discount, settings.smoothing, settings.joint)
    groups = [Group(world, how, (settings.seed, 11, g)) for g in range(max(1, settings.workers))]
    return OverRay(groups, spec, graphs) if settings.workers and settings.ray else Here(groups)


def _shares(world: World, settings: TrainSettings, number: int) -> list[list[Stream]]:
    """The streams of a round, dealt out to the groups."""
    first = TRAINING_SEED + 10_000 * settings.seed + number * settings.streams
    streams = [_stream(world, settings, first + i) for i in range(settings.streams)]
    groups = max(1, settings.workers)
    return [streams[g::groups] for g in range(groups)]


def _copy(network: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in network.state_dict().items()}


def _stream(world: World, settings: TrainSettings, seed: int) -> Stream:
    stream = draw_stream(settings.distribution, seed, num_models=len(settings.models) or len(world.models))
    return replace(stream, model=np.array(settings.models)[stream.model]) if settings.models else stream


def _imitate(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World,
    settings: TrainSettings,
    rng: np.random.Generator,
) -> None:
    """Learn the answers of a rollout on some streams."""
    bases: tuple[Rule, ...] = (
        Rule(Kind.MEETS),
        Rule(Kind.MEETS, 4),
        Rule(Kind.MEETS, 8),
        Rule(Kind.CONSTANT, 4),
        Rule(Kind.MEETS, 2, False),
    )
    if not world.rules.leak:
        bases = tuple(Rule(Kind.BEST_FIT, k) for k in (1, 2, 4, 8))
    probe = [_stream(world, settings, seed) for seed in SELECTION_SEEDS[:5]]
    base = min(bases, key=lambda rule: np.mean([replay(world, s, rule).blocking for s in probe]))
    shares = _shares(world, replace(settings, streams=settings.imitate, workers=0), 900)
    batch = BatchedRamp(world, shares[0], joint=settings.joint)
    teacher = replace(base, rollout=settings.teacher)
    outcomes = [replay(world, s, teacher, seed=i) for i, s in enumerate(batch.streams)]
    if settings.joint:
        answers = np.stack([np.where(o.degree > 0, o.block + 1, 0) for o in outcomes])
    else:
        index = {degree: k + 1 for k, degree in enumerate(DEGREES)} | {0: 0}
        answers = np.stack([[index[int(d)] for d in o.degree] for o in outcomes])
    rows: list[tuple[NDArray[Any], ...]] = []
    seen, mask = batch.reset()
    while not batch.done:
        action = answers[:, batch._at]
        rows.append((seen, mask, batch.model.copy(), action))
        seen, mask, _ = batch.step(action)
    columns = [torch.as_tensor(np.concatenate([row[i] for row in rows])) for i in range(4)]
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    for _ in range(30):
        for part in torch.as_tensor(rng.permutation(len(columns[0]))).split(256):
            logits, _ = network(columns[0][part], columns[1][part], columns[2][part])
            loss = nn.functional.cross_entropy(logits, columns[3][part].long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def _update(
    network: nn.Module, optimizer: torch.optim.Optimizer, data: dict[str, Tensor], settings: TrainSettings,
    rng: np.random.Generator,
) -> None:  # fmt: skip
    """Clipped surrogate, value and entropy."""
    advantage = (data["advantage"] - data["advantage"].mean()) / (data["advantage"].std() + 1e-8)
    for _ in range(settings.epochs):
        for part in torch.as_tensor(rng.permutation(len(advantage))).split(settings.minibatch):
            logits, value = network(data["seen"][part], data["mask"][part], data["model"][part])
            log = torch.log_softmax(logits, dim=1)
            ratio = torch.exp(log.gather(1, data["action"][part][:, None])[:, 0] - data["log"][part])
            entropy = -(log.exp() * log.clamp(min=-50.0)).sum(dim=1).mean()
            clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
            surrogate = torch.min(ratio * advantage[part], clipped * advantage[part]).mean()
            value_loss = nn.functional.mse_loss(value, data["target"][part])
            loss = -surrogate + 0.05 * value_loss - settings.entropy * entropy
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 0.5)
            optimizer.step()


def evaluate(
    network: nn.Module, world: World, streams: list[Stream], *, joint: bool = False
) -> NDArray[np.float64]:
    """Blocking of each stream under the most likely action."""
    return np.array([outcome.blocking for outcome in decide(network, world, streams, joint=joint)])


def decide(network: nn.Module, world: World, streams: list[Stream], *, joint: bool = False) -> list[Outcome]:
    """What becomes of each stream under the most likely action."""
    batch = BatchedRamp(world, streams, joint=joint)
    seen, mask = batch.reset()
    given = np.full((len(streams), len(streams[0].model)), -1, np.int64)
    with torch.no_grad():
        reading = network.read()
        for j in range(given.shape[1] - 1):
            logits, _ = network(
                torch.as_tensor(seen), torch.as_tensor(mask), torch.as_tensor(batch.model.copy()), reading
            )
            given[:, j] = logits.argmax(dim=1).numpy() - 1
            seen, mask, _ = batch.step(given[:, j] + 1)
    rule = Rule(Kind.GIVEN_BLOCK if joint else Kind.GIVEN)
    return [replay(world, s, rule, given=row) for s, row in zip(streams, given, strict=True)]
