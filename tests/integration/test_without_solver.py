"""Without the extra [exact] everything but the solver works, and what needs it says what is missing.

Each test is a process of its own in which ortools is not there, or is there and broken.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BLOCKED = """
import sys
from importlib.abc import MetaPathFinder

class Without(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "ortools":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Without())
"""
MAIN = "from loadmaster.cli.app import main; main()"


def without(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCKED + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def answered(*arguments: str) -> dict[str, Any]:
    done = without(MAIN, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


@pytest.mark.parametrize(
    ("algorithm", "objective"), [("cpsat_latency", "step"), ("cpsat_throughput", "throughput")]
)
def test_asking_for_the_solver_names_the_extra_in_one_message(algorithm: str, objective: str) -> None:
    command = ("plan", "gen:chain:12", "--algorithm", algorithm, "--objective", objective)
    done = without(MAIN, *command)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("not installed") == 1
    assert "loadmaster[exact]" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("objective", "solver"), [("step", "cpsat_latency"), ("throughput", "cpsat_throughput")]
)
def test_auto_plans_without_the_solver_and_says_so(objective: str, solver: str) -> None:
    command = ("plan", "gen:layered:40", "-d", "2xT4", "--objective", objective, "--split", "free")
    said = answered(*command, "--budget", "200x")
    assert said["status"] in ("feasible", "optimal")
    assert said["bound_s"] > 0
    skipped = next(row for row in said["members"] if row["name"] == solver)
    if "proven" not in skipped["reason"]:
        assert "loadmaster[exact]" in skipped["reason"]


def test_compare_says_what_the_solver_lacks_and_goes_on() -> None:
    command = ("compare", "gen:chain:8", "-d", "2xT4", "-a", "cpsat_latency,heft", "--budget", "20x")
    rows = {row["name"]: row for row in answered(*command)["results"]}
    assert "loadmaster[exact]" in rows["cpsat_latency"]["reason"]
    assert rows["heft"]["step_s"] > 0


def test_the_warm_up_asks_every_algorithm_but_those() -> None:
    code = """
import loadmaster.simulator.jit as jit
jit.is_warm, jit.mark_warm = lambda part: False, lambda part: None  # as on a machine that is new
from loadmaster.placers.warm import warm_up
warm_up()
print("warm")
"""
    done = without(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "warm\n"


def test_a_bound_under_a_budget_is_that_of_the_programmes() -> None:
    code = """
import loadmaster as lm
problem = lm.problem("gen:layered:30", "2xT4")
assert lm.lower_bound(problem, "50x") == lm.lower_bound(problem)
print(lm.lower_bound(problem).seconds > 0)
"""
    done = without(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n"


@pytest.fixture(params=["ortools/__init__.py", "ortools/sat/python/cp_model.py"])
def broken(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """Code that puts an ortools first which is there and raises when it is imported, at once or late."""
    module = tmp_path / request.param
    module.parent.mkdir(parents=True, exist_ok=True)
    for folder in ("ortools", "ortools/sat", "ortools/sat/python"):
        if (tmp_path / folder).exists():
            (tmp_path / folder / "__init__.py").touch()
    module.write_text("raise ImportError('libortools.so.9: cannot open shared object file')\n")
    return f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"


def with_broken(broken: str, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", broken + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_a_solver_that_cannot_be_imported_is_left_out_with_the_cause(broken: str) -> None:
    command = ("gen:layered:40", "-d", "2xT4", "--split", "free", "--budget", "200x", "--json")
    done = with_broken(broken, MAIN, "plan", *command)
    assert done.returncode == 0, done.stderr
    (skipped,) = [m for m in json.loads(done.stdout)["members"] if m["name"] == "cpsat_latency"]
    assert skipped["status"] is None
    assert "installed but cannot be imported" in skipped["reason"]
    assert "libortools.so.9" in skipped["reason"]
    done = with_broken(broken, MAIN, "compare", *command, "-a", "cpsat_latency,heft")
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)["results"]}
    assert "libortools.so.9" in rows["cpsat_latency"]["reason"]
    assert rows["heft"]["step_s"] > 0


def test_a_broken_solver_that_is_named_is_one_message_and_bounds_do_without(broken: str) -> None:
    command = ("plan", "gen:chain:12", "-d", "2xT4", "--algorithm", "cpsat_latency", "--budget", "5x")
    done = with_broken(broken, MAIN, *command)
    assert done.returncode == 2
    assert "installed but cannot be imported (ImportError: libortools.so.9" in done.stderr
    assert "Traceback" not in done.stderr
    code = """
import loadmaster as lm
problem = lm.problem("gen:layered:30", "2xT4")
print(lm.lower_bound(problem, "50x") == lm.lower_bound(problem))
"""
    done = with_broken(broken, code)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
