"""Compiled kernels are kept on disk, wherever that can be written."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"
WHERE = "from loadmaster.simulator.jit import cache_folder; print(cache_folder())"
KERNEL = (
    "from loadmaster.simulator.jit import cache_folder, kernel\n"
    "from loadmaster.simulator.events.kernel import sort_by_priority\n"
    "import numpy as np\n"
    "print(sort_by_priority(np.array([2, 0, 1], dtype=np.int32)).tolist())\n"
    "print(len(list(cache_folder().rglob('*sort_by_priority*.nbi'))))\n"
)


def run(code: str, **environment: str) -> list[str]:
    kept = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    result = subprocess.run(
        [sys.executable, "-c", code], env={**kept, **environment}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split("\n")


def test_the_users_own_numba_folder_comes_first(tmp_path: Path) -> None:
    assert run(WHERE, NUMBA_CACHE_DIR=str(tmp_path))[0].startswith(str(tmp_path))


def test_a_compiled_kernel_is_found_on_disk_and_numba_is_left_as_it_was(tmp_path: Path) -> None:
    code = KERNEL + "import numba; print(repr(numba.config.CACHE_DIR))"
    order, files, config = run(code, NUMBA_CACHE_DIR=str(tmp_path))[:3]
    assert order == "[1, 2, 0]"
    assert int(files) == 1
    assert config == repr(str(tmp_path))


@pytest.mark.skipif(os.getuid() == 0, reason="root may write into read-only folders")
def test_a_read_only_folder_falls_back_to_a_writable_one(tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert not run(WHERE, NUMBA_CACHE_DIR=str(locked))[0].startswith(str(locked))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package in a folder of its own, to be changed."""
    ignored = shutil.ignore_patterns("__pycache__")
    return Path(shutil.copytree(SOURCE / "loadmaster", tmp_path / "src" / "loadmaster", ignore=ignored))


def test_a_folder_that_cannot_be_made_falls_back_to_a_writable_one(copy: Path, tmp_path: Path) -> None:
    blocked = copy / "__pycache__"
    blocked.write_text("not a folder")
    elsewhere = {"NUMBA_CACHE_DIR": str(blocked), "XDG_CACHE_HOME": str(blocked), "TMPDIR": str(tmp_path)}
    where = run(WHERE, PYTHONPATH=str(copy.parent), **elsewhere)[0]
    assert where.startswith(str(tmp_path / "loadmaster-"))
    assert Path(where).is_dir()


def test_the_folder_changes_when_a_kernel_changes_and_only_then(copy: Path, tmp_path: Path) -> None:
    folders = []
    for changed in (None, "core/units.py", "simulator/events/kernel.py"):
        if changed is not None:
            (copy / changed).write_text((copy / changed).read_text() + "# changed\n")
        folders.append(run(WHERE, PYTHONPATH=str(copy.parent), NUMBA_CACHE_DIR=str(tmp_path))[0])
    assert folders[0] == folders[1] != folders[2]
    assert folders[0].startswith(str(tmp_path))
