"""python -m benchmarks.trust.readers OUT [INPUTS]: damaged files for every reader, 10^6 of them.

Each input is a valid file with something wrong in it (`tests/mutations.py`). A reader may read it or refuse
it with an error of ours; it may not raise anything else, take more than 5 s of the processor, or 1 GiB. The
run is done in 50 parts; those that OUT has already are passed over.
"""

import sys
import time
import warnings
from pathlib import Path
from typing import Any

from tests.readers import all_readers, run_inputs

from benchmarks.trust.record import add_part, read_parts

_PARTS = 50


def main() -> None:
    """Run the parts that are missing."""
    warnings.simplefilter("ignore")
    out = Path(sys.argv[1])
    inputs = int(float(sys.argv[2])) if len(sys.argv) > 2 else 10**6
    for part in range(_PARTS):
        name = f"part {part + 1} of {_PARTS} of {inputs} inputs"
        if name not in read_parts(out).get("parts", {}):
            total = add_part(out, name, _run_part(part, inputs))["total"]
            print(f"{name}: {total['inputs']} so far, {len(total['wrong'])} wrong", flush=True)


def _run_part(part: int, inputs: int) -> dict[str, Any]:
    started, readers = time.perf_counter(), all_readers()
    each = inputs / _PARTS / sum(reader.share for reader in readers.values())
    figures: dict[str, Any] = {"inputs": 0, "read": 0, "refused": 0, "wrong": []}
    for reader in readers.values():
        count = -int(-each * reader.share // 1)
        read, wrong = run_inputs(reader, part * count, (part + 1) * count)
        figures[reader.name] = count
        figures["inputs"] += count
        figures["read"] += read
        figures["refused"] += count - read - len(wrong)
        figures["wrong"] += wrong
    return figures | {"wall_s": round(time.perf_counter() - started, 1)}


if __name__ == "__main__":
    main()
