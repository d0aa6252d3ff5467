"""The command `loadmaster` in a process of its own, as a user starts it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

SCRIPT = Path(sys.executable).with_name("loadmaster")
COMMAND = [str(SCRIPT)] if SCRIPT.exists() else [sys.executable, "-m", "loadmaster.cli.app"]
TIMEOUT_S = 120
Say = Callable[..., tuple[int, str, str]]  # arguments -> exit code, stdout, stderr


def environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment without what would change how the command line speaks, plus `changes`."""
    unwanted = {"COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "PYTHONIOENCODING", "PYTHONUTF8", "TERM"}
    own = {name: value for name, value in os.environ.items() if name not in unwanted}
    return {**own, "COLUMNS": "100", **(changes or {})}


def start(
    *arguments: str | bytes,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    stdout: Any = subprocess.PIPE,
    limits: Callable[[], None] | None = None,
) -> subprocess.Popen[bytes]:
    """Start the command; `limits` runs in the child before it."""
    return subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=cwd,
        env=environment(env),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        preexec_fn=limits,
    )


def finish(process: subprocess.Popen[bytes]) -> subprocess.CompletedProcess[str]:
    """Wait for a command and decode what it said."""
    out, err = process.communicate(timeout=TIMEOUT_S)
    texts = ((part or b"").decode("utf-8", "surrogateescape") for part in (out, err))
    return subprocess.CompletedProcess(process.args, process.returncode, *texts)


def loadmaster(*arguments: str | bytes, cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command to its end. Nothing it does may end in a traceback."""
    done = finish(start(*arguments, cwd=cwd, **options))
    assert "Traceback" not in done.stderr, done.stderr
    return done


def answer(*arguments: str | bytes, cwd: Path, code: int = 0, **options: Any) -> dict[str, Any]:
    """The one JSON document of a command with --json."""
    done = loadmaster(*arguments, "--json", cwd=cwd, **options)
    assert done.returncode == code, done.stderr
    document = json.loads(done.stdout)
    assert isinstance(document, dict)
    return document


def ask(say: Say, *arguments: str, code: int = 0) -> Any:
    """The JSON document of a command run by the fixture `say`."""
    ended, out, err = say(*arguments, "--json")
    assert ended == code, err
    return json.loads(out)


def write_graph(path: Path, *ops: dict[str, Any], links: Any = (), name: str = "") -> None:
    document = {"directed": True, "nodes": list(ops), "links": list(links), "graph": {"name": name}}
    path.write_text(json.dumps(document))
