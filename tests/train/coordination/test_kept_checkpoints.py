"""Checkpoints kept on request: the best of a trial, and where a stopped one was stopped."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import loadmaster.train as lt
from loadmaster.core.errors import InputError

_VALUES = {2: 3.0, 4: 1.0, 6: 2.0, 8: 2.5, 10: 4.0, 12: 5.0}


def _batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 3, generator=made), torch.randn(4, 2, generator=made)) for _ in range(12)]


def _make_trial(values: Mapping[int, float], *, name: str = "net") -> lt.Trial:
    """A trial that reports a given value after each second step, whatever it has learned."""
    seen = [0]

    def evaluate(_predict: Callable[[Any], Any]) -> dict[str, float]:
        seen[0] += 2
        return {"score": values[seen[0]]}

    return lt.Trial(
        name=name, build=lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), seed=5,
        loss=nn.functional.mse_loss, data=_batches, evaluate=evaluate, eval_every=2,
        optim=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )  # fmt: skip


def _weights_after(num_steps: int) -> dict[str, torch.Tensor]:
    """By a plain loop."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in _batches()[:num_steps]:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return model.state_dict()


def _same(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    return all(torch.equal(each, right[name]) for name, each in left.items())


def _study(folder: Path, trials: Any, **options: Any) -> lt.Study:
    return lt.Study(trials, dir=folder, devices="cpu", memory_cap="64MiB", metric="score", **options)


@pytest.mark.parametrize(("mode", "step"), [("min", 4), ("max", 12)])
def test_weights_of_the_best_report_are_kept_beside_the_last(tmp_path: Path, mode: str, step: int) -> None:
    study = _study(tmp_path, _make_trial(_VALUES), mode=mode, keep_best=True, checkpoint_every=3)
    found = study.fit(progress=False)["net"]
    assert _same(_weights_after(12), found.state_dict())
    assert (found.best.step, found.best.metrics) == (step, {"score": _VALUES[step]})
    assert _same(_weights_after(step), found.best.state_dict())
    again = _study(tmp_path, _make_trial(_VALUES), mode=mode, keep_best=True, checkpoint_every=3)
    assert again.fit(progress=False)["net"].best.step == step  # read back from the journal


def test_best_weights_survive_a_stop_of_the_study(tmp_path: Path) -> None:
    class Interrupt:
        def on_step(self, trial: str, done: Any) -> None:
            if done.step == 7:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _study(tmp_path, _make_trial(_VALUES), keep_best=True, callbacks=[Interrupt()]).fit(progress=False)
    later = {2: 2.5, 4: 4.0, 6: 5.0}  # the reports of steps 8, 10 and 12
    found = _study(tmp_path, _make_trial(later), keep_best=True).fit(progress=False)["net"]
    assert found.best.step == 4
    assert _same(_weights_after(4), found.best.state_dict())


def test_without_being_asked_no_best_is_kept(tmp_path: Path) -> None:
    found = _study(tmp_path, _make_trial(_VALUES)).fit(progress=False)["net"]
    with pytest.raises(InputError, match="keep_best=True"):
        _ = found.best


def test_stopped_trial_keeps_the_weights_it_was_stopped_with_on_request(tmp_path: Path) -> None:
    stops = lt.Patience(every=2, patience=2)
    study = _study(tmp_path, _make_trial(_VALUES), searcher=stops, keep_stopped=True)
    found = study.fit(progress=False)["net"]
    assert (found.status, found.step) == ("stopped", 8)  # the reports of steps 6 and 8 were no better
    assert _same(_weights_after(8), found.state_dict())


def test_trials_that_halving_stops_keep_their_weights_on_request(tmp_path: Path) -> None:
    worse = {step: value + 1 for step, value in _VALUES.items()}
    trials = [_make_trial(_VALUES, name="good"), _make_trial(worse, name="bad")]
    halving = lt.SuccessiveHalving(eta=2, min_steps=2)
    result = _study(tmp_path, trials, searcher=halving, keep_stopped=True).fit(progress=False)
    bad = result["bad"]
    assert bad.status == "stopped"
    assert _same(_weights_after(bad.step), bad.state_dict())


def test_one_line_stops_early_and_gives_the_best_weights(tmp_path: Path) -> None:
    trial = _make_trial(_VALUES)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    torch.manual_seed(5)
    model.load_state_dict(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).state_dict())
    found = lt.train(
        model, _batches(), loss=trial.loss, optim=trial.optim, seed=5, evaluate=trial.evaluate, eval_every=2,
        searcher=lt.Patience(every=2, patience=2, metric="score"), keep_best=True, dir=tmp_path, device="cpu",
        progress=False,
    )  # fmt: skip
    assert (found.status, found.best.step) == ("stopped", 4)
    assert _same(_weights_after(4), model.state_dict())
