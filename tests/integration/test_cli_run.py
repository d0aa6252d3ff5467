"""`loadmaster run` as a user starts it."""

import json
import signal
import time
from pathlib import Path

import jsonschema
import pytest

pytest.importorskip("torch", reason="running needs the extra [torch]")

import loadmaster as lm
from tests.integration.command_line import Say, answer, ask, finish, start

SCHEMA = Path(__file__).resolve().parents[2] / "docs" / "schemas" / "run.schema.json"
MODEL = """
import time, torch
from torch import nn

def build():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), (torch.randn(4, 8),)

def other():
    return nn.Linear(8, 4), (torch.randn(4, 8),)

def wild():
    model, args = build()
    return {"model": model, "args": args, "optimizer": lambda weights: torch.optim.SGD(weights, lr=1e38)}
"""


def plan(say: Say, function: str = "build", memory: str = "1MB") -> None:
    Path("net.py").write_text(MODEL)
    devices = f"cpu#0-{memory}, cpu#1-{memory}"
    code, _, err = say("plan", f"net.py:{function}", "-d", devices, "-a", "round_robin", "-o", "p.json")
    assert code == 0, err


def test_run_prints_predicted_beside_measured_and_writes_timelines(say: Say) -> None:
    plan(say)
    code, out, err = say("run", "p.json", "--steps", "3", "--trace", "t.json", "-o", "m.json")
    assert code == 0, err
    assert "3 of 3 (done)" in out
    for word in ("predicted", "measured", "step time", "cpu#0 busy", "transfers", "cpu#1 peak"):
        assert word in out
    assert isinstance(lm.load("m.json"), lm.Timeline)
    assert json.loads(Path("t.json").read_text())["otherData"]["measured"]["origin"] == "measured"


def test_run_speaks_json_by_its_schema(say: Say) -> None:
    plan(say)
    document = ask(say, "run", "p.json", "--steps", "2", "--calibrate", "--database", "c.sqlite")
    jsonschema.validate(document, json.loads(SCHEMA.read_text()))
    assert document["steps_done"] == 2
    assert document["num_calibrated"] > 0
    assert document["database"] == "c.sqlite"


def test_a_loss_that_is_no_number_ends_with_one(say: Say) -> None:
    plan(say, "wild")
    code, out, err = say("run", "p.json", "--steps", "9")
    assert code == 1
    assert "error: the loss is" in err
    assert "at step" in err
    assert "step time" in out, "what was measured so far is printed"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("run p.json --steps 0", "--steps is 0"),
        ("run p.json --database c.sqlite", "only --calibrate writes"),
        ("run none.json", "none.json"),
        ("run net.py", "net.py"),
        ("run p.json --model net.py:other", "another model than net.py:other gives now"),
        ("run p.json --model net.py:none", "none"),
        ("run p.json --out p.json", "would overwrite the input"),
    ],
)
def test_bad_input_is_one_line(say: Say, words: str, text: str) -> None:
    plan(say)
    code, _, err = say(*words.split())
    assert code == 2
    assert text in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_ctrl_c_prints_what_was_measured(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    answer("plan", "net.py:build", "-d", "cpu#0-1MB, cpu#1-1MB", "-o", "p.json", "-b", "5x", cwd=tmp_path)
    process = start("run", "p.json", "--steps", "1000000", cwd=tmp_path)
    assert process.stderr is not None
    said = b""
    while b"step " not in said:
        said += process.stderr.readline()
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert done.returncode == 130, done.stderr
    assert "interrupted after" in done.stderr
    assert "step time" in done.stdout
    assert "Traceback" not in done.stderr
