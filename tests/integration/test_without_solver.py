"""Without the extra [exact] everything but the solver works, and what needs it says what is missing.

ortools is not there, or is there and broken: in a process of its own once, and otherwise in this one for as
long as a test runs.
"""

import subprocess
import sys
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import pytest

import loadmaster as lm
from loadmaster.placers import warm
from tests.integration.command_line import Say, ask

BLOCKED = """
import sys
from importlib.abc import MetaPathFinder

class Without(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "ortools":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Without())
from loadmaster.cli.app import main; main()
"""


class Without(MetaPathFinder):
    """Knows that there is no ortools."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if is_solver(name):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def is_solver(module: str) -> bool:
    return module.split(".")[0] == "ortools"


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of ortools is imported; what was comes back, since its libraries cannot be loaded twice."""
    for name in [*filter(is_solver, sys.modules)]:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [*filter(is_solver, sys.modules)]:
        del sys.modules[name]


@pytest.fixture
def hidden(forgotten: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [Without(), *sys.meta_path])


def test_a_process_that_asks_for_the_solver_is_told_of_the_extra() -> None:
    command = [sys.executable, "-c", BLOCKED, "plan", "gen:chain:12", "--algorithm", "cpsat_latency"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "loadmaster[exact]" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("hidden")
@pytest.mark.parametrize(
    ("algorithm", "objective"), [("cpsat_latency", "step"), ("cpsat_throughput", "throughput")]
)
def test_asking_for_the_solver_names_the_extra_in_one_message(
    algorithm: str, objective: str, say: Say
) -> None:
    code, out, err = say("plan", "gen:chain:12", "--algorithm", algorithm, "--objective", objective)
    assert (code, out) == (2, "")
    assert err.count("not installed") == 1
    assert "loadmaster[exact]" in err


@pytest.mark.usefixtures("hidden")
@pytest.mark.parametrize(
    ("objective", "solver"), [("step", "cpsat_latency"), ("throughput", "cpsat_throughput")]
)
def test_auto_plans_without_the_solver_and_says_so(objective: str, solver: str, say: Say) -> None:
    command = ("plan", "gen:layered:40", "-d", "2xT4", "--objective", objective, "--split", "free")
    said = ask(say, *command, "--budget", "200x")
    assert said["status"] in ("feasible", "optimal")
    assert said["bound_s"] > 0
    skipped = next(row for row in said["members"] if row["name"] == solver)
    if "proven" not in skipped["reason"]:
        assert "loadmaster[exact]" in skipped["reason"]


@pytest.mark.usefixtures("hidden")
def test_compare_says_what_the_solver_lacks_and_goes_on(say: Say) -> None:
    command = ("compare", "gen:chain:8", "-d", "2xT4", "-a", "cpsat_latency,heft", "--budget", "20x")
    rows = {row["name"]: row for row in ask(say, *command)["results"]}
    assert "loadmaster[exact]" in rows["cpsat_latency"]["reason"]
    assert rows["heft"]["step_s"] > 0


@pytest.mark.usefixtures("hidden")
def test_the_warm_up_asks_every_algorithm_but_those(monkeypatch: pytest.MonkeyPatch) -> None:
    marked: list[str] = []
    monkeypatch.setattr(warm, "is_warm", lambda part: False)  # as on a machine that is new
    monkeypatch.setattr(warm, "mark_warm", marked.append)
    warm.warm_up()
    assert marked == ["placers"]


@pytest.mark.usefixtures("hidden")
def test_a_bound_under_a_budget_is_that_of_the_programmes() -> None:
    problem = lm.problem("gen:layered:30", "2xT4")
    assert lm.lower_bound(problem, "50x") == lm.lower_bound(problem)
    assert lm.lower_bound(problem).seconds > 0


@pytest.fixture(params=["ortools/__init__.py", "ortools/sat/python/cp_model.py"])
def broken(
    forgotten: None, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ortools comes first which is there and raises when it is imported, at once or late."""
    module = tmp_path / request.param
    module.parent.mkdir(parents=True, exist_ok=True)
    for folder in ("ortools", "ortools/sat", "ortools/sat/python"):
        if (tmp_path / folder).exists():
            (tmp_path / folder / "__init__.py").touch()
    module.write_text("raise ImportError('libortools.so.9: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(tmp_path)  # type: ignore[no-untyped-call]


@pytest.mark.usefixtures("broken")
def test_a_solver_that_cannot_be_imported_is_left_out_with_the_cause(say: Say) -> None:
    command = ("gen:layered:40", "-d", "2xT4", "--split", "free", "--budget", "200x")
    said = ask(say, "plan", *command)
    (skipped,) = [member for member in said["members"] if member["name"] == "cpsat_latency"]
    assert skipped["status"] is None
    assert "installed but cannot be imported" in skipped["reason"]
    assert "libortools.so.9" in skipped["reason"]
    said = ask(say, "compare", *command, "-a", "cpsat_latency,heft")
    rows = {row["name"]: row for row in said["results"]}
    assert "libortools.so.9" in rows["cpsat_latency"]["reason"]
    assert rows["heft"]["step_s"] > 0


@pytest.mark.usefixtures("broken")
def test_a_broken_solver_that_is_named_is_one_message_and_bounds_do_without(say: Say) -> None:
    command = ("plan", "gen:chain:12", "-d", "2xT4", "--algorithm", "cpsat_latency", "--budget", "5x")
    code, _, err = say(*command)
    assert code == 2
    assert "installed but cannot be imported (ImportError: libortools.so.9" in err
    problem = lm.problem("gen:layered:30", "2xT4")
    assert lm.lower_bound(problem, "50x") == lm.lower_bound(problem)


def test_the_solver_is_there_again_afterwards(say: Say) -> None:
    assert ask(say, "plan", "gen:chain:6", "-d", "2xT4", "-a", "cpsat_latency", "-b", "20x")["status"]
