"""The package as users get it: built, installed into a clean environment, tried with the README's examples.

The environment holds what the package declares and nothing else: links to the installed files of its
requirements, found by walking their metadata. So nothing is downloaded, and a package that is imported but
not declared is missing there.
"""

import importlib.metadata as metadata
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doc_examples import normalise, run_page

ROOT = Path(__file__).resolve().parents[2]
_BUILD = "import sys\nfrom hatchling.build import build_{0}\nprint(build_{0}(sys.argv[1]))"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist of this tree, and the wheel that is built of the sdist."""
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    folder = tmp_path_factory.mktemp("built")
    sdist = folder / _build("sdist", ROOT, folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    return sdist, folder / _build("wheel", source, folder)


def _build(kind: str, source: Path, folder: Path) -> str:
    words = [sys.executable, "-c", _BUILD.format(kind), str(folder)]
    result = subprocess.run(words, cwd=source, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()[-1]


def test_sdist_and_wheel_hold_every_module_and_asset(built: tuple[Path, Path]) -> None:
    sdist, wheel = built
    tracked = subprocess.run(
        ["git", "ls-files", "src/loadmaster"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    expected = {name.removeprefix("src/") for name in tracked.stdout.splitlines()}
    with zipfile.ZipFile(wheel) as archive:
        found = set(archive.namelist())
    assert expected <= found, sorted(expected - found)[:5]
    with tarfile.open(sdist) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert {"README.md", "LICENSE", "CHANGELOG.md", "examples/custom_placer.py"} <= names


@pytest.mark.slow
def test_the_examples_of_the_readme_run_where_only_the_wheel_is_installed(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    python = _make_environment(tmp_path / "clean", built[1], extras=("hf", "exact"))
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    session = tmp_path / "session"
    session.mkdir()
    assert normalise(run_page(text, session, python=str(python))) == normalise(text)
    where = subprocess.run(
        [python, "-P", "-c", "import loadmaster; print(loadmaster.__file__, loadmaster.__version__)"],
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    file, version = where.stdout.split()
    assert Path(file).is_relative_to(tmp_path / "clean")
    assert version in built[1].name


def _make_environment(folder: Path, wheel: Path, *, extras: tuple[str, ...]) -> Path:
    """A virtual environment with the wheel and what it requires; gives its Python."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    words = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index"]
    result = subprocess.run([*words, "--quiet", str(wheel)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (own,) = site.glob("loadmaster-*.dist-info")
    required = metadata.Distribution.at(own).requires or []
    for each in _walk_requirements(required, extras):
        _link_files(each, site)
    return python


def _walk_requirements(required: list[str], extras: tuple[str, ...]) -> Iterator[metadata.Distribution]:
    """Every installed distribution that these requirements ask for, directly or not."""
    requirements = pytest.importorskip("packaging.requirements")
    seen: set[tuple[str, tuple[str, ...]]] = set()
    todo = [(text, extras) for text in required]
    while todo:
        text, wanted = todo.pop()
        needed = requirements.Requirement(text)
        if needed.marker and not any(needed.marker.evaluate({"extra": each}) for each in (*wanted, "")):
            continue
        key = (needed.name.lower().replace("_", "-"), tuple(sorted(needed.extras)))
        if key in seen:
            continue
        seen.add(key)
        if key[0] == "loadmaster":  # an extra that asks for another one
            todo += [(each, key[1]) for each in required]
            continue
        found = metadata.distribution(needed.name)
        yield found
        todo += [(each, key[1]) for each in found.requires or []]


def _link_files(distribution: metadata.Distribution, site: Path) -> None:
    """Link the top of everything that a distribution installed, its scripts left out."""
    for top in {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "bin")}:
        target = Path(str(distribution.locate_file(top)))
        if target.exists() and not (site / top).exists():
            (site / top).symlink_to(target)
