"""Draws from Python's `random` and from NumPy in a forward pass or a loader: those of a plain loop."""

import random
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="training needs the extra [torch]")
from torch import nn  # noqa: E402

import loadmaster.train as lt  # noqa: E402
from loadmaster.shards.device.cpu_device import CpuDevice  # noqa: E402
from tests.train.lora_trials import lora  # noqa: E402

WIDTH = 16


class Chance(nn.Module):
    """Multiplies by what Python and NumPy draw, and drops."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, x: Any) -> Any:
        return self.drop(self.linear(x)) * (0.5 + random.random()) + float(np.random.normal())


def build() -> nn.Module:
    return nn.Sequential(Chance(), nn.Linear(WIDTH, WIDTH), Chance(), Chance())


def rows() -> Any:
    for _ in range(6):
        yield torch.full((4, WIDTH), random.gauss(0, 1)), torch.from_numpy(np.random.randn(4, WIDTH)).float()


def mse(out: Any, target: Any) -> Any:
    return (out - target).square().mean()


def sgd(weights: Any) -> Any:
    return torch.optim.SGD(weights, lr=0.02, momentum=0.9)


def plain() -> dict[str, Any]:
    """A loop as anybody writes it, after seeding everything."""
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    model = build()
    optimizer = sgd(model.parameters())
    for x, y in rows():
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
    return dict(model.state_dict())


def trial(**more: Any) -> lt.Trial:
    return lt.Trial(
        **({"name": "t", "build": build, "data": rows, "loss": mse, "optim": sgd, "seed": 3} | more)
    )


def test_random_and_numpy_in_forward_and_in_the_data_are_those_of_a_plain_loop() -> None:
    device = CpuDevice(cap_bytes=13_000)
    runner = lt.open_runner(trial(), device=device, num_threads=1)
    assert len(list(runner.steps(device, 99))) == 6
    found = runner.state_dict()
    assert runner.state.layout.num_shards > 2
    assert all(torch.equal(tensor, found[name]) for name, tensor in plain().items())
    runner.close()


def test_nobody_elses_draws_are_touched() -> None:
    device = CpuDevice(cap_bytes=13_000)
    random.seed(1)
    np.random.seed(1)
    before, other = random.getstate(), np.random.get_state()[1].tolist()
    runner = lt.open_runner(trial(), device=device, num_threads=1)
    list(runner.steps(device, 99))
    runner.close()
    assert (before, other) == (random.getstate(), np.random.get_state()[1].tolist())


def test_a_study_that_is_stopped_goes_on_with_the_draws_it_would_have_had(tmp_path: Any) -> None:
    class Stop:
        def on_step(self, name: str, done: Any) -> None:
            if done.step == 3:
                raise KeyboardInterrupt

    def study(*callbacks: Any) -> lt.Study:
        return lt.Study(
            trial(), dir=tmp_path, devices="cpu", memory_cap=13_000, checkpoint_every=1, callbacks=callbacks
        )

    with pytest.raises(KeyboardInterrupt):
        study(Stop()).fit()
    random.seed(99)
    found = study().fit()["t"].state_dict()
    assert all(torch.equal(tensor, found[name]) for name, tensor in plain().items())


@pytest.mark.parametrize("more", [{"accumulate": 2}, {"rng": "counter"}])
def test_counted_draws_are_those_of_the_reference(more: dict[str, Any]) -> None:
    device = CpuDevice(cap_bytes=13_000)
    runner = lt.open_runner(trial(**more), device=device, num_threads=1)
    losses = [done.loss for done in runner.steps(device, 99)]
    assert losses == list(lt.reference(trial(**more)).losses)
    runner.close()


def test_trials_of_a_group_have_draws_of_their_own() -> None:
    from loadmaster.train.backbone.group import open_group, steps

    class Jumpy(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Any) -> Any:
            return self.inner(x) * (0.5 + random.random())

    def made() -> nn.Module:
        first, *middle, last = lora("x").build().children()
        return nn.Sequential(first, *(Jumpy(each) for each in middle), last)

    def drawn(name: str, seed: int) -> lt.Trial:
        return lora(name, seed=seed, build=made)

    trials = [drawn("a", 1), drawn("b", 2)]
    device = CpuDevice(cap_bytes=1 << 20)
    group = open_group(trials, device=device, cuts=[0, 1, 3, 6])
    told: dict[str, list[float]] = {"a": [], "b": []}
    for step in steps(group, 4):
        for each in step:
            told[each.state.trial.name].append(each.loss)
    for one in trials:
        assert told[one.name] == list(lt.reference(one).losses)[:4]
    group.leave()
