"""Killed at any moment, a study goes on to the same weights: `kill -9`, and a death at every single write."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loadmaster.train import reference
from loadmaster.train.coordination.searchers import SuccessiveHalving
from loadmaster.train.disk import checkpoints
from loadmaster.train.disk.journal import read_journal
from loadmaster.train.study import Study
from tests.train.plain_engine import Plain
from tests.train.small_trials import digest, plainly, trial

ROOT = Path(__file__).resolve().parents[3]


def trials() -> list[Any]:
    return [trial("a"), trial("b", lr=0.1, num_batches=6)]


def fit(folder: Path, **options: Any) -> Any:
    given = {"engine": Plain(2), "launcher": "inline", "checkpoint_every": 3}
    return Study(trials(), dir=folder, **(given | options)).fit()


class Slowly:
    def on_step(self, name: str, done: Any) -> None:
        time.sleep(0.002)


def in_child(work: Callable[[], object]) -> int:
    """Start work in a process of its own."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return child


def wait_for(journal: Path, num_bytes: int) -> None:
    """Until a journal is so long, or no longer grows."""
    size, since = -1, time.monotonic()
    while time.monotonic() - since < 2.0:
        now = journal.stat().st_size if journal.exists() else 0
        if now >= num_bytes:
            return
        if now != size:
            size, since = now, time.monotonic()
        time.sleep(0.001)


def hashes(result: Any) -> list[str]:
    return [digest(each.state_dict()) for each in result.trials]


@pytest.mark.parametrize("num_kills", [8, pytest.param(20, marks=pytest.mark.slow)])
def test_a_study_resumes_to_the_same_weights_after_every_random_kill(num_kills: int, tmp_path: Path) -> None:
    wanted = [plainly(one) for one in trials()]
    rng = random.Random(5)
    steps = []
    for at in range(num_kills):
        folder = tmp_path / str(at)
        child = in_child(lambda folder=folder: fit(folder, callbacks=[Slowly()]))  # type: ignore[misc]
        # by how far it has come, not by the clock: the machine may be slow today
        wait_for(folder / "journal", rng.randrange(1, 4000))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        records = read_journal(folder / "journal").records
        steps.append(len(records))
        assert hashes(fit(folder)) == wanted
    assert len(set(steps)) > num_kills // 4  # they died at different points


def test_a_study_killed_again_and_again_arrives_all_the_same(tmp_path: Path) -> None:
    wanted = [plainly(one) for one in trials()]
    for _ in range(12):
        child = in_child(lambda: fit(tmp_path, callbacks=[Slowly()]))
        time.sleep(0.06)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert hashes(fit(tmp_path)) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("call", ["write", "fsync"])
@pytest.mark.parametrize("before", [True, False])
def test_a_death_at_every_write_and_every_sync_resumes_to_the_same_weights(
    call: str, before: bool, tmp_path: Path
) -> None:
    wanted = [plainly(one) for one in trials()]
    real = getattr(os, call)

    def dying_at(number: int) -> Callable[[], object]:
        calls = itertools.count(1)  # one step of the interpreter: checkpoints are written by another thread

        def counted(*given: Any) -> Any:
            is_it = next(calls) == number
            if is_it and before:
                if call == "write":
                    real(given[0], given[1][: len(given[1]) // 2])  # torn in the middle
                os._exit(9)
            found = real(*given)
            if is_it:
                os._exit(9)
            return found

        def work() -> None:
            setattr(os, call, counted)
            fit(folder)

        return work

    number, ended = 0, False
    while not ended:
        number += 3 if number > 4 else 1
        folder = tmp_path / str(number)
        _, status = os.waitpid(in_child(dying_at(number)), 0)
        ended = os.waitstatus_to_exitcode(status) == 0
        assert ended or os.waitstatus_to_exitcode(status) == 9
        assert hashes(fit(folder)) == wanted
    assert number > 20  # there were that many


def search(folder: Path, **more: Any) -> Any:
    given = [trial(f"t{lr}", lr=lr, eval_every=None) for lr in (0.1, 0.01, 0.001)]
    searcher = SuccessiveHalving(eta=3, min_steps=4)
    options: dict[str, Any] = {"engine": Plain(), "checkpoint_every": 2, "launcher": "inline"}
    return Study(given, dir=folder, searcher=searcher, **(options | more)).fit()


def describe(result: Any) -> list[tuple[Any, ...]]:
    """How every trial ended, those that were stopped among them, and the weights left of each."""
    return [(t.status, t.step, t.durable_step, digest(t.state_dict())) for t in result.trials]


@pytest.mark.parametrize(
    "number", [*range(1, 60, 7), *(pytest.param(n, marks=pytest.mark.slow) for n in range(60) if n % 7 != 1)]
)
def test_a_search_killed_at_any_write_ends_all_trials_the_same(number: int, tmp_path: Path) -> None:
    whole = search(tmp_path / "whole")
    real = os.write

    def work() -> None:
        calls = itertools.count(1)

        def counted(*given: Any) -> Any:
            return real(*given) if next(calls) < number else os._exit(9)

        os.write = counted
        search(tmp_path / "killed")

    os.waitpid(in_child(work), 0)
    assert describe(search(tmp_path / "killed")) == describe(whole)


def test_a_stopped_trial_killed_before_its_checkpoint_counts_ends_with_the_same_weights(
    tmp_path: Path,
) -> None:
    """Its end must not be recorded before the checkpoint at the step where it was stopped is."""
    whole = search(tmp_path / "whole")
    assert {t.durable_step for t in whole.trials if str(t.status) == "stopped"} == {4}
    folder = tmp_path / "killed"
    real = checkpoints.save

    def work() -> None:
        def dies(root: Path, snapshot: Any, **given: Any) -> Any:
            if snapshot.step == 4:
                time.sleep(0.3)  # the decisions are recorded meanwhile
                os._exit(9)
            return real(root, snapshot, **given)

        checkpoints.save = dies
        search(folder)

    os.waitpid(in_child(work), 0)
    records = read_journal(folder / "journal").records
    assert any(record["kind"] == "turn" and record["step"] == 4 for record in records)
    assert describe(search(folder)) == describe(whole)


@pytest.mark.slow
def test_ten_kills_of_groups_under_a_search_resume_to_the_same_weights(tmp_path: Path) -> None:
    """Groups on a frozen backbone, with evaluation and successive halving."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "tests.train.group_killer", str(tmp_path), "0", "10"]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [at for at, _, _ in found] == list(range(10))
    ends = {json.dumps(ended) for _, _, ended in found}
    assert len(ends) == 1  # as every other, and each as a plain loop of so many steps
    from tests.train.group_killer import trials as lora_trials  # which imports this module

    for one, (name, _, step, weights) in zip(lora_trials(), json.loads(ends.pop()), strict=True):
        assert (one.name, digest(reference(replace(one, max_steps=step)).state_dict)) == (name, weights)
    assert len({records[-1] for _, records, _ in found}) > 3  # they died at different points


@pytest.mark.slow  # those above are children of this process
def test_a_process_of_its_own_killed_goes_on_in_the_next(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, torch; torch.set_num_threads(1)\n"
        "from tests.train.disk.test_kill import fit, hashes, Slowly\n"
        "print('ready', flush=True)\n"
        "print(*hashes(fit(pathlib.Path(sys.argv[1]), callbacks=[Slowly()])))\n"
    )
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.05)
        process.kill()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split()[1:] == [plainly(one) for one in trials()]
