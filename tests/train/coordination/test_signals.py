"""SIGTERM, as batch systems and spot machines send it: all is saved, exit code 143, the same weights."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import loadmaster.train as lt
from loadmaster.core.errors import InputError
from loadmaster.train.disk.journal import read_journal
from tests.train.small_trials import digest, plainly, trial
from tests.train.study.test_study import study

SCRIPT = """
import sys, time, torch
from pathlib import Path
from torch.utils.data import DataLoader, Dataset
from tests.train.small_trials import Rows, trial
import loadmaster.train as lt

torch.set_num_threads(1)

class Slow(Dataset):
    def __init__(self, pause_s):
        self.rows, self.pause_s = Rows(30), pause_s
    def __len__(self):
        return 30
    def __getitem__(self, at):
        time.sleep(self.pause_s)
        return self.rows._x[at], self.rows._y[at]

def make(folder, launcher, num_workers, pause_s):
    def data():
        return DataLoader(Slow(pause_s), batch_size=None, shuffle=True, num_workers=num_workers)
    rates = {"a": 0.1, "b": 0.01}
    trials = [trial(n, data=data, evaluate=None, epochs=1, lr=lr) for n, lr in rates.items()]
    devices = "cpu" if launcher == "inline" else ["cpu#0", "cpu#1"]
    return lt.Study(trials, dir=folder, devices=devices, launcher=launcher, checkpoint_every="1h")

if __name__ == "__main__":
    make(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), 0.05).fit()
"""


@pytest.mark.parametrize(
    ("launcher", "num_workers", "to_all"),
    [
        ("inline", 0, False),
        ("inline", 1, True),
        ("processes", 1, True),
    ],
)
@pytest.mark.slow
def test_sigterm_saves_exits_143_and_resumes_to_the_same_bits(
    launcher: str, num_workers: int, to_all: bool, tmp_path: Path
) -> None:
    file = tmp_path / "mine_signals.py"
    file.write_text(SCRIPT)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ""), os.getcwd()])
    child = subprocess.Popen(
        [sys.executable, str(file), str(tmp_path / "run"), launcher, str(num_workers)],
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    journal = tmp_path / "run/journal"
    for _ in range(3000):
        if journal.exists() and any(r["kind"] == "turn" for r in read_journal(journal).records):
            break
        time.sleep(0.02)
    for _ in range(2):  # batch systems send it more than once
        if to_all:
            os.killpg(child.pid, signal.SIGTERM)
        else:
            child.terminate()
    assert child.wait(60) == 143
    records = read_journal(journal).records
    kinds = [record["kind"] for record in records]
    assert "fail" not in kinds, "\n".join(str(record) for record in records if record["kind"] == "fail")
    reached = {r["trial"]: r["step"] for r in records if r["kind"] == "turn"}
    saved = {r["trial"]: r["step"] for r in records if r["kind"] == "commit"}
    assert saved == reached
    namespace = {"__name__": "mine"}
    exec(compile(SCRIPT, str(file), "exec"), namespace)
    rest = namespace["make"](tmp_path / "run", "inline", 0, 0.0).fit()  # type: ignore[operator]
    whole = namespace["make"](tmp_path / "whole", "inline", 0, 0.0).fit()  # type: ignore[operator]
    for name in ("a", "b"):
        assert digest(rest[name].state_dict()) == digest(whole[name].state_dict())


@pytest.mark.parametrize("after", [1, 13, 27])
def test_sigterm_in_the_middle_of_a_study_loses_no_step(after: int, tmp_path: Path) -> None:
    class Terminate:
        left, seen = after, 0

        def on_step(self, name: str, done: Any) -> None:
            self.left -= 1
            self.seen += 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGTERM)

    trials, counter = [trial("a"), trial("b", lr=0.1)], Terminate()
    with pytest.raises(SystemExit) as ended:
        study(tmp_path, trials, callbacks=[counter], checkpoint_every="1h").fit()
    assert ended.value.code == 143
    counter.left = 10**6
    result = study(tmp_path, trials, callbacks=[counter]).fit()
    assert counter.seen == 40
    for one in trials:
        assert digest(result[one.name].state_dict()) == plainly(one)


def test_the_handlers_of_a_caller_are_put_back(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
    lt.Study([trial("a", epochs=1)], dir=tmp_path, devices="cpu").fit()
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)] == before
    assert torch.get_num_threads() == 1


ENDLESS = """
import sys, time
from pathlib import Path
from tests.train.small_trials import trial, Rows, digest
import loadmaster.train as lt

class Late:
    def __len__(self):
        return 20
    def __iter__(self):
        rows = Rows(20)
        for at in range(20):
            if at == 5 and len(sys.argv) > 2:
                Path(sys.argv[1], "waits").touch()
                time.sleep(60)
            yield rows._x[at], rows._y[at]

if __name__ == "__main__":
    one = trial("a", data=Late, evaluate=None, epochs=1, max_steps=10)
    study = lt.Study(one, dir=Path(sys.argv[1]) / "run", devices="cpu", checkpoint_every=2, grace_s="1s")
    found = study.fit()["a"]
    print(found.step, digest(found.state_dict()))
"""


@pytest.mark.slow
def test_step_that_outlasts_the_grace_ends_with_143_and_valid_checkpoints(tmp_path: Path) -> None:
    file = tmp_path / "mine_grace.py"
    file.write_text(ENDLESS)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ""), os.getcwd()])
    run = {"env": {**os.environ, "PYTHONPATH": path}, "text": True, "stderr": subprocess.PIPE}
    command = [sys.executable, str(file), str(tmp_path)]
    child = subprocess.Popen([*command, "waits"], **run)  # type: ignore[call-overload]
    for _ in range(3000):
        if (tmp_path / "waits").exists():
            break
        time.sleep(0.02)
    began = time.monotonic()
    child.terminate()
    _, told = child.communicate(timeout=30)
    assert child.returncode == 143
    assert time.monotonic() - began < 20  # it would wait for a minute
    assert "grace" in told
    assert "checkpoints before are whole" in told
    records = read_journal(tmp_path / "run/journal").records
    assert [r["step"] for r in records if r["kind"] == "commit"][-1] in (2, 4)  # one is written beside
    again, whole = (
        subprocess.run(
            [*command[:2], str(folder)], stdout=subprocess.PIPE, timeout=60, check=True, **run
        ).stdout
        for folder in (tmp_path, tmp_path / "whole")
    )
    assert again.startswith("10 ")
    assert again == whole


@pytest.mark.parametrize("grace", [0, "-1s", "soon"])
def test_grace_that_is_no_time_is_refused(grace: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        lt.Study([trial("a")], dir=tmp_path, devices="cpu", grace_s=grace)
