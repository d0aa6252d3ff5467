"""The examples of the pages: run as they stand, and compared with the output that is printed below them.

`python -m tests.doc_examples PAGE ...` writes the outputs anew.

A page is one session: its blocks run in order, in one folder, and share names.

    ```python                   runs; what it prints is compared with a block ```text that follows it
    ```python title="net.py"    is written to that file
    ```toml title="pile.toml"   likewise
    ```console                  lines that start with `$ ` are commands (`| head -8` may end one), the
                                rest is what they print
    <!-- not run: REASON -->    before a block: it is left out
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(
    r"(?P<skip><!-- not run: [^>]*-->\s*\n)?^```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n"
    r"(?P<body>.*?)^```$",
    re.M | re.S,
)
_VARIES = re.compile(
    r"(±\s*)?\d[\d.,]*\s?(us|ms|s|min|x|%|samples/s|tokens/s)(?![\w-])|[█░▏▎▍▌▋▊▉]+|[0-9a-f]{16}"
    r"|[\d.]+ GiB free|trials at once, of [\d.]+ GiB"
)
_WIDTH = "100"
_DRIVER = """
import contextlib, io, json, sys
names = {"__name__": "__main__"}
for line in sys.stdin:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(json.loads(line), "block", "exec"), names)
    sys.__stdout__.write(json.dumps(out.getvalue()) + "\\n")
    sys.__stdout__.flush()
"""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page, and where its body stands."""

    language: str
    title: str
    body: str
    start: int
    end: int
    is_run: bool


def read_blocks(text: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    return [
        Block(m["language"], m["title"] or "", m["body"], m.start("body"), m.end("body"), not m["skip"])
        for m in _FENCE.finditer(text)
    ]


def run_page(text: str, folder: Path, *, python: str = "") -> str:
    """The page with the outputs that its examples print when they run in the folder.

    `python` is the interpreter of another environment, which then sees nothing of this one.
    """
    found = read_blocks(text)
    environment = {**os.environ, "COLUMNS": _WIDTH, "PYTHONWARNINGS": "ignore", "LOADMASTER_MEASURE": "0"}
    if python:
        environment["PYTHONPATH"] = ""
    python = python or sys.executable
    driver = subprocess.Popen(
        [python, "-c", _DRIVER],
        cwd=folder,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    edits: list[tuple[Block, str]] = []
    printed: str | None = None  # by the Python block before
    for block in found:
        if not block.is_run:
            printed = None
        elif block.title:
            (folder / block.title).write_text(block.body, encoding="utf-8")
        elif block.language == "python":
            printed = _run_python(driver, block.body)
        elif block.language == "console":
            edits.append((block, _run_commands(block.body, folder, environment, python)))
        elif block.language == "text" and printed is not None:
            edits.append((block, printed))
            printed = None
    _end(driver)
    for block, body in reversed(edits):
        text = text[: block.start] + body + text[block.end :]
    return text


def _run_python(driver: "subprocess.Popen[str]", code: str) -> str:
    assert driver.stdin is not None
    assert driver.stdout is not None
    driver.stdin.write(json.dumps(code) + "\n")
    driver.stdin.flush()
    answer = driver.stdout.readline()
    if not answer:
        _, errors = driver.communicate()
        raise AssertionError(f"a block failed:\n{code}\n{errors}")
    return _strip_lines(json.loads(answer))


def _end(driver: "subprocess.Popen[str]") -> None:
    driver.communicate()
    assert driver.returncode == 0, "the examples did not end well"


def _run_commands(body: str, folder: Path, environment: dict[str, str], python: str) -> str:
    parts = []
    lines = iter(body.splitlines())
    for line in lines:
        if not line.startswith("$ "):
            continue
        shown = line
        while shown.endswith("\\"):
            shown += "\n" + next(lines)
        asked, _, most = shown[2:].replace("\\\n", " ").partition(" | head -")
        words = shlex.split(asked)
        program = [python, "-m", "loadmaster"] if words[0] == "loadmaster" else None
        program = [python] if words[0] == "python" else program
        assert program is not None, f"only loadmaster and python are run here: {shown}"
        result = subprocess.run(
            [*program, *words[1:]], cwd=folder, env=environment, capture_output=True, text=True
        )
        assert result.returncode in (0, 1, 2), f"{shown}\n{result.stderr}"
        printed = result.stdout if result.returncode != 2 else result.stderr.splitlines()[-1] + "\n"
        assert printed or not result.returncode, f"{shown}\n{result.stderr}"
        kept = "".join(printed.splitlines(keepends=True)[: int(most) if most else None])
        parts.append(f"{shown}\n{_strip_lines(kept)}")
    return "".join(parts)


def _strip_lines(printed: str) -> str:
    """Without spaces at the ends of lines, and with one line end at most at the end."""
    lines = [line.rstrip() for line in printed.splitlines()]
    return "\n".join(lines).strip("\n") + "\n" if any(lines) else ""


def normalise(text: str) -> str:
    """A page without what differs between two runs: times, shares, bars, digests, columns' widths."""
    return re.sub(r"[ \t]+", " ", _VARIES.sub("#", text))


def main() -> None:
    """Write the outputs of the pages named on the command line."""
    for name in sys.argv[1:]:
        page = Path(name)
        with tempfile.TemporaryDirectory() as folder:
            page.write_text(run_page(page.read_text(encoding="utf-8"), Path(folder)), encoding="utf-8")
        print(f"written: {page}")


if __name__ == "__main__":
    main()
