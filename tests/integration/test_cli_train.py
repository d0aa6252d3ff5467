"""loadmaster train: a study of a file, its plan, its results, Ctrl-C, bad input."""

import json
import signal
import time
from pathlib import Path

import pytest

from tests.integration.command_line import answer, finish, loadmaster, start

pytest.importorskip("torch", reason="training needs the extra [torch]")
STUDY = Path(__file__).resolve().parents[2] / "examples" / "train_a_study.py"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def test_a_study_of_a_file_trains_resumes_and_answers_in_json(tmp_path: Path) -> None:
    first = answer("train", f"{STUDY}:study", "--trace", "t.json", cwd=tmp_path, env=ONE_THREAD)
    assert [each["status"] for each in first["trials"]].count("done") == 1
    assert first["best"] in {each["trial"] for each in first["trials"]}
    spans = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {"compute", "up", "down"} <= {
        each["args"]["name"] for each in spans if each["name"] == "thread_name"
    }
    again = answer("train", f"{STUDY}:study", cwd=tmp_path, env=ONE_THREAD)
    assert again["trials"] == first["trials"]


def test_the_plan_is_printed_and_nothing_is_trained(tmp_path: Path) -> None:
    done = loadmaster("train", f"{STUDY}:study", "--plan", cwd=tmp_path, env=ONE_THREAD)
    assert done.returncode == 0, done.stderr
    assert "host memory" in done.stdout
    assert "disk" in done.stdout
    assert not (tmp_path / "runs").exists()


def test_ctrl_c_ends_with_130_and_the_next_call_goes_on(tmp_path: Path) -> None:
    code = (
        "import sys, time; sys.path.insert(0, %r)\n"
        "from train_a_study import trial, lt\n"
        "class Slow:\n"
        "    def on_step(self, name, done):\n"
        "        open('stepped', 'w').close(); time.sleep(0.05)\n"
        "study = lt.Study([trial(0.01)], dir='r', devices='cpu', memory_cap='2MiB', callbacks=[Slow()])\n"
    )
    (tmp_path / "own.py").write_text(code % str(STUDY.parent))
    process = start("train", "own.py:study", cwd=tmp_path, env=ONE_THREAD)
    deadline = time.monotonic() + 60
    while not (tmp_path / "stepped").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert done.returncode == 130, done.stderr
    assert done.stderr.rstrip().endswith("interrupted")
    assert "Traceback" not in done.stderr
    assert answer("train", "own.py:study", cwd=tmp_path, env=ONE_THREAD)["trials"][0]["step"] == 16


@pytest.mark.parametrize(
    ("source", "content", "says"),
    [
        ("nowhere.py:study", None, "no such file 'nowhere.py'"),
        ("own.py", "", "names no study"),
        ("own.py:study", "x = 1", "unknown study of own.py 'study'"),
        ("own.py:study", "study = 3", "own.py:study is int"),
        ("own.py:study", "1/0", "raised ZeroDivisionError"),
        (
            "own.py:study",
            "import loadmaster.train as lt\nstudy = lt.Study([], dir='r')",
            "at least one trial",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    source: str, content: str | None, says: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "own.py").write_text(content)
    done = loadmaster("train", source, cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_trial_that_failed_before_is_said_with_the_option_that_tries_it_again(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(
        "import torch, loadmaster.train as lt\n"
        "F, X, nn = torch.nn.functional, torch.ones(4, 8), torch.nn\n"
        "study = lambda: lt.Study([lt.Trial(name='odd', build=lambda: nn.Sequential(nn.Linear(8, 8)),\n"
        "    loss=lambda out, y: F.mse_loss(out, y) * float('nan'), data=lambda: [(X, X)] * 2, epochs=1,\n"
        "    optim=lambda ps: torch.optim.SGD(ps, lr=0.1))], dir='runs', devices='cpu', memory_cap='100MB')\n"
    )
    for _ in range(2):
        done = loadmaster("train", "wrong.py:study", cwd=tmp_path, env=ONE_THREAD)
        assert done.returncode == 1, done.stderr
        assert "1 of 1 failed, and stay so; --retry-failed tries them again" in done.stderr
