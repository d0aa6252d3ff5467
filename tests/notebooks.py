"""Notebooks, run without Jupyter: cells in order in one process, each with what it prints and shows.

`python -m tests.notebooks NOTEBOOK ...` writes the outputs anew.
"""

import ast
import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_SHOWN = (("image/svg+xml", "_repr_svg_"), ("text/html", "_repr_html_"))
_ENVIRONMENT = {"COLUMNS": "100", "PYTHONWARNINGS": "ignore", "LOADMASTER_MEASURE": "0"}


def run_cells(cells: list[str]) -> list[list[dict[str, Any]]]:
    """What each cell prints, and what its last line shows where that is an expression: as Jupyter has it."""
    names: dict[str, Any] = {"__name__": "__main__"}
    return [_run_cell(cell, names) for cell in cells]


def _run_cell(code: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), names)
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), names) if last is not None else None
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": _lines(printed.getvalue())})
    if value is not None:
        data = {kind: _lines(getattr(value, how)()) for kind, how in _SHOWN if hasattr(value, how)}
        data["text/plain"] = _lines(repr(value))
        outputs.append(
            {"output_type": "execute_result", "execution_count": None, "metadata": {}, "data": data}
        )
    return outputs


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def run_notebook(path: Path, folder: Path) -> dict[str, Any]:
    """The notebook with the outputs that it has when it is run in the folder, in a process of its own."""
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    cells = [cell for cell in document["cells"] if cell["cell_type"] == "code"]
    result = subprocess.run(
        [sys.executable, "-m", "tests.notebooks", "--cells"],
        input=json.dumps(["".join(cell["source"]) for cell in cells]),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **_ENVIRONMENT},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    for number, (cell, outputs) in enumerate(zip(cells, json.loads(result.stdout), strict=True), 1):
        cell["outputs"], cell["execution_count"] = outputs, number
        for each in outputs:
            if "execution_count" in each:
                each["execution_count"] = number
    return document


def main() -> None:
    """Write the outputs of the notebooks named on the command line."""
    if sys.argv[1:] == ["--cells"]:
        sys.stdout.write(json.dumps(run_cells(json.loads(sys.stdin.read()))))
        return
    import tempfile

    for name in sys.argv[1:]:
        path = Path(name)
        with tempfile.TemporaryDirectory() as folder:
            document = run_notebook(path, Path(folder))
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"written: {path}")


if __name__ == "__main__":
    main()
