"""Defects of the published systems, one test each: what must not happen here, by number.

Those about shards, units and optimizers are in the tests of the executor; these are about studies.
"""

import inspect
import itertools
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import loadmaster.train as lt
from loadmaster.train.coordination.pace import Pace
from loadmaster.train.coordination.result import TrialStatus
from loadmaster.train.coordination.scheduler import TrialStanding
from loadmaster.train.coordination.study_forecast import forecast_study
from loadmaster.train.study import Study
from tests.train.plain_engine import Plain
from tests.train.small_trials import Rows, digest, plainly, trial
from tests.train.study.test_study import Bomb, Stop

ROOT = Path(__file__).resolve().parents[3]


def test_r1_a_study_with_defaults_starts_and_ends(tmp_path: Path) -> None:
    result = lt.Study([trial("a")], dir=tmp_path, devices="cpu").fit()
    assert result.best.name == "a"


def test_r3_r26_public_calls_take_names_not_positions() -> None:
    for call in (lt.Study, lt.optimize):
        kinds = [p.kind for p in inspect.signature(call).parameters.values()][1:]
        assert all(kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD) for kind in kinds)
    with pytest.raises(TypeError):
        lt.Trial("a")  # type: ignore[misc]


def test_r15_a_worker_that_raises_loses_its_trial_and_not_its_device(tmp_path: Path) -> None:
    bad = trial("bad", build=lambda: Bomb("exception"))
    result = Study([bad, trial("a"), trial("b", lr=0.1)], dir=tmp_path, engine=Plain()).fit()
    assert result["bad"].status == TrialStatus.FAILED
    assert digest(result["a"].state_dict()) == plainly(trial("a"))


@pytest.mark.parametrize(("num_trials", "num_devices"), [(1, 1), (1, 4), (2, 3), (7, 2)])
def test_r16_any_number_of_trials_on_any_number_of_devices_ends(
    num_trials: int, num_devices: int, tmp_path: Path
) -> None:
    trials = [trial(f"t{at}", max_steps=at + 1, evaluate=None) for at in range(num_trials)]
    result = Study(trials, dir=tmp_path, engine=Plain(num_devices), launcher="inline").fit()
    assert [each.step for each in result.trials] == list(range(1, num_trials + 1))


def test_r17_a_thousand_runs_with_turns_of_no_length_book_no_trial_twice() -> None:
    rng = random.Random(17)
    for _ in range(1000):
        num, devices = rng.randint(1, 5), rng.randint(1, 4)
        left = [rng.randint(1, 6) for _ in range(num)]
        standings = [TrialStanding(trial=i, num_left=left[i], step_s=rng.random()) for i in range(num)]
        seen = forecast_study(
            standings, num_devices=devices, step_time=lambda i, k: rng.choice([0.0, rng.random()])
        )
        for i in range(num):
            turns = sorted((s.start_s, s.end_s) for s in seen.served if s.turn.trial == i)
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(turns))
        steps = [sum(s.turn.num_steps for s in seen.served if s.turn.trial == i) for i in range(num)]
        assert steps == left


class Counted(Rows):
    """Counts the batches that were drawn."""

    drawn = 0

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            type(self).drawn += 1
            yield batch


def test_r18_not_one_batch_more_is_drawn_than_trained(tmp_path: Path) -> None:
    Counted.drawn = 0
    Study([trial("a", data=Counted)], dir=tmp_path, engine=Plain()).fit()
    assert Counted.drawn == 20


def test_r19_remaining_time_is_right_at_the_border_of_an_epoch(tmp_path: Path) -> None:
    from loadmaster.train.coordination.coordinator import Coordinator

    seen: list[tuple[int, int]] = []
    holder: list[Coordinator] = []

    class Watch:
        def on_step(self, name: str, done: Any) -> None:
            for each in holder[0]._collect_standings():
                seen.append((holder[0].state.entries[name].step, each.num_left))

    study = Study([trial("a", evaluate=None)], dir=tmp_path, engine=Plain(), callbacks=[Watch()])
    make = study._coordinator

    def made(*given: Any, **options: Any) -> Coordinator:
        holder.append(make(*given, **options))
        return holder[0]

    study._coordinator = made  # type: ignore[method-assign]
    study.fit()
    assert {step + left for step, left in seen} == {20}


def test_r19_the_time_of_a_step_is_the_median_of_what_was_measured() -> None:
    pace = Pace({"a": 5.0}, "auto")
    assert pace.step_s("a") == 5.0
    for seconds in (9.0, 1.0, 1.1, 1.2, 0.9):
        pace.note_step("a", seconds)
    assert pace.step_s("a") == 1.1


def test_r21_importing_touches_no_device_and_a_study_needs_no_terminal() -> None:
    code = (
        "import sys, loadmaster.train as lt; print('torch' in sys.modules)\n"
        "lt.Study; import torch; print(torch.cuda.is_initialized())"
    )
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "TERM": "dumb"},
        stdin=subprocess.DEVNULL,
        check=True,
    )
    assert done.stdout.split() == ["False", "False"]


def test_r22_the_documentation_names_a_study_that_a_test_runs() -> None:
    assert "examples/train_a_study.py" in (ROOT / "docs/train.md").read_text(encoding="utf-8")
    assert (ROOT / "examples/train_a_study.py").exists()  # run by tests/integration/test_examples.py


def test_r25_optimizer_and_schedule_survive_a_stop_bit_for_bit(tmp_path: Path) -> None:
    import torch

    one = trial("a", lr_schedule=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9))
    with pytest.raises(KeyboardInterrupt):
        Study([one], dir=tmp_path, engine=Plain(), callbacks=[Stop(7, "interrupt")]).fit()
    assert digest(Study([one], dir=tmp_path, engine=Plain()).fit()["a"].state_dict()) == plainly(one)


def test_r27_nothing_listens(tmp_path: Path) -> None:
    listening: list[str] = []

    class Look:
        def on_step(self, name: str, done: Any) -> None:
            inodes = {
                os.readlink(f"/proc/self/fd/{fd}")
                for fd in os.listdir("/proc/self/fd")
                if os.path.lexists(f"/proc/self/fd/{fd}")
            }
            for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
                parts = line.split()
                if parts[3] == "0A" and f"socket:[{parts[9]}]" in inodes:
                    listening.append(line)

    Study([trial("a", max_steps=3)], dir=tmp_path, engine=Plain(), callbacks=[Look()]).fit()
    assert listening == []
