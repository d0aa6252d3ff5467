"""Training `learned_order`: first the answers of solvers, then reinforcement with the slicer in the loop.

Imitation: of two nodes of which the answer has one clearly earlier, the earlier one's key is lower (a
logistic loss on drawn pairs); for a step also the kind of device the answer uses. Reinforcement: keys with
normal noise are sliced and simulated; the reward is log(reference / time), the baseline the mean of the
samples of the same graph, and devices are drawn from the scores, so each decision has its own likelihood.
Fixed seeds give the same weights to the bit; a checkpoint is resumed to the same curve.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from loadmaster.core.errors import InputError
from loadmaster.core.plan import Plan
from loadmaster.core.run import ignore_progress
from loadmaster.placers.learned._order_network import NetworkSize, OrderNetwork, make_network, tensors_of
from loadmaster.placers.learned._proposals import learned_plans, look_at
from loadmaster.placers.learned._slicers import Sliced, StepSlicer
from loadmaster.placers.learned._weights import MOST_BYTES
from loadmaster.placers.learned.training.examples import Example

_PAIRS, _APART = 256, 0.02
_DEVICES_WEIGHT = 0.5
_KEPT_IMITATION = 0.5  # while it is reinforced
_SLOWER = 0.3  # the rate of reinforcement


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """`imitation` and `reinforcement`: updates of each; `batch` graphs an update."""

    imitation: int = 1500
    reinforcement: int = 300
    batch: int = 8
    samples: int = 8
    noise: float = 0.05
    learning_rate: float = 1e-3
    entropy: float = 0.002
    seed: int = 0
    width: int = 48
    rounds: int = 5

    def __post_init__(self) -> None:
        """Refuse what trains nothing."""
        for name in ("imitation", "reinforcement", "seed"):
            if getattr(self, name) < 0:
                raise InputError(f"{name} is {getattr(self, name)}; give a number >= 0")
        for name in ("batch", "samples", "width", "rounds"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; give a number >= 1")
        num_bytes = 4 * self.width**2 * (3 * self.rounds + 4)  # what is read later has a limit
        if num_bytes > MOST_BYTES:
            raise InputError(
                f"width {self.width} and {self.rounds} rounds make weights of {num_bytes} bytes; give less,"
                f" weights have at most {MOST_BYTES}"
            )


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The mean log ratio to the reference on held-out examples, after some updates."""

    update: int
    phase: str
    loss: float
    held_out: float
    seconds: float


