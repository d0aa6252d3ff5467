"""What is loaded when, what is public, and which options there are: changes here are changes for users.

The options of the command line are compared with `tests/golden/cli_options.json`. After a change made on
purpose, renew that file and look at its difference:

    python -m tests.integration.test_import && git diff tests/golden/cli_options.json
"""

import difflib
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import loadmaster as lm
from loadmaster.cli.commands import app

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "cli_options.json"
HEAVY = ("numpy", "numba", "scipy", "torch", "msgspec", "rich.console", "ortools")
PUBLIC = [
    "capture", "fit", "place", "run", "verify",
    "Budget", "Cluster", "Costs", "Graph", "LoadmasterError", "Pipeline", "Placement", "Plan", "Problem",
    "Run", "Status", "Timeline", "__version__", "check_plan", "compare_timelines", "load", "lower_bound",
    "placer", "plan", "problem", "save", "simulate", "Study", "Trial",
    "advise", "diff", "explain", "export", "import_file", "launch", "load_measured", "lower", "ways",
    "whatif", "write_report",
]  # fmt: skip


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a line of Python in a fresh process."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def loaded_by(code: str, *arguments: str) -> tuple[set[str], subprocess.CompletedProcess[str]]:
    """Which of the heavy modules a line of Python loads."""
    report = "import sys; sys.stderr.write('\\n' + ' '.join(set(sys.modules)))"
    done = python(f"import atexit; atexit.register(lambda: exec({report!r})); {code}", *arguments)
    return set(HEAVY) & set(done.stderr.split()), done


def test_importing_loadmaster_loads_nothing_heavy_and_prints_nothing() -> None:
    loaded, done = loaded_by("import loadmaster")
    assert done.returncode == 0
    assert done.stdout == ""
    assert done.stderr.startswith("\n")  # nothing before the report
    assert loaded == set()


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["--version"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    loaded, done = loaded_by("from loadmaster.cli.app import main; main()", *arguments)
    assert done.returncode == 0
    assert "loadmaster" in done.stdout
    assert loaded == set()


def test_the_whole_interface_loads_neither_torch_nor_the_simulator() -> None:
    names = "set(lm.__all__) - {'Study', 'Trial'}"  # training is torch
    loaded, done = loaded_by(f"import loadmaster as lm; [getattr(lm, name) for name in {names}]")
    assert done.returncode == 0
    assert not loaded & {"torch", "numba", "scipy"}


def test_planning_and_simulating_load_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys, loadmaster as lm; p = lm.plan('gen:chain:10', budget='5x', algorithm='round_robin');"
        "lm.simulate(p.problem, p.plan); lm.save(p, sys.argv[1])"
    )
    loaded, done = loaded_by(code, str(tmp_path / "p.json"))
    assert done.returncode == 0, done.stderr
    assert "numba" in loaded  # the report sees what is loaded
    assert "torch" not in loaded


def test_bad_input_is_answered_without_loading_the_simulator() -> None:
    loaded, done = loaded_by("from loadmaster.cli.app import main; main()", "plan", "nowhere.json")
    assert done.returncode == 2
    assert not loaded & {"numba", "scipy", "torch"}


def test_the_public_names_are_these() -> None:
    assert sorted(lm.__all__) == sorted(PUBLIC)
    assert dir(lm) == sorted(PUBLIC)
    for name in PUBLIC:
        assert getattr(lm, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = lm.nonsense


def test_every_error_is_caught_by_one_name() -> None:
    from loadmaster.core import errors

    tree = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(tree) > 8
    assert all(issubclass(kind, lm.LoadmasterError) for kind in tree)


def options() -> dict[str, Any]:
    """Every verb with its arguments and options, read from the functions behind them."""
    callback = app.registered_callback
    assert callback is not None
    verbs = {"": callback.callback, **{str(verb.name): verb.callback for verb in app.registered_commands}}
    for group in app.registered_groups:
        assert group.typer_instance is not None
        for verb in group.typer_instance.registered_commands:
            verbs[f"{group.name} {verb.name}"] = verb.callback
    return {name: _parameters(function) for name, function in verbs.items()}


def _parameters(function: Any) -> list[dict[str, Any]]:
    hints = get_type_hints(function, include_extras=True)
    found = []
    for name, parameter in inspect.signature(function).parameters.items():
        kind, told = get_args(hints[name])
        is_option = isinstance(told.default, str)  # typer takes the first of an option's names for this
        required = parameter.default is inspect.Parameter.empty
        found.append(
            {
                "name": name,
                "written": [told.default, *(told.param_decls or ())] if is_option else [told.metavar],
                "type": kind.__name__ if isinstance(kind, type) else str(kind),
                "required": required,
                "default": None if required else parameter.default,
            }
        )
    return found


def written() -> str:
    """The options as JSON, a line each."""
    verbs = (
        f"{json.dumps(verb)}: [\n" + ",\n".join(f"  {json.dumps(each)}" for each in found) + "\n]"
        for verb, found in options().items()
    )
    return "{\n" + ",\n".join(verbs) + "\n}\n"


def test_the_options_of_the_command_line_are_the_recorded_ones() -> None:
    recorded, now = GOLDEN.read_text(), written()
    changes = "".join(
        difflib.unified_diff(recorded.splitlines(True), now.splitlines(True), "recorded", "now", n=8)
    )
    assert not changes, (
        f"the command line has changed; if on purpose: python -m tests.integration.test_import\n{changes}"
    )


if __name__ == "__main__":
    GOLDEN.write_text(written())
    print(f"renewed {GOLDEN.name}")
