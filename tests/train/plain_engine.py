"""An engine that trains plainly, the whole model in memory: what studies are tested with on their own.

`Plain()` counts open runners and devices, so that tests can see memory given back.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from loadmaster.core.errors import InputError
from loadmaster.shards.model.loaders import open_source
from loadmaster.shards.spec.engine import TrialPlan
from loadmaster.shards.spec.trial import Trial
from tests.train.feed import Feed


class Done(NamedTuple):
    step: int
    epoch: int
    loss: float
    num_tokens: int
    seconds: float
    bytes_up: int
    bytes_down: int
    spans: tuple[tuple[str, str, float, float], ...]


class PlainRunner:
    def __init__(self, trial: Trial, num_steps: int) -> None:
        self.trial, self.step, self._num_steps = trial, 0, num_steps
        before = torch.get_rng_state()
        torch.manual_seed(trial.seed)
        self._model = trial.build()
        self._rng = torch.get_rng_state()
        torch.set_rng_state(before)
        self._optim = trial.optim(self._model.parameters())
        self._schedule = trial.lr_schedule(self._optim) if trial.lr_schedule else None
        self._feed = Feed(trial.data, trial=trial.name, seed=trial.seed)
        self._batches: Iterator[Any] = iter(())
        self.closed = False

    def steps(self, device: Any, num_steps: int, *, after: Any = None) -> Iterator[Done]:
        for _ in range(num_steps):
            if self.step >= self._num_steps:
                return
            began = time.perf_counter()
            epoch = self._feed.epoch
            inputs, targets = self._next()
            before = torch.get_rng_state()
            torch.set_rng_state(self._rng)
            self._optim.zero_grad()
            loss = self.trial.loss(self._model(inputs), targets)
            loss.backward()
            self._optim.step()
            if self._schedule:
                self._schedule.step()
            self._rng = torch.get_rng_state()
            torch.set_rng_state(before)
            self.step += 1
            ended = time.perf_counter()
            spans = (("compute", f"step {self.step}", began, ended),)
            yield Done(self.step, epoch, loss.item(), len(targets), ended - began, 10, 5, spans)

    def _next(self) -> Any:
        batch = next(self._batches, None)
        while batch is None:
            self._batches = self._feed.batches()
            batch = next(self._batches, None)
        return batch

    def evaluate(self, device: Any) -> dict[str, float]:
        assert self.trial.evaluate is not None
        self._model.eval()
        try:
            return dict(self.trial.evaluate(self._model))
        finally:
            self._model.train()

    def snapshot(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        tensors = {f"model.{k}": v for k, v in self._model.state_dict().items()}
        counts = {}
        states = self._optim.state_dict()["state"]
        for index, state in states.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"optim.{index}.{key}"] = value
                elif value is not None:
                    counts[f"{index}.{key}"] = value
        tensors["rng"] = self._rng
        facts: dict[str, Any] = {"step": self.step, "feed": self._feed.position(), "counts": counts}
        if self._schedule:
            facts["schedule"] = {
                k: v for k, v in self._schedule.state_dict().items() if isinstance(v, int | float | list)
            }
            facts["lr"] = [group["lr"] for group in self._optim.param_groups]
        return tensors, facts

    def restore(self, tensors: Any, facts: Any) -> None:
        self._model.load_state_dict({k[6:]: v for k, v in tensors.items() if k.startswith("model.")})
        state: dict[int, dict[str, Any]] = {}
        for name, value in tensors.items():
            if name.startswith("optim."):
                _, index, key = name.split(".", 2)
                state.setdefault(int(index), {})[key] = value.clone()
        self._optim.load_state_dict(
            {"state": state, "param_groups": self._optim.state_dict()["param_groups"]}
        )
        self._rng = tensors["rng"].clone()
        if self._schedule:
            self._schedule.load_state_dict(facts["schedule"])
            for group, lr in zip(self._optim.param_groups, facts["lr"], strict=True):
                group["lr"] = lr
        self.step = facts["step"]
        self._feed.seek(facts["feed"])
        self._batches = iter(())

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self._model.state_dict())

    def remaining_s(self) -> float:
        return (self._num_steps - self.step) * 1e-3

    def close(self) -> None:
        self.closed = True


@dataclass
class Plain:
    """Devices are names; `sizes` are host bytes of trials."""

    num_devices: int = 1
    sizes: dict[str, int] = field(default_factory=dict)
    opened: list[PlainRunner] = field(default_factory=list)

    def device_names(self, devices: str | Sequence[str]) -> list[str]:
        if devices != "auto" and isinstance(devices, str):
            raise InputError(f"unknown devices {devices!r}")
        return list(devices) if devices != "auto" else [f"cpu#{at}" for at in range(self.num_devices)]

    def open_device(self, name: str) -> str:
        return name

    def open_runner(self, trial: Trial, device: Any, plan: TrialPlan | None = None) -> PlainRunner:
        self.opened.append(PlainRunner(trial, self._num_steps(trial)))
        return self.opened[-1]

    def _num_steps(self, trial: Trial) -> int:
        return trial.max_steps or trial.epochs * len(trial.data())  # type: ignore[arg-type]

    def plan_trial(self, trial: Trial, device_names: Sequence[str]) -> TrialPlan:
        open_source(trial.data, trial=trial.name)
        return TrialPlan(
            trial=trial.name,
            num_steps=self._num_steps(trial),
            step_s=1e-3,
            host_bytes=self.sizes.get(trial.name, 1000),
            state_bytes=1000,
            load_s=1e-4,
        )
