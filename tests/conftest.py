"""What all tests share. Where LOADMASTER_CI is set, a test that is left out needs an accepted reason.

A package that is not installed is none: `.ci/run` installs everything that a test asks for, so that a skip
there means that something is no longer tested.
"""

import contextlib
import gc
import importlib
import os
import re
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.integration.command_line import Say

# Read by torch when it is imported. Tiny ops on two threads wait for each other: the same tests took half as
# much processor time again.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Plans of tests are of vendors' peaks unless a test asks for measured costs: quick, and the same every time.
os.environ.setdefault("LOADMASTER_MEASURE", "0")

CI = bool(os.environ.get("LOADMASTER_CI"))
ACCEPTED = re.compile(
    r"no CUDA device|no GPU here|needs a machine without GPUs|one core:"  # hardware
    r"|root may write|needs root"
    r"|this system (has|gives) no|on Unix only|on Linux alone|of POSIX|no forks|/proc"  # the platform
    r"|beside the repository"  # public workloads, which are not part of it
)


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> "Say":
    """Run `main` here, in a folder of its own: exit code, stdout, stderr."""
    from loadmaster.cli.app import main

    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, columns: int = 100) -> tuple[int, str, str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr("sys.argv", ["loadmaster", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        assert isinstance(end.value.code, int)
        return end.value.code, *capsys.readouterr()

    return run


# What most processes of a whole run import sooner or later.
LIBRARIES = (
    "hypothesis",
    "networkx",
    "numba",
    "pandas",
    "ray",
    "scipy.optimize",
    "scipy.stats",
    "sympy",
    "torch._dynamo",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "torch.export",
    "transformers",
)


def pytest_sessionstart() -> None:
    """Set half a million objects of libraries aside in processes of a whole run.

    The collector and whoever asks it for referrers looks through all objects there are: for tests of the
    runtime that was a third of their time.
    """
    if not os.environ.get("PYTEST_XDIST_WORKER"):
        return
    gc.disable()
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays: looking for garbage among it took a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.set_threshold(700, 10, 50)  # all that is imported is looked through more seldom


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """TensorFlow has a process of its own: its tests run where they are named (`make test` names them)."""
    if collection_path != Path(__file__).parent / "tensorflow":
        return None
    return True if not any("tests/tensorflow" in str(argument) for argument in config.args) else None


def pytest_report_header() -> str | None:
    return "LOADMASTER_CI: a skip without an accepted reason is a failure" if CI else None


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if CI and unaccepted_skips(session.config) and session.exitstatus in (0, 5):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    skips = unaccepted_skips(config) if CI else []
    if skips:
        terminalreporter.section("not tested", red=True, bold=True)
        for line in skips:
            terminalreporter.line(line)
        terminalreporter.line(
            "Install what is missing in .ci/run, or accept the reason in tests/conftest.py."
        )


def unaccepted_skips(config: pytest.Config) -> list[str]:
    """A line for each test or module that was left out for a reason which CI does not accept."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    found = set()
    for report in reporter.stats.get("skipped", []) if reporter else []:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not ACCEPTED.search(reason):
            found.add(f"{report.nodeid}: {reason}")
    return sorted(found)
