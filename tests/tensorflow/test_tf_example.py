"""The example runs as it stands, and the command line takes these sources."""

import json
import os
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


def _run(*arguments: str, folder: Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(_ROOT / "src"), "LOADMASTER_MEASURE": "0"}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=folder, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_example_has_the_same_losses(tmp_path: Path) -> None:
    out = _run(str(_ROOT / "examples" / "place_a_keras_model.py"), folder=tmp_path)
    assert "same losses as the unplaced model: True" in out
    assert "cpu#1 (CPU:1)" in out


def test_plan_and_run_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "import numpy as np\nimport tensorflow as tf\n"
        "def build(batch=4):\n"
        "    dense = tf.keras.layers.Dense\n"
        "    model = tf.keras.Sequential([tf.keras.Input((8,)), dense(8), dense(1)])\n"
        "    model.compile('adam', 'mse', jit_compile=False)\n"
        "    return model, (np.ones((batch, 8), np.float32), np.ones((batch, 1), np.float32))\n"
    )
    plan = (
        "plan",
        "net.py:build",
        "--batch",
        "6",
        "-d",
        "cpu#0-1MB, cpu#1-1MB",
        "-b",
        "20x",
        "-o",
        "plan.json",
    )
    _run("-m", "loadmaster", *plan, folder=tmp_path)
    ran = json.loads(_run("-m", "loadmaster", "run", "plan.json", "--steps", "2", "--json", folder=tmp_path))
    assert (ran["engine"], ran["steps_done"], ran["ended"]) == ("tensorflow", 2, "done")


def test_nothing_of_loadmaster_imports_tensorflow_unasked(tmp_path: Path) -> None:
    code = "import sys, loadmaster as lm; lm.problem('gen:fork_join:9', 'T4')"
    code += "; print('tensorflow' in sys.modules)"
    assert _run("-c", code, folder=tmp_path).strip() == "False"
