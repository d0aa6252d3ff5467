"""The example runs as it stands, and the command line takes these sources."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.command_line import Say

_ROOT = Path(__file__).resolve().parents[2]
_NET = """
import numpy as np
import tensorflow as tf


def build(batch=4):
    dense = tf.keras.layers.Dense
    model = tf.keras.Sequential([tf.keras.Input((8,)), dense(8), dense(1)])
    model.compile("adam", "mse", jit_compile=False)
    return model, (np.ones((batch, 8), np.float32), np.ones((batch, 1), np.float32))
"""


def _run(*arguments: str, folder: Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(_ROOT / "src"), "LOADMASTER_MEASURE": "0"}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=folder, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_the_example_has_the_same_losses(tmp_path: Path) -> None:
    out = _run(str(_ROOT / "examples" / "place_a_keras_model.py"), folder=tmp_path)
    assert "same losses as the unplaced model: True" in out
    assert "cpu#1 (CPU:1)" in out


def test_plan_and_run_on_the_command_line(say: Say) -> None:
    Path("net.py").write_text(_NET)
    devices = "cpu#0-1MB, cpu#1-1MB"
    assert say("plan", "net.py:build", "--batch", "6", "-d", devices, "-b", "1x", "-o", "plan.json")[0] == 0
    more = ("--json", "--out", "t.json", "--trace", "trace.json")
    code, out, err = say("run", "plan.json", "--steps", "2", *more)
    assert code == 0
    ran = json.loads(out)
    assert (ran["engine"], ran["steps_done"], ran["ended"]) == ("tensorflow", 2, "done")
    for what in ("measured timeline NOT written to t.json", "trace NOT written to trace.json"):
        assert f"{what}: TensorFlow's ops are not timed one by one in a run" in err
    assert not Path("t.json").exists()


@pytest.mark.slow
def test_fit_finds_the_largest_batch_of_a_keras_model(say: Say) -> None:
    fitted = json.loads(say("fit", "keras:mlp", "-d", "cpu#0-12MB", "--json")[1])
    assert fitted["batch"] == 8
    assert fitted["devices"][0]["largest"]["batch"] > 8


def test_nothing_of_loadmaster_imports_tensorflow_unasked(tmp_path: Path) -> None:
    code = "import sys, loadmaster as lm; lm.problem('gen:fork_join:9', 'T4')"
    code += "; print('tensorflow' in sys.modules)"
    assert _run("-c", code, folder=tmp_path).strip() == "False"
