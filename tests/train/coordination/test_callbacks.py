"""A callback that raises costs no step; a logger that fails is told nothing more."""

from pathlib import Path
from typing import Any

import pytest

import loadmaster.train as lt
from loadmaster.core.errors import RunError
from loadmaster.train.coordination.callbacks import JsonlLogger
from loadmaster.train.disk.journal import read_journal
from tests.train.small_trials import digest, plainly, trial
from tests.train.study.test_study import study


class Raises:
    """Raises something at the n-th call of a hook."""

    def __init__(self, hook: str, after: int, problem: BaseException) -> None:
        self.left, self.problem = after, problem
        setattr(self, hook, self.act)

    def act(self, *_facts: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.problem


def trained(tmp_path: Path, **options: Any) -> list[int]:
    seen: list[int] = []

    class Count:
        def on_step(self, name: str, done: Any) -> None:
            seen.append(done.step)

    trials = [trial("a"), trial("b", lr=0.1)]
    result = study(tmp_path, trials, callbacks=[Count()], **options).fit()
    for one in trials:
        assert digest(result[one.name].state_dict()) == plainly(one)
    return seen


@pytest.mark.parametrize(
    ("problem", "seen"),
    [(ValueError("enough"), RunError), (SystemExit(3), SystemExit), (KeyboardInterrupt(), KeyboardInterrupt)],
)
def test_a_callback_that_raises_loses_no_step(problem: BaseException, seen: Any, tmp_path: Path) -> None:
    bad = Raises("on_step", 13, problem)
    trials = [trial("a"), trial("b", lr=0.1)]
    with pytest.raises(seen):
        study(tmp_path, trials, callbacks=[bad], checkpoint_every="1h").fit()
    assert len(trained(tmp_path)) == 40 - 13


@pytest.mark.parametrize("hook", ["on_start", "on_report", "on_checkpoint", "on_trial_end", "on_end"])
def test_a_callback_may_raise_at_any_hook(hook: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=rf"Raises.{hook} raised ValueError: enough"):
        study(
            tmp_path, [trial("a"), trial("b", lr=0.1)], callbacks=[Raises(hook, 1, ValueError("enough"))]
        ).fit()
    kinds = [record["kind"] for record in read_journal(tmp_path / "run/journal").records]
    trained(tmp_path)
    if hook == "on_end":
        assert kinds.count("done") == 2


def test_a_searcher_that_raises_loses_no_step(tmp_path: Path) -> None:
    class Broken(lt.RunAll):
        def milestone(self, name: str, step: int) -> int | None:
            return (step // 4 + 1) * 4

        def report(self, name: str, step: int, metrics: Any) -> Any:
            raise ZeroDivisionError

    options = {"searcher": Broken(), "checkpoint_every": "1h"}
    with pytest.raises(ZeroDivisionError):
        study(tmp_path, [trial("a"), trial("b", lr=0.1)], **options).fit()
    commits = [r["step"] for r in read_journal(tmp_path / "run/journal").records if r["kind"] == "commit"]
    assert max(commits) == 4
    assert len(trained(tmp_path)) == 40 - sum(commits)


def test_a_logger_that_fails_is_disabled_with_a_warning_and_training_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "not a file"
    folder.mkdir()
    other = tmp_path / "log.jsonl"
    with pytest.warns(RuntimeWarning, match=r"logger JsonlLogger.on_step raised .*; it is disabled") as told:
        study(tmp_path, [trial("a")], callbacks=[JsonlLogger(folder), JsonlLogger(other)]).fit()
    assert len(told) == 1
    assert len(other.read_text().splitlines()) > 20
