"""`loadmaster run` as a user starts it."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

pytest.importorskip("torch", reason="running needs the extra [torch]")

import loadmaster as lm
from loadmaster.core.graph import Phase
from loadmaster.core.plan import plan_of
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

def deep():
    layers = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.ReLU())]
    return nn.Sequential(*layers), (torch.randn(256, 32),)

class Fails(nn.Linear):
    def forward(self, x):
        return super().forward(x) + {}["mine"]  # fails

def fails():
    return Fails(8, 4), (torch.randn(4, 8),)

def cannot_build():
    return {}["mine"]  # cannot_build

class Branches(nn.Linear):
    def forward(self, x):
        x = super().forward(x)
        return x if x.sum().item() > -1e9 else -x

def branches():
    return Branches(8, 4), (torch.randn(4, 8),)
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


def test_what_was_asked_for_and_not_written_is_said_with_its_reason(say: Say) -> None:
    plan(say, "wild")
    words = ("run", "p.json", "--steps", "9", "--out", "m.json", "--trace", "t.json")
    code, _, err = say(*words, "--calibrate", "--database", "c.sqlite")
    assert code == 1
    for what in (
        "timeline NOT written to m.json: the loss is",
        "trace NOT written to t.json: ",
        "database NOT",
    ):
        assert what in err
    assert not any(Path(name).exists() for name in ("m.json", "t.json", "c.sqlite"))


def test_a_model_that_hooks_run_has_no_timeline_and_says_so(say: Say) -> None:
    plan(say, "branches")
    code, out, err = say("run", "p.json", "--steps", "1", "--out", "m.json")
    assert code == 0, err
    assert "NOT written to m.json: the model ran by hooks" in err
    assert "written to" not in out
    code, out, err = say("run", "p.json", "--steps", "1", "--trace", "t.json", "--json")
    assert "trace NOT written to t.json: the model ran by hooks" in err
    assert json.loads(out)["engine"] == "hooks"


def test_costs_that_nobody_measured_are_said_and_what_an_error_is(say: Say) -> None:
    plan(say)
    code, out, err = say("run", "p.json", "--steps", "1")
    assert code == 0, err
    assert "error = predicted / measured - 1" in out
    assert "not measured, and may be far too small; plan with --measure" in " ".join(out.split())


def test_a_prediction_in_another_order_than_the_plans_is_said(say: Say) -> None:
    plan(say, "deep")
    placement = lm.load("p.json")
    assert isinstance(placement, lm.Placement)
    assert placement.plan is not None
    order = _gradients_late(placement.problem.graph)
    turned = plan_of(np.zeros(len(order), dtype=np.int32), np.argsort(np.argsort(order)).astype(np.int32))
    timeline = lm.simulate(placement.problem, turned)
    changed = replace(
        placement, plan=turned, score_s=timeline.step_s, peak_bytes=timeline.peak_bytes, bound_s=0.0
    )
    lm.save(changed, "q.json")
    code, out, err = say("run", "q.json", "--steps", "1")
    assert code == 0, err
    said = " ".join(out.split())
    assert "as torch runs it, its backward pass in the captured order" in said
    assert "the peak of cpu#0 " in said
    assert "--order captured" in said
    _, out, _ = say("run", "p.json", "--steps", "1")
    assert "as torch runs it" not in out


def _gradients_late(graph: lm.Graph) -> Any:
    """The captured order, but the gradients of weights wait for the rest of the backward pass."""
    made, user = graph.tensor_op[graph.use_tensor], graph.use_op
    passed_on = set(made[graph.phase[user] != Phase.UPDATE].tolist())
    ops = np.arange(graph.num_ops)
    late = (graph.phase == Phase.BACKWARD) & ~np.isin(ops, list(passed_on))
    return ops + graph.num_ops * late + 2 * graph.num_ops * (graph.phase == Phase.UPDATE)


def test_a_file_without_a_plan_that_fits_is_not_run(say: Say) -> None:
    Path("net.py").write_text(MODEL)
    code, out, _ = say(
        "plan", "net.py:build", "-d", "cpu#0-1kB, cpu#1-1kB", "-b", "2x", "-o", "p.json", "--trace", "t.json"
    )
    assert code == 1
    assert "trace of the nearest plan written to t.json" in out
    assert "the nearest plan, and why nothing fits, written to p.json; it cannot be run" in out
    Path("net.py").write_text("raise AssertionError('the model is not built')")
    code, out, err = say("run", "p.json")
    assert code == 1, "no feasible plan"
    assert "p.json holds no plan that fits" in err
    assert "proven that no plan fits" in err
    assert not out


@pytest.mark.parametrize("function", ["fails", "cannot_build"])
def test_an_error_of_the_users_code_names_its_file_and_line(say: Say, function: str) -> None:
    Path("net.py").write_text(MODEL)
    line = next(n for n, text in enumerate(MODEL.splitlines(), 1) if f"# {function}" in text)
    code, _, err = say("plan", f"net.py:{function}", "-d", "cpu#0-1MB")
    assert code == 2
    assert f"KeyError: 'mine' (net.py, line {line})" in err
    assert len(err.splitlines()) == 1


def test_python_without_a_function_is_told_how_to_name_one(say: Say) -> None:
    Path("net.py").write_text(MODEL)
    code, _, err = say("plan", "net.py", "-d", "cpu")
    assert code == 2
    assert "net.py:function" in err


def test_all_models_of_a_family_are_offered(say: Say) -> None:
    pytest.importorskip("transformers", reason="hf: models")
    plan(say)
    code, _, err = say("run", "p.json", "--model", "hf:bert")
    assert code == 2
    assert "'bert-base' or 'bert-large'" in err


@pytest.mark.parametrize("module", ["loadmaster", "loadmaster.cli", "loadmaster.cli.app"])
def test_the_command_line_is_a_module_too(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "algorithms"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "m_etf" in done.stdout


@pytest.mark.slow
def test_ctrl_c_prints_what_was_measured(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    answer("plan", "net.py:build", "-d", "cpu#0-1MB, cpu#1-1MB", "-o", "p.json", "-b", "5x", cwd=tmp_path)
    process = start("run", "p.json", "--steps", "1000000", "--out", "m.json", cwd=tmp_path)
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
    assert "measured timeline NOT written to m.json: the run was interrupted" in done.stderr
    assert "Traceback" not in done.stderr
