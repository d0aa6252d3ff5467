"""Where LOADMASTER_CI is set, a test that is left out because a package is missing fails the run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parents[2] / "conftest.py"
MODULE = "import pytest\npytest.importorskip('no_such_package', reason='needs the extra [none]')\n"
INSIDE = "def test_one():\n    import pytest\n    pytest.importorskip('no_such_package')\n"
GUARDED = "import pytest\n@pytest.mark.skipif(True, reason='not registered')\ndef test_one(): pass\n"
ACCEPTED = "import pytest\n@pytest.mark.skipif(True, reason='no CUDA device')\ndef test_one(): pass\n"
PASSES = "\ndef test_other(): pass\n"


def run(tmp_path: Path, code: str, *options: str, ci: bool = True) -> subprocess.CompletedProcess[str]:
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "test_it.py").write_text(code + PASSES)
    env = {name: value for name, value in os.environ.items() if name != "LOADMASTER_CI"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--rootdir", ".", "-p", "no:hypothesispytest", *options],
        cwd=tmp_path,
        env=env | ({"LOADMASTER_CI": "1"} if ci else {}),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (MODULE, "needs the extra [none]"),
        (INSIDE, "could not import 'no_such_package'"),
        (GUARDED, "not registered"),
    ],
)
def test_a_missing_package_fails_in_ci(tmp_path: Path, code: str, reason: str) -> None:
    done = run(tmp_path, code, "-p", "no:xdist")
    assert done.returncode == 1, done.stdout
    assert "not tested" in done.stdout
    assert reason in done.stdout


def test_a_missing_package_fails_in_ci_where_tests_run_in_processes(tmp_path: Path) -> None:
    done = run(tmp_path, MODULE, "-n", "1")
    assert done.returncode == 1, done.stdout
    assert "test_it.py: " in done.stdout


def test_a_missing_gpu_is_accepted_in_ci(tmp_path: Path) -> None:
    assert run(tmp_path, ACCEPTED, "-p", "no:xdist").returncode == 0


def test_a_missing_package_is_a_skip_elsewhere(tmp_path: Path) -> None:
    assert run(tmp_path, INSIDE, "-p", "no:xdist", ci=False).returncode == 0
