"""Predicted times come from this machine; plans do not."""

from pathlib import Path

import pytest
import torch

import loadmaster.train as lt
from loadmaster.train.execute import machine_pace, timed_step
from loadmaster.train.execute.machine_pace import MachinePace
from tests.train.small_trials import trial


def test_a_study_on_a_cpu_is_predicted_at_the_pace_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = lt.Study([trial("a"), trial("b")], dir=tmp_path / "run", devices="cpu")
    plan = study.plan()
    assert "from rates measured on this machine" in str(plan)
    monkeypatch.setattr(
        machine_pace, "measure_machine_pace", lambda: MachinePace(1.0, 0.0, 0.0, float("inf"))
    )
    monkeypatch.setattr(timed_step, "_MOST_FLOPS", 0.0)  # no step is run to see what it takes
    slow = lt.Study([trial("a"), trial("b")], dir=tmp_path / "slow", devices="cpu").plan()
    assert [each.step_s for each in slow.trials] == [1.0, 1.0]
    assert slow.makespan_s == pytest.approx(40.0)
    for before, after in zip(plan.trials, slow.trials, strict=True):  # the bits hang on the plan
        assert before.detail.plan.placement == after.detail.plan.placement
        assert before.detail.plan.layout.cuts == after.detail.plan.layout.cuts


def test_ops_of_a_model_are_counted_and_measuring_draws_nothing() -> None:
    before = torch.get_rng_state()
    pace = machine_pace.measure_machine_pace()
    assert torch.equal(torch.get_rng_state(), before)
    assert pace.flops_per_s > 1e6
    assert pace.predict_step_s(num_ops=10, num_shards=1, flops=0.0) > 0
