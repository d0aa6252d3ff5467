"""Accumulated steps draw as the loop that everybody writes: dropout is equal to the bit."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import loadmaster.train as lt
from loadmaster.core.errors import InputError
from loadmaster.shards.device.cpu_device import CpuDevice
from loadmaster.train.disk.journal import Journal, read_journal
from tests.train.lora_trials import lora
from tests.train.small_trials import digest, trial
from tests.train.study.test_study import Stop


def loop(one: lt.Trial) -> str:
    """Plain PyTorch: seed, build, and every so many batches a step."""
    torch.manual_seed(one.seed)
    random.seed(one.seed)
    model = one.build().train()
    optimizer = one.optim(model.parameters())
    for _ in range(one.epochs):
        batches = list(one.data())
        for start in range(0, len(batches), one.accumulate):
            part = batches[start : start + one.accumulate]
            optimizer.zero_grad()
            for inputs, targets in part:
                (one.loss(model(inputs), targets) / len(part)).backward()
            optimizer.step()
    return digest(model.state_dict())


class Noisy(nn.Module):
    """Draws from torch and from Python."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * (1.0 + random.random()) + torch.randn_like(x) * 0.1


class DropLinear(nn.Linear):
    """One block that computes and draws."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), training=self.training)


def noisy() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), Noisy(), nn.Dropout(0.3), nn.BatchNorm1d(16), nn.Linear(16, 3))


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True)


@pytest.mark.parametrize("cap", [None, "16KiB"])
@pytest.mark.parametrize(("model", "num_batches"), [("small", 10), ("noisy", 9)])
@pytest.mark.parametrize("accumulate", [2, 4])
def test_accumulate_with_dropout_is_the_plain_loop(
    cap: str | None, model: str, num_batches: int, accumulate: int, tmp_path: Path
) -> None:
    more = {"build": noisy} if model == "noisy" else {}
    one = trial(
        "a",
        num_batches=num_batches,  # nine: the last step of an epoch has fewer
        accumulate=accumulate,
        optim=fused,
        evaluate=None,
        **more,
    )
    result = lt.Study([one], dir=tmp_path, devices="cpu", memory_cap=cap).fit()
    assert result["a"].error == ""
    assert digest(result["a"].state_dict()) == loop(one) == digest(lt.reference(one).state_dict)


def test_an_accumulated_trial_that_is_stopped_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    one = trial("a", accumulate=3, optim=fused, evaluate=None)
    with pytest.raises(KeyboardInterrupt):
        lt.Study([one], dir=tmp_path, devices="cpu", callbacks=[Stop(3, "interrupt")]).fit()
    result = lt.Study([one], dir=tmp_path, devices="cpu").fit()
    assert digest(result["a"].state_dict()) == loop(one)


def test_trials_on_one_backbone_that_accumulate_and_draw_are_the_plain_loop(tmp_path: Path) -> None:
    trials = [lora(name, accumulate=2) for name in "ab"]
    result = lt.Study(trials, dir=tmp_path, devices="cpu").fit()
    for one in trials:
        assert digest(result[one.name].state_dict()) == digest(lt.reference(one).state_dict)


def test_a_model_that_draws_nothing_still_passes_once_for_all_micro_batches() -> None:
    def still() -> nn.Module:
        return nn.Sequential(*(nn.Linear(6, 6) for _ in range(5)), nn.Linear(6, 3))

    def moved(build: Any, accumulate: int) -> int:
        from loadmaster.train.execute.runner import open_runner

        device = CpuDevice(cap_bytes=1 << 20)
        one = trial("a", build=build, accumulate=accumulate, evaluate=None)
        runner = open_runner(one, device=device, cuts=range(6), placement=["host"] * 6, num_slots=2)
        steps = list(runner.steps(device, 2))
        runner.close()
        device.close()
        return steps[-1].bytes_up

    def drawing() -> nn.Module:
        return nn.Sequential(DropLinear(6, 6), *list(still())[1:])

    assert moved(still, 4) == moved(still, 1) < moved(drawing, 4)


def test_a_study_begun_with_seeded_draws_goes_on_with_them(tmp_path: Path) -> None:
    """Journals of older versions do not say how numbers are drawn; accumulated steps were seeded then."""
    one = trial("a", accumulate=2, optim=fused, evaluate=None)
    seeded = trial("a", accumulate=2, optim=fused, evaluate=None, rng="counter")
    with pytest.raises(KeyboardInterrupt):
        lt.Study([seeded], dir=tmp_path, devices="cpu", callbacks=[Stop(3, "interrupt")]).fit()
    records = read_journal(tmp_path / "journal").records
    (tmp_path / "journal").unlink()
    journal = Journal(tmp_path / "journal")
    for record in records:
        facts = {key: value for key, value in record.items() if key not in ("seq", "kind")}
        if record["kind"] == "trial":
            facts["facts"] = {k: v for k, v in facts["facts"].items() if k != "drawn"} | {"rng": None}
        journal.append(record["kind"], **facts)
    journal.close()
    result = lt.Study([one], dir=tmp_path, devices="cpu").fit()
    assert digest(result["a"].state_dict()) == digest(lt.reference(seeded).state_dict) != loop(one)


def test_a_group_by_hand_refuses_what_it_would_draw_in_another_order() -> None:
    device = CpuDevice(cap_bytes=1 << 26)
    with pytest.raises(InputError, match="accumulates and draws random numbers"):
        lt.open_group([lora("a", accumulate=2)], device=device)
    device.close()


class Later(nn.Module):
    """Begins to draw after some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(6, 6), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return nn.functional.dropout(self.inner(x), training=self.calls > 12)


def test_a_model_that_begins_to_draw_in_accumulated_steps_is_refused_by_name(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(Later(), nn.Linear(6, 3))

    one = trial("a", build=build, accumulate=2, evaluate=None)
    result = lt.Study([one], dir=tmp_path, devices="cpu").fit()
    assert "trial 'a' draws random numbers that it did not draw when it was planned" in result["a"].error
