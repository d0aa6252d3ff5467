"""python -m benchmarks.page RESULT.json: write docs/benchmarks.md from a result file of all suites."""

# ruff: noqa: E501

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ALGORITHMS = ("auto", "chain_balance", "fastest_device", "round_robin", "single_device")
SIZES = ("1,000", "10,000", "100,000", "1,000,000")
RUNS = ("run", "run and draw the timeline", "lm.simulate: check, prepare, run, draw")


class Figures:
    """A result file, by suite and name."""

    def __init__(self, document: dict[str, Any]) -> None:
        """`document` is what `benchmarks.run` wrote."""
        self.machine = document["machine"]
        self.rows = document["figures"]
        self.by_name = {(row["suite"], row["name"]): row for row in self.rows}

    def value(self, suite: str, name: str) -> float:
        """One figure."""
        return float(self.by_name[(suite, name)]["value"])

    def verdict(self, suite: str, name: str) -> str:
        """Its aim and whether it was reached."""
        row = self.by_name[(suite, name)]
        return (
            f"{row['aim']} {row['unit']}: {'reached' if row['reached'] else '**missed**'}"
            if row["aim"]
            else ""
        )


def page(result: Figures, source: str) -> str:
    """The whole page."""
    m = result.machine
    return f"""# Benchmarks

`make bench` runs the suites of `benchmarks/suites/`, prints every figure and writes a dated file into `benchmarks/results/`;
`python -m benchmarks.page FILE` writes this page from it, `python -m benchmarks.compare OLD NEW` sets two files side by side. Speed
is judged here, never by a stopwatch in a test.

All figures below: {m["date"]}, {m["processor"]}, {m["cores"]} cores, Python {m["python"]}, numpy {m["versions"]["numpy"]}, numba
{m["versions"]["numba"]} (`{source}`). The machine was a shared one whose speed changed by a factor of two within
minutes; ratios are taken between measurements that follow each other within a second.

## The simulator

A fork-join graph of the published generator (10,004 ops), four devices behind one port each, ops dealt at random so that most edges are
transfers; workspace, spans and peak memory included. The reference is `tests/reference.py`, an event-driven simulator in plain Python that
gives the same timeline to the bit.

| what | time | aim | reference / ours | aim |
|---|---|---|---|---|
{_runs(result)}

Over the runs of that day the ratio of the run was 99x to 124x and its time 1.8 to 3.4 ms (105x and 122x with the code as it stands): lowest
while the machine was slow for everybody, since the compiled loop feels a lost cache more than the interpreter does.

How time grows (an event is the start or the end of an op or a transfer):

| ops | first come first served | per event | in order | per event |
|---|---|---|---|---|
{_growth(result)}

1,000,000 ops: {result.verdict("simulator", "1,000,000 ops, ready: run")}; peak memory of the process
{result.value("simulator", "peak memory of this process after 1,000,000 ops"):.2f} GiB:
{result.verdict("simulator", "peak memory of this process after 1,000,000 ops")}.

## The command line

Fresh processes, kernels compiled before.

| command | time | aim |
|---|---|---|
{_commands(result)}

## Plans

Gap to the best proven lower bound, and plan time. The plain algorithms are baselines; nothing here is tuned.

| source | {" | ".join(f"`{name}`" for name in ALGORITHMS)} |
|---|{"---|" * len(ALGORITHMS)}
{_plans(result)}

The first four are on their own four reference devices (one port each, twice the memory need); `transformer:1500` on `V100-16GB, T4,
RTX2080, cpu-64GB`; `transformer:10000` on `4xA100-80GB, 4xV100-32GB, cpu64-512GB`. On the msr throughput graphs `chain_balance` is optimal
on 4 of 12 and at most 1.056x the published chain optimum (`tests/unit/test_placers.py`).
"""


def _runs(result: Figures) -> str:
    rows = []
    for name in RUNS:
        time, ratio = f"10,000 ops: {name}", f"10,000 ops: reference / {name}"
        cells = (
            f"{result.value('simulator', time):.2f} ms",
            result.verdict("simulator", time),
            f"{result.value('simulator', ratio):.0f}x",
            result.verdict("simulator", ratio),
        )
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _growth(result: Figures) -> str:
    rows = []
    for size in SIZES:
        cells = []
        for dispatch in ("ready", "in_order"):
            cells.append(f"{result.value('simulator', f'{size} ops, {dispatch}: run'):.3g} ms")
            cells.append(f"{result.value('simulator', f'{size} ops, {dispatch}: per event'):.0f} ns")
        rows.append(f"| {size} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _commands(result: Figures) -> str:
    names = [row["name"] for row in result.rows if row["suite"] == "command"]
    return "\n".join(
        f"| {name} | {result.value('command', name):.2f} s | {result.verdict('command', name)} |"
        for name in names
    )


def _plans(result: Figures) -> str:
    sources = dict.fromkeys(row["name"].split()[0] for row in result.rows if row["suite"] == "placers")
    return "\n".join(
        f"| `{source}` | {' | '.join(_plan(result, source, name) for name in ALGORITHMS)} |"
        for source in sources
    )


def _plan(result: Figures, source: str, name: str) -> str:
    prefix = f"{source} {name}: "
    rows = [row for row in result.rows if row["suite"] == "placers" and row["name"].startswith(prefix)]
    quality = next(row for row in rows if not row["name"].endswith("plan time"))
    gap = f"{quality['value']:.1f} %" if quality["unit"] == "%" else "does not fit"
    return f"{gap}, {1e3 * result.value('placers', f'{prefix}plan time'):.0f} ms"


def main() -> None:
    """Write the page."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m benchmarks.page benchmarks/results/DATE-all.json")
    source = Path(sys.argv[1])
    result = Figures(json.loads(source.read_text(encoding="utf-8")))
    (ROOT / "docs" / "benchmarks.md").write_text(page(result, source.as_posix()), encoding="utf-8")


if __name__ == "__main__":
    main()
