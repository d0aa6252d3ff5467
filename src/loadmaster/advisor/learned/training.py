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
from loadmaster.advisor.environments.engine import Kind, Rule, replay
from loadmaster.advisor.environments.profile import read_profiles
from loadmaster.advisor.environments.streams import Stream, draw_stream
from loadmaster.advisor.environments.world import World
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
    iterations: int = 60
    seed: int = 0
    joint: bool = False
    imitate: int = 10  # streams of the rollout that are imitated; 0: none
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

    def __post_init__(self) -> None:
        """Counts that make sense."""
        if (
            self.iterations < 0
            or self.seed < 0
            or min(self.streams, self.steps, self.epochs, self.minibatch) < 1
        ):
            raise InputError("a training needs 0 or more iterations, a seed >= 0 and positive counts")


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
    batch = _batch(world, settings, 0)
    spec = Spec(settings.network, world.name, batch.num_actions, settings.distribution)
    jobs = read_profiles(graphs) if graphs is not None and settings.network == "graph" else ()
    network = make_network(spec, jobs)
    optimizer = torch.optim.Adam(network.parameters(), lr=settings.learning_rate)
    if settings.imitate:
        progress("imitating a rollout", 0.0)
        _imitate(network, optimizer, world, settings, rng)
    select = [_stream(world, settings, seed) for seed in SELECTION_SEEDS]
    best, kept = evaluate(network, world, select, joint=settings.joint).mean(), _copy(network)
    seen, mask = batch.reset()
    rounds = 0
    for i in range(settings.iterations):
        progress(
            f"round {i + 1} of {settings.iterations}, blocking {best:.4f}", i / max(1, settings.iterations)
        )
        if batch.done:
            rounds += 1
            batch = _batch(world, settings, rounds)
            seen, mask = batch.reset()
        rate = settings.learning_rate * (1 - i / settings.iterations)
        for group in optimizer.param_groups:
            group["lr"] = rate
        data, seen, mask = _collect(network, batch, seen, mask, settings)
        _update(network, optimizer, data, settings, rng)
        if i % 10 == 9 or i == settings.iterations - 1:
            blocking = evaluate(network, world, select, joint=settings.joint).mean()
            if blocking < best:
                best, kept = blocking, _copy(network)
    network.load_state_dict(kept)
    if out is not None:
        save_network(network, spec, out)
    return {"blocking": float(best), "seconds": time.process_time() - began, "network": network}


def _copy(network: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in network.state_dict().items()}


def _stream(world: World, settings: TrainSettings, seed: int) -> Stream:
    stream = draw_stream(settings.distribution, seed, num_models=len(settings.models) or len(world.models))
    return replace(stream, model=np.array(settings.models)[stream.model]) if settings.models else stream


def _batch(world: World, settings: TrainSettings, number: int) -> BatchedRamp:
    first = TRAINING_SEED + 10_000 * settings.seed + number * settings.streams
    streams = [_stream(world, settings, first + i) for i in range(settings.streams)]
    return BatchedRamp(world, streams, joint=settings.joint)


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
    batch = _batch(world, replace(settings, streams=settings.imitate), 900)
    teacher = replace(base, rollout=(30, 20))
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


def _collect(
    network: nn.Module,
    batch: BatchedRamp,
    seen: NDArray[np.float32],
    mask: NDArray[np.bool_],
    settings: TrainSettings,
) -> tuple[dict[str, Tensor], NDArray[np.float32], NDArray[np.bool_]]:
    """Decisions of all streams, and their advantages."""
    rows: dict[str, list[Any]] = {
        name: [] for name in ("seen", "mask", "model", "action", "log", "value", "reward")
    }
    with torch.no_grad():
        for _ in range(settings.steps):
            if batch.done:
                break
            x, m, g = torch.as_tensor(seen), torch.as_tensor(mask), torch.as_tensor(batch.model.copy())
            logits, value = network(x, m, g)
            draw = torch.distributions.Categorical(logits=logits)
            action = draw.sample()
            seen, mask, accepted = batch.step(action.numpy())
            reward = torch.as_tensor(2 * accepted - 1, dtype=torch.float32)
            for name, item in zip(rows, (x, m, g, action, draw.log_prob(action), value, reward), strict=True):
                rows[name].append(item)
        last = network(torch.as_tensor(seen), torch.as_tensor(mask), torch.as_tensor(batch.model.copy()))[1]
    values, rewards = torch.stack(rows["value"]), torch.stack(rows["reward"])
    gain, advantages = torch.zeros_like(last), torch.zeros_like(values)
    following = torch.zeros_like(last) if batch.done else last
    for t in range(len(values) - 1, -1, -1):  # GAE
        error = rewards[t] + settings.discount * following - values[t]
        gain = error + settings.discount * settings.smoothing * gain
        advantages[t], following = gain, values[t]
    data = {name: torch.cat(rows[name]) for name in ("seen", "mask", "model", "action", "log")}
    data |= {"advantage": advantages.flatten(), "target": (advantages + values).flatten()}
    return data, seen, mask


def _update(
    network: nn.Module, optimizer: torch.optim.Optimizer, data: dict[str, Tensor], settings: TrainSettings,
    rng: np.random.Generator,
) -> None:  # fmt: skip
    """Clipped surrogate, value and entropy."""
    advantage = (data["advantage"] - data["advantage"].mean()) / (data["advantage"].std() + 1e-8)
    for _ in range(settings.epochs):
        for part in torch.as_tensor(rng.permutation(len(advantage))).split(settings.minibatch):
            logits, value = network(data["seen"][part], data["mask"][part], data["model"][part])
            draw = torch.distributions.Categorical(logits=logits)
            ratio = torch.exp(draw.log_prob(data["action"][part]) - data["log"][part])
            clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
            surrogate = torch.min(ratio * advantage[part], clipped * advantage[part]).mean()
            value_loss = nn.functional.mse_loss(value, data["target"][part])
            loss = -surrogate + 0.05 * value_loss - settings.entropy * draw.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 0.5)
            optimizer.step()


def evaluate(
    network: nn.Module, world: World, streams: list[Stream], *, joint: bool = False
) -> NDArray[np.float64]:
    """Blocking of each stream under the most likely action."""
    batch = BatchedRamp(world, streams, joint=joint)
    seen, mask = batch.reset()
    accepted = np.zeros(len(streams))
    with torch.no_grad():
        while not batch.done:
            logits, _ = network(
                torch.as_tensor(seen), torch.as_tensor(mask), torch.as_tensor(batch.model.copy())
            )
            seen, mask, taken = batch.step(logits.argmax(dim=1).numpy())
            accepted += taken
    total = len(streams[0].model)
    return (total - 1 - accepted) / total
