"""A plain step that is timed leaves no trace, and what is made of its seconds is arithmetic."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import loadmaster.train as lt
from loadmaster.shards.model.built_model import BuiltModel, build_trial
from loadmaster.shards.plan.partition import make_plan
from loadmaster.shards.plan.rates import SIMULATED
from loadmaster.shards.plan.sizes import measure_sizes
from loadmaster.train.execute import timed_step
from loadmaster.train.execute.machine_pace import MachinePace
from loadmaster.train.execute.timed_step import PlainStep, predict_step_s, time_plain_step

_WIDTH, _LAYERS = 64, 8
_NO_PACE = MachinePace(0.0, 0.0, 0.0, 1e9)


class Counting(nn.Module):
    """Counts its calls, draws, and keeps an average."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.calls = nn.Linear(8, 8), nn.BatchNorm1d(8), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return nn.functional.dropout(self.norm(self.one(x)) * random.random() * np.random.rand())


def make(build: Any, rows: torch.Tensor, **more: Any) -> BuiltModel:
    given: dict[str, Any] = {"data": lambda: [(rows, rows)], "loss": nn.functional.mse_loss} | more
    trial = lt.Trial(name="t", build=build, optim=lambda weights: torch.optim.AdamW(weights, lr=0.1), **given)
    return build_trial(trial, device=torch.device("cpu"))


def wide(*, own_forward: bool = False) -> BuiltModel:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(build())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    rows = torch.randn(16, _WIDTH)
    if not own_forward:
        return make(build, rows)
    return make(Own, rows, data=lambda: [{"x": rows}], loss=None)


def test_a_plain_step_is_timed_and_leaves_no_trace() -> None:
    built = make(Counting, torch.randn(4, 8))
    model = built.chain.model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]
    found = time_plain_step(built)
    assert found is not None
    assert min(found.forward_s, found.backward_s, found.update_s, found.host_update_s) > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.calls == 0
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert random.getstate() == drawn[1]
    assert np.random.get_state()[1].tolist() == drawn[2]  # type: ignore[index,union-attr]


def test_a_model_without_memory_is_timed_on_numbers_of_its_own() -> None:
    built = wide()
    assert built.empty
    assert time_plain_step(built) is not None
    assert all(not any(parameter.stride()) for parameter in built.chain.parameters)  # still none held


def test_what_would_take_long_or_fails_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    built = make(lambda: nn.Sequential(nn.Linear(8, 8)), torch.randn(4, 8))
    broken = replace(built, batch=(torch.randn(4, 3), torch.randn(4, 8)))
    assert time_plain_step(broken) is None
    assert time_plain_step(replace(built, batch=None)) is None
    monkeypatch.setattr(timed_step, "_MOST_FLOPS", 1.0)
    assert time_plain_step(built) is None


@pytest.mark.parametrize("own_forward", [False, True])
def test_seconds_of_a_step_by_shards_are_those_of_the_plain_step_and_what_runs_again(
    own_forward: bool,
) -> None:
    built = wide(own_forward=own_forward)
    plain = PlainStep(forward_s=1.0, backward_s=2.0, update_s=0.5, host_update_s=0.0)
    sizes = measure_sizes(built)
    whole = make_plan(built, cap_bytes=1 << 30, rates=SIMULATED)
    assert predict_step_s(built, whole, sizes, plain, _NO_PACE) == pytest.approx(3.5, rel=1e-3)
    small = make_plan(built, cap_bytes=whole.peak_bytes // 2, rates=SIMULATED)
    taken = predict_step_s(built, small, sizes, plain, _NO_PACE)
    twice = small.layout.recompute
    if own_forward:
        again = sum(twice) / _LAYERS if twice else 0.0
    else:
        assert small.layout.num_shards > 1
        again = small.layout.cuts[-1][0] / _LAYERS  # every block before the last shard
    numel = [sum(sizes.numel[n] for n in piece.parameters) for piece in small.layout.pieces]
    on_host = sum(n for n, where in zip(numel, small.placement, strict=True) if where == "host") / sum(numel)
    assert taken == pytest.approx(3.0 + again + 0.5 * (1 - on_host), rel=1e-2)
    slow = MachinePace(0.0, 0.0, 0.0, 1e9, beside_step_s=10.0)
    assert predict_step_s(built, small, sizes, plain, slow) == pytest.approx(taken + 10.0)
