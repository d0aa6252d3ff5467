"""Studies on the shard engine: models in shards, equal to `lt.reference` to the bit, also after stops."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from loadmaster.core.errors import DeviceMemoryError
from loadmaster.shards.spec.trial import Trial
from loadmaster.train.coordination.searchers import SuccessiveHalving
from loadmaster.train.plain_loop import reference
from loadmaster.train.study import Study
from tests.train.small_trials import Rows, digest, score
from tests.train.study.test_study import Stop

CAP = "18KiB"  # below what the models of these tests take whole
ROOT = Path(__file__).resolve().parents[3]


def build() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16),
        nn.BatchNorm1d(16),
        nn.Tanh(),
        nn.Dropout(0.2),
        *(nn.Linear(16, 16) for _ in range(6)),
        nn.Linear(16, 3),
    )


def trial(name: str, *, lr: float = 1e-2, kind: Any = torch.optim.AdamW, **more: Any) -> Trial:
    given: dict[str, Any] = {"data": Rows, "epochs": 2, "seed": 1, "evaluate": score, "eval_every": 5}
    given |= {"build": build, "loss": nn.functional.cross_entropy, "optim": lambda ps: kind(ps, lr=lr)}
    return Trial(name=name, **(given | more))


def study(folder: Path, trials: list[Trial], **options: Any) -> Study:
    given = {"devices": "cpu", "memory_cap": CAP, "checkpoint_every": 3, "optimizer_placement": "device"}
    return Study(trials, dir=folder, **(given | options))


def steps(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


TRIALS = [
    trial("adamw"),
    trial("momentum", kind=lambda ps, lr: torch.optim.SGD(ps, lr=lr, momentum=0.9), lr=0.1),
    trial("schedule", lr_schedule=steps),
    trial("clipped", clip_norm=0.5),
    trial("accumulated", accumulate=3),
]


@pytest.mark.parametrize("num_devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_trial_ends_with_the_weights_of_the_reference(num_devices: int, tmp_path: Path) -> None:
    devices = ["cpu#0", "cpu#1"][:num_devices]
    result = study(tmp_path, TRIALS, devices=devices, launcher="inline").fit()
    for one in TRIALS:
        assert result[one.name].error == ""
        assert digest(result[one.name].state_dict()) == digest(reference(one).state_dict)


@pytest.mark.slow
@pytest.mark.parametrize("after", [8, 41])
def test_a_stop_anywhere_ends_in_the_same_weights(after: int, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        study(tmp_path, TRIALS, callbacks=[Stop(after, "interrupt")]).fit()
    result = study(tmp_path, TRIALS).fit()
    for one in TRIALS:
        assert digest(result[one.name].state_dict()) == digest(reference(one).state_dict)


@pytest.mark.slow
def test_twenty_kills_of_sharded_training_resume_to_the_same_weights(tmp_path: Path) -> None:
    wanted = [digest(reference(one).state_dict) for one in TRIALS[:2]]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "tests.train.killer", str(tmp_path), "20"]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [hashes for _, *hashes in lines] == [wanted] * 20
    assert len({records for records, *_ in lines}) > 5  # they died at different points


def test_the_optimizer_may_be_on_the_host_and_resume_there(tmp_path: Path) -> None:
    one = trial("a")
    whole = study(tmp_path / "whole", [one], optimizer_placement="host").fit()
    with pytest.raises(KeyboardInterrupt):
        study(tmp_path, [one], optimizer_placement="host", callbacks=[Stop(7, "interrupt")]).fit()
    result = study(tmp_path, [one], optimizer_placement="host").fit()
    assert digest(result["a"].state_dict()) == digest(whole["a"].state_dict())


@pytest.mark.slow
def test_halving_over_sharded_trials(tmp_path: Path) -> None:
    given = [trial(f"lr{lr}", lr=lr, eval_every=None) for lr in (0.1, 0.01, 0.0001)]
    result = study(tmp_path, given, searcher=SuccessiveHalving(eta=3)).fit()
    best = next(one for one in given if one.name == result.best.name)
    assert digest(result.best.state_dict()) == digest(reference(best).state_dict)
    assert sorted(each.step for each in result.trials) == [6, 6, 20]


def test_a_cap_that_is_too_small_is_said_before_the_start(tmp_path: Path) -> None:
    big = trial("big", build=lambda: nn.Sequential(nn.Linear(6, 400), nn.Linear(400, 400), nn.Linear(400, 3)))
    with pytest.raises(DeviceMemoryError, match="trial 'big' needs"):
        study(tmp_path, [big, trial("a")]).plan()


def test_the_plan_says_shards_bytes_and_time(tmp_path: Path) -> None:
    plan = study(tmp_path, TRIALS).plan()
    assert all(each.num_shards > 1 for each in plan.trials)
    assert all(each.host_bytes > each.state_bytes > 0 for each in plan.trials)
    assert "adamw" in str(plan)
    assert not list(tmp_path.iterdir())


def wide(name: str, **more: Any) -> Trial:
    layers = [nn.Linear(6, 64), *(nn.Linear(64, 64) for _ in range(5)), nn.Linear(64, 3)]
    return trial(
        name, build=lambda: nn.Sequential(*(type(x)(x.in_features, x.out_features) for x in layers)), **more
    )


class Tight(nn.Module):
    """Asks the device for more than there is, in the middle of a step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) is not torch.Tensor:  # the planner looks at the model without running it
            return x[:, :3] * 1.0
        raise DeviceMemoryError("cpu: no room")


