"""Replay a recorded trace of jobs under three policies, and compare them with what no policy can beat.

The same on the command line:
    loadmaster advise replay jobs.trace --throughputs rates.json --devices 16 --policy fifo,elasticflow
"""

import json
import random
import tempfile
from pathlib import Path

from loadmaster.advisor.environments.trace import read_throughputs, read_trace
from loadmaster.advisor.replay_traces import bench_trace, trace_rules

rates = {"resnet": 10.0, "bert": 3.0}  # measured steps per second on one GPU
chance = random.Random(0)

with tempfile.TemporaryDirectory() as folder:
    # A line of a trace: type, command, argument, needs data, steps, arrival, GPUs (Gavel's format).
    lines, at = [], 0.0
    for _ in range(120):
        at += chance.expovariate(1 / 300)
        kind = chance.choice(list(rates))
        steps = rates[kind] * chance.uniform(1800, 7200)
        lines.append(
            f"{kind}\tpython train.py\t--steps\t0\t{steps:.0f}\t{at:.1f}\t{chance.choice((1, 2, 4))}"
        )
    (Path(folder) / "jobs.trace").write_text("\n".join(lines) + "\n")
    measured = {
        f"('{kind}', {n})": {"null": rate * n**0.9} for kind, rate in rates.items() for n in (1, 2, 4, 8)
    }
    (Path(folder) / "rates.json").write_text(json.dumps({"v100": measured}))

    trace = read_trace(Path(folder) / "jobs.trace")
    throughputs = read_throughputs(Path(folder) / "rates.json")
    rules = trace_rules(["fifo", "elasticflow", "largest-set"])
    for row in bench_trace(trace, throughputs, 16, range(3), rules):
        print(f"{row.policy:12} {row.mean:.0%} of the deadlines met (no policy more than {row.bound:.0%})")
