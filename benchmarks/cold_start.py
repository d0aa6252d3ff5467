"""python -m benchmarks.cold_start OUT [WORDS ...]: what a first plan compiles on a new machine.

The command (`plan hf:gpt2 ...` unless given) runs in a process of its own whose cache of kernels is empty.
Told are its processor time and the part of it that compiled kernels, each kernel without those that it calls.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.trust.record import add_part

_WORDS = ["plan", "hf:gpt2", "--devices", "RTX4090,RTX3090", "--budget", "5s"]
_MOST = 12


def main() -> None:
    """Run the command cold, and write down what it took."""
    out, words = Path(sys.argv[1]), sys.argv[2:] or _WORDS
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "told.json"
        env = {**os.environ, "NUMBA_CACHE_DIR": folder, "OMP_NUM_THREADS": "1"}
        command = [
            sys.executable,
            "-c",
            "from benchmarks.cold_start import watch; watch()",
            str(told),
            *words,
        ]
        subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
        found = json.loads(told.read_text())
    add_part(out, " ".join(words), {**found, "load of the machine": round(os.getloadavg()[0], 1)})
    print(json.dumps(found, indent=1))


def watch() -> None:
    """In the process of the command: run it and note what numba compiles."""
    from numba.core import event

    class Listener(event.Listener):
        """Seconds of each kernel, without what it has compiled meanwhile."""

        def __init__(self) -> None:
            self.running: list[list[float]] = []
            self.seconds: dict[str, float] = {}

        def on_start(self, event: Any) -> None:
            self.running.append([time.process_time(), 0.0])

        def on_end(self, event: Any) -> None:
            began, inside = self.running.pop()
            took = time.process_time() - began
            kernel = event.data["dispatcher"].py_func
            name = f"{kernel.__module__}.{kernel.__name__}"
            self.seconds[name] = self.seconds.get(name, 0.0) + took - inside
            if self.running:
                self.running[-1][1] += took

    listener, told = Listener(), Path(sys.argv[1])
    event.register("numba:compile", listener)
    sys.argv = ["loadmaster", *sys.argv[2:]]
    from loadmaster.cli.app import main as run

    try:
        run()
    except SystemExit as problem:
        if problem.code:
            raise
    slowest = sorted(listener.seconds.items(), key=lambda item: -item[1])[:_MOST]
    found = {
        "processor_s": round(time.process_time(), 1),
        "compiling_s": round(sum(listener.seconds.values()), 1),
        "kernels": len(listener.seconds),
        "slowest_s": {name: round(seconds, 2) for name, seconds in slowest},
    }
    told.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
