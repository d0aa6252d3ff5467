"""The result file of a long run: the machine, the command, and what was found, part by part.

A run is done in parts (ranges of seeds, say), so that it can be stopped and continued: a part is written when
it is done, under its name, and the totals are those of the parts that are there.
"""

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.measure import machine


def add_part(path: Path, name: str, part: dict[str, Any]) -> dict[str, Any]:
    """Write a part into a result file, and return the whole of it."""
    whole = read_parts(path)
    module = getattr(sys.modules["__main__"].__spec__, "name", "")
    if "machine" not in whole:
        whole["machine"] = machine() | {"command": f"python -m {module} {' '.join(sys.argv[1:])}".strip()}
    whole.setdefault("parts", {})[name] = part
    whole["total"] = _sum_parts(list(whole["parts"].values()))
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return whole


def read_parts(path: Path) -> dict[str, Any]:
    """A result file, or nothing yet."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _sum_parts(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Numbers added up, lists joined."""
    total: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if isinstance(value, int | float | list):
                total[name] = total[name] + value if name in total else value
    return total
