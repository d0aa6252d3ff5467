"""Small trials, and the loop everybody knows as their witness."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from loadmaster.shards.spec.trial import Trial


class Rows:
    """Batches of random rows, the same in every run; shuffled by torch's global generator, as loaders do."""

    def __init__(self, num_batches: int = 10, *, seed: int = 0) -> None:
        made = torch.Generator().manual_seed(seed)
        self._x = torch.randn(num_batches, 4, 6, generator=made)
        self._y = torch.randint(0, 3, (num_batches, 4), generator=made)

    def __len__(self) -> int:
        return len(self._x)

    def __iter__(self) -> Any:
        for at in torch.randperm(len(self._x)).tolist():
            yield self._x[at], self._y[at]


def build() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    )


def optim(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def score(model: Any) -> dict[str, float]:
    rows = Rows(2, seed=99)
    with torch.no_grad():
        loss = sum(
            nn.functional.cross_entropy(model(x), y).item() for x, y in zip(rows._x, rows._y, strict=True)
        )
    return {"loss": loss / 2}


def trial(name: str, *, lr: float = 1e-2, num_batches: int = 10, **more: Any) -> Trial:
    given: dict[str, Any] = {
        "build": build,
        "loss": nn.functional.cross_entropy,
        "data": lambda: Rows(num_batches),
        "optim": lambda ps: torch.optim.AdamW(ps, lr=lr),
        "epochs": 2,
        "evaluate": score,
        "eval_every": 5,
        "seed": 1,
    }
    return Trial(name=name, **(given | more))


def digest(state: Mapping[str, torch.Tensor]) -> str:
    """A hash of all weights."""
    found = hashlib.sha256()
    for name in sorted(state):
        found.update(name.encode() + state[name].detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def plainly(one: Trial) -> str:
    """The weights' hash after the loop everybody writes, with the seeds that trials use."""
    from tests.train.feed import epoch_seed

    torch.manual_seed(one.seed)
    model = one.build()
    optimizer = one.optim(model.parameters())
    schedule = one.lr_schedule(optimizer) if one.lr_schedule else None
    done = 0
    for epoch in range(10**6 if one.max_steps else one.epochs):
        kept = torch.get_rng_state()
        torch.manual_seed(epoch_seed(one.seed, epoch))
        batches = list(one.data())
        torch.set_rng_state(kept)
        for inputs, targets in batches:
            optimizer.zero_grad()
            one.loss(model(inputs), targets).backward()
            optimizer.step()
            if schedule:
                schedule.step()
            done += 1
            if done == one.max_steps:
                return digest(model.state_dict())
    return digest(model.state_dict())
