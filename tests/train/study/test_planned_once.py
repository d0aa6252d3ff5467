"""A study plans a trial once, builds it once, and executes the plan it made."""

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from loadmaster.shards.plan import partition
from loadmaster.shards.spec.trial import Trial
from loadmaster.train.plain_loop import reference
from loadmaster.train.shard_engine import ShardEngine
from loadmaster.train.study import Study
from tests.train.lora_trials import lora
from tests.train.small_trials import Rows, digest

EPOCHS = 2


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def scaled() -> nn.Module:
    """It cannot be built on meta: a weight is changed after its reset."""
    model = plain()
    with torch.no_grad():
        model[0].weight.mul_(2.0)  # type: ignore[operator, union-attr]
    return model


def counting(note: Any, build: Any = plain, name: str = "a", **more: Any) -> Trial:
    """A trial whose functions note that they are called."""

    def noted(kind: str, function: Any) -> Any:
        def call(*given: Any) -> Any:
            note(kind)
            return function(*given)

        return call

    given: dict[str, Any] = {
        "build": noted("build", build),
        "optim": noted("optim", lambda ps: torch.optim.AdamW(ps, lr=1e-2)),
        "data": noted("data", Rows),
        "lr_schedule": noted("schedule", lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3)),
        "loss": nn.functional.cross_entropy,
        "epochs": EPOCHS,
        "seed": 1,
    }
    return Trial(name=name, **(given | more))


def in_file(path: Path) -> Any:
    """Notes that other processes can make, too."""

    def note(kind: str) -> None:
        with path.open("a") as file:
            file.write(f"{kind}\n")

    return note


@pytest.mark.parametrize("verify", ["first-step", False])
def test_a_trial_is_built_once_and_its_optimizer_made_to_plan_and_to_train(
    verify: Any, tmp_path: Path
) -> None:
    """The check of the first step runs the model that is trained, on copies of its weights."""
    calls: Counter[str] = Counter()

    def note(kind: str) -> None:
        calls[kind] += 1

    one = counting(note, verify=verify)
    study = Study(one, dir=tmp_path, devices="cpu")
    study.plan()
    assert calls == {"build": 1, "optim": 1, "schedule": 1, "data": 1}
    result = study.fit()
    assert calls == {"build": 1, "optim": 2, "schedule": 2, "data": 1 + EPOCHS}
    assert digest(result["a"].state_dict()) == digest(reference(one).state_dict)


def test_a_lone_model_with_weights_is_kept_where_it_trains_at_once(tmp_path: Path) -> None:
    calls: Counter[str] = Counter()

    def note(kind: str) -> None:
        calls[kind] += 1

    one = counting(note, scaled)
    result = Study(one, dir=tmp_path / "at once", devices="cpu").fit()
    assert calls["build"] == 2  # on meta, which fails, and for real
    assert digest(result["a"].state_dict()) == digest(reference(one).state_dict)
    calls.clear()
    study = Study(one, dir=tmp_path / "later", devices="cpu")
    study.plan()
    assert not study.engine()._built  # type: ignore[attr-defined]
    study.fit()
    assert calls == {"build": 2 + 1, "optim": 2, "schedule": 2, "data": 1 + EPOCHS}


def test_models_with_weights_of_several_trials_do_not_wait_in_memory(tmp_path: Path) -> None:
    calls: Counter[str] = Counter()

    def note(kind: str) -> None:
        calls[kind] += 1

    trials = [counting(note, scaled, name) for name in ("a", "b")]
    Study(trials, dir=tmp_path, devices="cpu").fit()
    assert calls == {"build": 2 * (2 + 1), "optim": 2 * 2, "schedule": 2 * 2, "data": 2 * (1 + EPOCHS)}


@pytest.mark.slow
def test_a_worker_in_another_process_builds_once_and_does_not_plan(tmp_path: Path) -> None:
    for build, tried in ((plain, 0), (scaled, 1)):
        path = tmp_path / build.__name__
        trial = counting(in_file(path), build)
        Study(trial, dir=tmp_path / f"{build.__name__} study", devices="cpu", launcher="processes").fit()
        calls = Counter(path.read_text().split())
        assert calls == {"build": tried + 2, "optim": 2, "schedule": 2, "data": 1 + EPOCHS}


def test_the_plan_of_a_study_is_the_one_that_is_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    class Seen(ShardEngine):
        def open_runner(self, trial: Trial, device: Any, plan: Any = None) -> Any:
            runner = super().open_runner(trial, device, plan)
            opened.append(runner)
            return runner

    study = Study(counting(lambda kind: None), dir=tmp_path, devices="cpu", engine=Seen())
    plan = study.plan()

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("it was planned already")

    monkeypatch.setattr("loadmaster.train.execute.runner.make_plan", refuse)
    monkeypatch.setattr(partition, "make_plan", refuse)
    study.fit()
    assert [runner.plan for runner in opened] == [plan.trials[0].detail.plan]


def test_a_plan_can_be_sent_to_a_worker(tmp_path: Path) -> None:
    plan = Study(counting(lambda kind: None), dir=tmp_path, devices="cpu").plan().trials[0]
    sent = pickle.loads(pickle.dumps(plan))
    assert sent.detail.plan.placement == plan.detail.plan.placement
    assert sent.detail.plan.layout.cuts == plan.detail.plan.layout.cuts
    assert sent.detail.record.probe.options == plan.options


def frozen() -> nn.Module:
    """Most of it is frozen: its numbers are compared with those of other trials, so that meta will not do."""
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 3))
    for parameter in model[:3].parameters():
        parameter.requires_grad_(False)
    return model


@pytest.mark.parametrize("build", [frozen, lora("t").build])
def test_members_of_a_group_are_built_as_often_as_others(build: Any, tmp_path: Path) -> None:
    calls: Counter[str] = Counter()

    def counted() -> nn.Module:
        calls["build"] += 1
        model: nn.Module = build()
        return model

    if build is frozen:
        trials = [counting(lambda kind: None, name=name, build=counted) for name in ("t0", "t1")]
    else:
        trials = [lora(f"t{number}", seed=number, build=counted) for number in range(2)]
    result = Study(trials, dir=tmp_path, devices="cpu", memory_cap=1 << 20).fit()
    assert calls["build"] == 2 * (2 + 1)  # on meta, for real, and when it is its turn
    for trial in trials:
        assert digest(result[trial.name].state_dict()) == digest(reference(trial).state_dict)
