"""Every example and the README's Python run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("example", sorted(ROOT.glob("examples/*.py")), ids=lambda path: path.stem)
def test_the_example_runs(example: Path, tmp_path: Path) -> None:
    result = subprocess.run([sys.executable, str(example)], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout


def test_the_python_of_the_readme_runs(tmp_path: Path) -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    each_alone = (
        f"for code in {blocks!r}: exec(code, {{}})"  # one process, since importing torch takes longest
    )
    result = subprocess.run([sys.executable, "-c", each_alone], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "graph engine: 2 devices" in result.stdout
    assert "feasible" in result.stdout
    assert (tmp_path / "plan.json").exists()


def test_the_algorithm_of_the_contributing_page_places(tmp_path: Path) -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "last_device.py").write_text(code, encoding="utf-8")
    ask = (
        "import loadmaster as lm, last_device\n"
        "placement = lm.plan('gen:chain:20', '2xref-1TB', algorithm=last_device.PLACER())\n"
        "print(placement.status, set(placement.plan.device.tolist()))\n"
    )
    result = subprocess.run([sys.executable, "-c", ask], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["optimal", "{1}"]  # a chain: the critical path is reached
