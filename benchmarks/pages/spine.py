"""The sections on the simulator, the command line and transformer plans."""

# ruff: noqa: E501

from benchmarks.pages.figures import NOT_RUN, Figures, table
from benchmarks.suites.placers import CASES
from benchmarks.suites.simulator import SIZES

_RUNS = ("run", "run and draw the timeline", "lm.simulate: check, prepare, run, draw")


def simulator(result: Figures) -> str:
    """Against the reference, and growth."""
    if not result.of("simulator"):
        return f"## The simulator\n\n{NOT_RUN}\n"
    peak = "peak memory of this process after 1,000,000 ops"
    return f"""## The simulator

The graph is a fork-join graph of the published generator (10,004 ops) on four devices with one port each. Ops are placed at random, so most edges are transfers. Workspace, spans and peak memory are included. The reference is `tests/reference.py`, a simulator in plain Python that gives the same timeline to the bit.

{_against_reference(result)}

Over repeated runs of 2026-11-15 the ratio of the run was 99x to 124x and its time 1.8 to 3.4 ms: lowest while the machine was busy, because the compiled loop suffers more from a lost cache than the interpreter.

Time by size of the graph (an event is the start or the end of an op or a transfer):

{_growth(result)}

1,000,000 ops: {result.verdict("simulator", "1,000,000 ops, ready: run")}; peak memory of the process
{result.value("simulator", peak):.2f} GiB: {result.verdict("simulator", peak)}.
"""


def _against_reference(result: Figures) -> str:
    rows = []
    for name in _RUNS:
        time, ratio = f"10,000 ops: {name}", f"10,000 ops: reference / {name}"
        rows.append(
            (
                name,
                f"{result.value('simulator', time):.2f} ms",
                result.verdict("simulator", time),
                f"{result.value('simulator', ratio):.0f}x",
                result.verdict("simulator", ratio),
            )
        )
    return table(("what", "time", "aim", "reference / ours", "aim"), rows)


def _growth(result: Figures) -> str:
    rows = []
    for size in SIZES:
        cells = [f"{size:,}"]
        for dispatch in ("ready", "in_order"):
            cells.append(f"{result.value('simulator', f'{size:,} ops, {dispatch}: run'):.3g} ms")
            cells.append(f"{result.value('simulator', f'{size:,} ops, {dispatch}: per event'):.0f} ns")
        rows.append(cells)
    return table(("ops", "first come first served", "per event", "in order", "per event"), rows)


def command_line(result: Figures) -> str:
    """Fresh processes."""
    rows = [
        (row["name"], f"{row['value']:.2f} s", result.verdict("command", row["name"]))
        for row in result.of("command")
    ]
    body = f"Each command runs in a new process, with kernels compiled before.\n\n{table(('command', 'time', 'aim'), rows)}"
    return f"## The command line\n\n{body if rows else NOT_RUN}\n"


def transformers(result: Figures) -> str:
    """Every algorithm on transformer training steps."""
    rows = result.of("placers")
    if not rows:
        return f"## Transformers\n\n{NOT_RUN}\n"
    first = CASES[0][0]
    names = [
        row["name"].removeprefix(f"{first} ").removesuffix(": plan time")
        for row in rows
        if row["name"].startswith(f"{first} ") and row["name"].endswith(": plan time")
    ]
    cells = ([f"`{name}`", *(_plan(result, source, name) for source, _ in CASES)] for name in names)
    body = table(("algorithm", *(f"`{source}` on `{devices}`" for source, devices in CASES)), cells)
    return f"""## Transformers

Gap to the best proven lower bound, and plan time, of GPT-2-like training steps on unequal devices.

{body}

On the msr throughput graphs `chain_balance` is optimal on 4 of 12 and at most 1.056x the published chain optimum
(`tests/unit/placers/test_placers.py`).
"""


def _plan(result: Figures, source: str, name: str) -> str:
    prefix = f"{source} {name}: "
    if not result.has("placers", f"{prefix}plan time"):
        return "-"
    fits = result.has("placers", f"{prefix}gap")
    gap = f"{result.value('placers', f'{prefix}gap'):,.1f} %" if fits else "does not fit"
    return f"{gap}, {1e3 * result.value('placers', f'{prefix}plan time'):,.0f} ms"