class Trainer:
    """Weights in the making."""

    def __init__(self, settings: TrainSettings, examples: list[Example], held_out: list[Example]) -> None:
        if not examples:
            raise InputError("there are no examples to train on; draw more problems")
        self.settings, self.examples, self.held_out = settings, examples, held_out
        self.network = make_network(NetworkSize(settings.width, settings.rounds), settings.seed)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=settings.learning_rate)
        self.rng = np.random.default_rng([settings.seed, 41])
        self.update = 0
        self.seconds = 0.0
        self.curve: list[CurvePoint] = []
        self.best = (np.inf, _copy(self.network))
        self._seen: dict[int, dict[str, Tensor]] = {}

    @property
    def total(self) -> int:
        """Updates in all."""
        return self.settings.imitation + self.settings.reinforcement

    def run(
        self,
        *,
        most_s: float = np.inf,
        every: int = 100,
        checkpoint: Path | None = None,
        progress: Callable[[str, float], None] = ignore_progress,
    ) -> None:
        """Train to the end, or for so many seconds; the best weights on held-out examples are kept."""
        began, loss = time.perf_counter(), 0.0
        while self.update < self.total and time.perf_counter() - began < most_s:
            imitates = self.update < self.settings.imitation
            loss = self._step(self._imitate if imitates else self._reinforce)
            self.update += 1
            late = self.update == self.total or time.perf_counter() - began >= most_s
            if self.update % every == 0 or late:
                self._look("imitation" if imitates else "reinforcement", loss, began)
                if checkpoint is not None:
                    self.save_checkpoint(checkpoint)
                point = self.curve[-1]
                progress(
                    f"{point.phase}, update {self.update} of {self.total},"
                    f" held-out log ratio {point.held_out:+.4f}",
                    self.update / self.total,
                )

    def _look(self, phase: str, loss: float, began: float) -> None:
        value = mean_log_ratio(self.network, self.held_out) if self.held_out else 0.0
        self.curve.append(CurvePoint(self.update, phase, loss, value, time.perf_counter() - began))
        if value < self.best[0] or not self.held_out:
            self.best = (value, _copy(self.network))

    def _step(self, of_example: Callable[[Example], Tensor | None]) -> float:
        share = self.update / max(self.total, 1)
        rate = self.settings.learning_rate * (1.0 if of_example == self._imitate else _SLOWER)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * (1.0 - 0.9 * share)  # to a tenth, step by step
        chosen = self.rng.integers(0, len(self.examples), self.settings.batch)
        losses = [one for at in chosen.tolist() if (one := of_example(self.examples[at])) is not None]
        if not losses:
            return 0.0
        loss = torch.stack(losses).mean()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        return float(loss.detach())

    def _tensors(self, example: Example) -> dict[str, Tensor]:
        if id(example) not in self._seen:
            self._seen[id(example)] = tensors_of(example.scene)
        return self._seen[id(example)]

    def _imitate(self, example: Example) -> Tensor | None:
        num = example.scene.num_nodes
        if num < 2:
            return None
        return self._imitation_loss(example, *self.network(self._tensors(example)))

    def _imitation_loss(self, example: Example, key: Tensor, score: Tensor) -> Tensor:
        num = example.scene.num_nodes
        one, other = self.rng.integers(0, num, _PAIRS), self.rng.integers(0, num, _PAIRS)
        gap = example.place[other] - example.place[one]
        apart = np.abs(gap) > _APART
        loss = torch.zeros(())
        if apart.any():
            sign = torch.from_numpy(np.sign(gap[apart]).astype(np.float32))
            wide = key[torch.from_numpy(other[apart])] - key[torch.from_numpy(one[apart])]
            loss = nn.functional.softplus(-8.0 * sign * wide).mean()
        if (example.device >= 0).all() and example.alike.max() > 0:
            loss = loss + _DEVICES_WEIGHT * _kind_loss(score, example)
        return loss

    def _reinforce(self, example: Example) -> Tensor | None:
        settings = self.settings
        key, score = self.network(self._tensors(example))
        mean, scores = key.detach().numpy().astype(np.float64), score.detach().numpy().astype(np.float64)
        noises, rows, times = [], [], []
        for at in range(settings.samples):
            noise = self.rng.normal(0.0, settings.noise, len(mean))
            row = None
            if isinstance(example.slicer, StepSlicer) and at % 2:
                row = example.slicer.wish(scores, self.rng)
            sliced = (
                example.slicer.slice(mean + noise) if row is None else _slice_on(example, mean + noise, row)
            )
            noises.append(noise)
            rows.append(row)
            times.append(np.inf if sliced is None else time_of(example, sliced))
        known = np.array(times)
        if not np.isfinite(known).any():
            return None
        known = np.where(np.isfinite(known), known, 3.0 * known[np.isfinite(known)].max())
        gain = np.log(example.usual_s / known)
        loss = torch.zeros(())
        log_share = torch.log_softmax(score, dim=1)
        for half in (False, True):  # rows that were wished for have a baseline of their own
            part = [at for at in range(settings.samples) if (rows[at] is not None) == half]
            if len(part) < 2 or float(np.std(gain[part])) < 1e-9:
                continue
            edge = (gain[part] - gain[part].mean()) / (gain[part].std() + 1e-8)
            for at, value in zip(part, edge.tolist(), strict=True):
                taken = torch.from_numpy((mean + noises[at]).astype(np.float32))
                chance = -0.5 * ((taken - key) / settings.noise).square().mean()
                row = rows[at]
                if row is not None:
                    device = torch.from_numpy(row[_nodes(example).groups.cargo.of_op].astype(np.int64))
                    chance = chance + log_share.gather(1, device[:, None]).mean()
                loss = loss - value * chance / len(part)
        spread = -(log_share.exp() * log_share.clamp(min=-30.0)).sum(dim=1).mean()
        return loss - settings.entropy * spread + _KEPT_IMITATION * self._imitation_loss(example, key, score)

    def save_checkpoint(self, path: Path) -> None:
        """Everything a later run needs to go on to the same curve."""
        from loadmaster.modules.tensor_files import write_tensors

        state = {f"network.{k}": v for k, v in self.network.state_dict().items()}
        state |= {f"best.{k}": v for k, v in self.best[1].items()}
        for at, slot in self.optimizer.state_dict()["state"].items():
            state |= {f"optimizer.{at}.{k}": torch.as_tensor(v) for k, v in slot.items()}
        about = {
            "settings": asdict(self.settings),
            "update": self.update,
            "best": None if np.isinf(self.best[0]) else self.best[0],
            "rng": self.rng.bit_generator.state,
            "curve": [asdict(point) for point in self.curve],
        }
        state["about"] = torch.frombuffer(bytearray(json.dumps(about).encode()), dtype=torch.uint8)
        partial = path.with_name(f".{path.name}.part")
        write_tensors(partial, {k: v.contiguous() for k, v in state.items()})
        partial.replace(path)

    def load_checkpoint(self, path: Path) -> None:
        """Go on from a checkpoint of the same settings."""
        from loadmaster.modules.tensor_files import read_tensors

        state = read_tensors(path)
        try:
            about = json.loads(bytes(state.pop("about").numpy()).decode())
            settings, update = about["settings"], int(about["update"])
        except (KeyError, ValueError, UnicodeDecodeError, AttributeError):
            raise InputError(f"{path} is not a checkpoint of this training; name another file") from None
        if settings != asdict(self.settings):
            raise InputError(
                f"{path} was written with other settings ({settings});"
                " use the same settings, or start again without --resume"
            )
        self.network.load_state_dict(_part(state, "network."))
        self.best = (np.inf if about["best"] is None else about["best"], _part(state, "best."))
        slots: dict[int, dict[str, Any]] = {}
        for name, value in _part(state, "optimizer.").items():
            at, _, field = name.partition(".")
            slots.setdefault(int(at), {})[field] = value
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": slots})
        self.rng.bit_generator.state = about["rng"]
        self.update, self.curve = update, [CurvePoint(**point) for point in about["curve"]]