@pytest.mark.slow
def test_trials_that_do_not_fit_on_a_device_together_take_turns(tmp_path: Path) -> None:
    given = [wide(f"t{at}", seed=at) for at in range(4)]
    result = study(tmp_path, given, memory_cap="220KiB").fit()
    for one in given:
        assert result[one.name].error == ""
        assert digest(result[one.name].state_dict()) == digest(reference(one).state_dict)


@pytest.mark.slow
def test_what_a_failed_trial_took_of_the_device_is_free_for_the_others(tmp_path: Path) -> None:
    bad = trial("bad", build=lambda: nn.Sequential(nn.Linear(6, 6), Tight()))
    given = [wide("a"), wide("b", seed=2)]
    result = study(tmp_path, [*given, bad], memory_cap="220KiB").fit()
    assert result["bad"].error_kind == "memory"
    for one in given:
        assert digest(result[one.name].state_dict()) == digest(reference(one).state_dict)


@pytest.mark.parametrize("frozen", [(10,), (4, 5, 6, 7, 8, 9), (6, 10)])
def test_frozen_shards_after_the_last_that_is_trained_are_planned_under_every_cap(
    tmp_path: Path, frozen: tuple[int, ...]
) -> None:
    def part() -> nn.Module:
        model = build()
        for at in frozen:
            model[at].requires_grad_(False)
        return model

    for kind in (torch.optim.SGD, torch.optim.AdamW):
        for cap in range(8, 30, 3):
            each = trial("frozen", build=part, kind=kind)
            options = {"memory_cap": f"{cap}KiB", "optimizer_placement": "auto"}
            assert study(tmp_path, [each], **options).plan().trials[0].num_steps > 0


def test_where_state_has_no_room_on_the_device_the_host_steps_all(tmp_path: Path) -> None:
    least = {}
    for wish in ("device", "host", "auto"):
        with pytest.raises(DeviceMemoryError, match="needs") as refusal:
            study(tmp_path / wish, [trial("t")], memory_cap="1KiB", optimizer_placement=wish).plan()
        least[wish] = float(str(refusal.value).split("needs ")[1].split(" KiB")[0])
    assert least["auto"] == least["host"] < least["device"]
    cap = f"{(least['host'] + least['device']) / 2}KiB"
    found = study(tmp_path, [trial("t")], memory_cap=cap, optimizer_placement="auto").fit()
    assert str(found["t"].status) == "done"
