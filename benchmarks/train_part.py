"""One part of the training suite in a process of its own: python -m benchmarks.train_part NAME.

Reads what earlier parts found as a JSON object from standard input; prints every figure at once as a JSON
line, at the end what it found, and on standard error whatever went wrong.
"""

import json
import os
import sys
from dataclasses import asdict, fields
from typing import Any

from benchmarks.measure import Report


class LineReport(Report):
    """A report whose figures are JSON lines."""

    def add(
        self, suite: str, name: str, value: float, unit: str, *, aim: str = "", reached: bool | None = None
    ) -> None:
        """Print it, then and there."""
        figure = {"suite": suite, "name": name, "value": float(value), "unit": unit, "aim": aim}
        print(json.dumps({"figure": {**figure, "reached": reached}}), flush=True)


def main() -> None:
    """Run the part that is named."""
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # before torch is there
    from benchmarks import train_lora, train_overlap, train_parts

    parts: dict[str, Any] = {
        "smoke": train_parts.smoke,
        "calibrate": train_parts.calibrated,
        "resident": train_parts.resident,
        "peer": train_parts.peer,
        "one": train_parts.one_trial,
        "four": train_parts.four_trials,
        "overlap": lambda report, found: train_overlap.measure(report),
        "lora": lambda report, found: train_lora.measure(report),
    }
    known = {field.name for field in fields(train_parts.Found)}
    given = {} if sys.stdin.isatty() else json.loads(sys.stdin.read() or "{}")
    found = train_parts.Found(**{name: value for name, value in given.items() if name in known})
    parts[sys.argv[1]](LineReport(), found)
    print(json.dumps({"found": asdict(found)}), flush=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # all is said; threads of libraries need not be waited for


if __name__ == "__main__":
    main()
