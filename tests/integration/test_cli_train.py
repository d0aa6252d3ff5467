"""loadmaster train: a study of a file, its plan, its results, Ctrl-C, bad input."""

import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.command_line import Say, ask, finish, start

torch = pytest.importorskip("torch", reason="training needs the extra [torch]")
STUDY = Path(__file__).resolve().parents[2] / "examples" / "train_a_study.py"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As the study of the example sets it; and what a study's file puts on the path goes with the test."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_study_of_a_file_trains_resumes_and_answers_in_json(say: Say, tmp_path: Path) -> None:
    first = ask(say, "train", f"{STUDY}:study", "--trace", "t.json")
    assert [each["status"] for each in first["trials"]].count("done") == 1
    assert first["best"] in {each["trial"] for each in first["trials"]}
    spans = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {"compute", "up", "down"} <= {
        each["args"]["name"] for each in spans if each["name"] == "thread_name"
    }
    again = ask(say, "train", f"{STUDY}:study")
    assert again["trials"] == first["trials"]


def test_the_plan_is_printed_and_nothing_is_trained(say: Say, tmp_path: Path) -> None:
    code, out, err = say("train", f"{STUDY}:study", "--plan")
    assert code == 0, err
    assert "host memory" in out
    assert "disk" in out
    assert not (tmp_path / "runs").exists()


def test_ctrl_c_ends_with_130_and_the_next_call_goes_on(say: Say, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import time, torch, loadmaster.train as lt\n"
        "X, nn = torch.ones(4, 8), torch.nn\n"
        "class Slow:\n"
        "    def on_step(self, name, done):\n"
        "        open('stepped', 'w').close(); time.sleep(0.05)\n"
        "trial = lt.Trial(name='one', build=lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),\n"
        "    loss=nn.functional.mse_loss, data=lambda: [(X, X)] * 16, epochs=1,\n"
        "    optim=lambda ps: torch.optim.SGD(ps, lr=0.1))\n"
        "study = lt.Study([trial], dir='r', devices='cpu', memory_cap='2MiB', callbacks=[Slow()])\n"
    )
    process = start("train", "own.py:study", cwd=tmp_path, env=ONE_THREAD)
    deadline = time.monotonic() + 60
    while not (tmp_path / "stepped").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert done.returncode == 130, done.stderr
    assert done.stderr.rstrip().endswith("interrupted")
    assert "Traceback" not in done.stderr
    assert ask(say, "train", "own.py:study")["trials"][0]["step"] == 16


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
    source: str, content: str | None, says: str, say: Say, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "own.py").write_text(content)
    code, _, err = say("train", source)
    assert code == 2
    assert says in err
    assert len(err.strip().splitlines()) == 1


def test_a_trial_that_failed_before_is_said_with_the_option_that_tries_it_again(
    say: Say, tmp_path: Path
) -> None:
    (tmp_path / "wrong.py").write_text(
        "import torch, loadmaster.train as lt\n"
        "F, X, nn = torch.nn.functional, torch.ones(4, 8), torch.nn\n"
        "study = lambda: lt.Study([lt.Trial(name='odd', build=lambda: nn.Sequential(nn.Linear(8, 8)),\n"
        "    loss=lambda out, y: F.mse_loss(out, y) * float('nan'), data=lambda: [(X, X)] * 2, epochs=1,\n"
        "    optim=lambda ps: torch.optim.SGD(ps, lr=0.1))], dir='runs', devices='cpu', memory_cap='100MB')\n"
    )
    for _ in range(2):
        code, _, err = say("train", "wrong.py:study")
        assert code == 1, err
        assert "1 of 1 failed, and stay so; --retry-failed tries them again" in err
