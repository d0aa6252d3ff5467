"""The import contracts hold, and they break where an import is turned round, wherever in the file it stands.

Each test changes a copy of the package and has import-linter judge it by the contracts of pyproject.toml.
"""

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
CONTRACTS: list[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"][
    "importlinter"
]["contracts"]
LAYERED = [contract for contract in CONTRACTS if contract["type"] == "layers"]
FORBIDDING = [contract for contract in CONTRACTS if contract["type"] == "forbidden"]
LINTER = "from importlinter.cli import lint_imports_command; lint_imports_command()"
WAYS = {
    "on top": "import {}\n",
    "in a function": "def late():\n    import {}\n",
    "for types": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import {}\n",
}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def judge(copy: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LINTER, "--no-cache", "--no-logo"],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy / "src"), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


def add_import(copy: Path, importer: str, imported: str, way: str = WAYS["on top"]) -> None:
    """Let a module, or a package's __init__, import another one."""
    path = copy / "src" / Path(*importer.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    file.write_text(file.read_text(encoding="utf-8") + way.format(imported), encoding="utf-8")


def turned_round() -> Iterator[tuple[str, str, str]]:
    """For each contract of layers its name, a module of the lowest layer and one of the highest."""
    for contract in LAYERED:
        (container,), layers = contract["containers"], contract["layers"]
        low, high = (f"{container}.{layer.split(' | ')[0]}" for layer in (layers[-1], layers[0]))
        yield contract["name"], low, high


def test_the_copy_keeps_every_contract(copy: Path) -> None:
    done = judge(copy)
    assert done.returncode == 0, done.stdout
    assert f"Contracts: {len(CONTRACTS)} kept, 0 broken." in done.stdout


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_an_import_turned_round_breaks_each_contract_of_layers(copy: Path, way: str) -> None:
    for _, low, high in turned_round():
        add_import(copy, low, high, way)
    done = judge(copy)
    assert done.returncode == 1, done.stdout
    for name, low, high in turned_round():
        assert f"{name} BROKEN" in done.stdout
        assert f"{low} is not allowed to import {high}:" in done.stdout


def test_siblings_that_import_each_other_break_the_contract(copy: Path) -> None:
    pairs = [
        [f"loadmaster.{name}" for name in layer.split(" | ")[:2]]
        for layer in LAYERED[0]["layers"]
        if " | " in layer
    ]
    for one, other in pairs:
        add_import(copy, one, other)
    done = judge(copy)
    assert done.returncode == 1, done.stdout
    assert pairs
    for one, other in pairs:
        assert f"{one} is not allowed to import {other}:" in done.stdout


def test_a_package_that_is_forbidden_breaks_the_contract(copy: Path) -> None:
    for contract in FORBIDDING:
        add_import(
            copy, contract["source_modules"][0], contract["forbidden_modules"][0], WAYS["in a function"]
        )
    done = judge(copy)
    assert done.returncode == 1, done.stdout
    for contract in FORBIDDING:
        assert f"{contract['name']} BROKEN" in done.stdout


def test_a_room_that_no_layer_names_breaks_the_contract(copy: Path) -> None:
    for (container,) in (contract["containers"] for contract in LAYERED):
        room = copy / "src" / Path(*container.split(".")) / "attic"
        room.mkdir()
        (room / "__init__.py").write_text('"""Nobody knows what is in here."""\n')
    done = judge(copy)
    assert done.returncode != 0, done.stdout
    for contract in LAYERED:
        assert f"{contract['name']} BROKEN" in done.stdout