def _part(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _copy(network: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in network.state_dict().items()}


def _kind_loss(score: Tensor, example: Example) -> Tensor:
    """Cross-entropy of kinds: the chance of a kind is that of all its devices together."""
    share = torch.softmax(score, dim=1)
    alike = torch.from_numpy(example.alike.astype(np.int64))
    of_kind = torch.zeros(len(share), int(alike.max()) + 1).index_add_(1, alike, share)
    taken = of_kind.gather(1, torch.from_numpy(example.device.astype(np.int64))[:, None])
    return -torch.log(taken.clamp(min=1e-9)).mean()


def _nodes(example: Example) -> StepSlicer:
    assert isinstance(example.slicer, StepSlicer)
    return example.slicer


def _slice_on(example: Example, key: "np.typing.NDArray[np.float64]", row: Any) -> Sliced | None:
    return _nodes(example).slice(key, row)


def time_of(example: Example, sliced: Sliced) -> float:
    """The time of a plan as the simulator has it, stretched where it does not fit."""
    plan: Plan = sliced.plan
    return example.groups.penalised_s(example.simulator.score(plan))


def zero_shot(network: OrderNetwork, example: Example) -> float:
    """The time of the network's own plan, with nothing evaluated and no usual order beside it."""
    found = learned_plans(example.slicer, look_at(network, example.slicer, example.scene))
    return time_of(example, found[0].sliced) if found else np.inf


def mean_log_ratio(network: OrderNetwork, examples: list[Example]) -> float:
    """Mean of log(time / usual) of zero-shot plans; below zero is better than what nobody learned."""
    values = [np.log(min(zero_shot(network, one), 10.0 * one.usual_s) / one.usual_s) for one in examples]
    return float(np.mean(values))
