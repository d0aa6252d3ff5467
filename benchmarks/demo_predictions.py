"""Run the training half of `loadmaster demo` several times: is each row of its table what was measured?

    python -m benchmarks.demo_predictions RUNS FILE.json

Every run is a process of its own on one database, which the first one fills. The file has every run as it
was, with the load of the machine before and after; nothing is left out.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_RUN = """
import json, sys, msgspec
from loadmaster.cli.demo import training
print(json.dumps(training.training_document(sys.argv[1], 10)["run"]))
"""
_WITHIN = 0.15


def run_once(database: str, folder: str) -> dict[str, Any]:
    """One demo: rows of its table as predicted / measured - 1, and whether it said that it was busy."""
    before = os.getloadavg()
    made = subprocess.run(
        [sys.executable, "-c", _RUN, folder],
        env={**os.environ, "LOADMASTER_COSTS": database},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    ran = json.loads(made.stdout.splitlines()[-1])
    rows = {"step time": ran["step_s"], "transfers": ran["num_transfers"], "transfer time": ran["transfer_s"]}
    for device in ran["devices"]:
        rows |= {
            f"{device['device']} {what}": device[f"{what}_{unit}"]
            for what, unit in (("busy", "s"), ("peak", "bytes"))
        }
    errors = {
        name: pair["predicted"] / pair["measured"] - 1 for name, pair in rows.items() if pair["measured"]
    }
    return {
        "load_before": before[0],
        "load_after": os.getloadavg()[0],
        "said_busy": ran["busy"],
        "others_cores": ran["others_cores"],
        "error_bar": ran["step_rel_error"],
        "rows": rows,
        "errors": errors,
        "all_within": all(abs(error) <= _WITHIN for error in errors.values()),
    }


def main() -> None:
    """As many runs as asked for; written after each."""
    num, path = int(sys.argv[1]), Path(sys.argv[2])
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(num):
            runs.append(run_once(str(Path(folder) / "costs.sqlite"), folder))
            path.write_text(
                json.dumps({"within": _WITHIN, "cores": os.cpu_count(), "runs": runs}, indent=1) + "\n"
            )
            print(runs[-1]["said_busy"], runs[-1]["load_before"], runs[-1]["errors"])


if __name__ == "__main__":
    main()
