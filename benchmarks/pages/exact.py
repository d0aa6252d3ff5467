"""The section on exact placement: the best chains, and what is proven of free splits and of captured steps."""

# ruff: noqa: E501

import re

from benchmarks.pages.figures import NOT_RUN, Figures, table

_TIME = ": ideal_dp, processor time"


def section(result: Figures) -> str:
    """The whole section."""
    rows = result.of("exact")
    if not rows:
        return f"## Exact placement\n\n{NOT_RUN}\n"
    names = [row["name"].removesuffix(_TIME) for row in rows if row["name"].endswith(_TIME)]
    gaps = [
        (f"`{found[1]}`", found[2], f"{row['value']:.2g} %")
        for row in rows
        if (found := re.fullmatch(r"(\S+), free: auto after .* s, (.*)", row["name"]))
    ]
    steps = [
        (f"`{found[1]}`", found[2], found[3], found[4], f"{row['value']:.1f} %")
        for row in rows
        if (found := re.fullmatch(r"(hf:\S+), batch (\d+), on (.*): auto after .* s, (.*)", row["name"]))
    ]
    held = "captured steps that one device could hold, median gap"
    return f"""## Exact placement

The msr throughput graphs. Processor seconds from the problem on: contraction, orders, all ideals and the proof; every optimum is the published one.
The authors' programme ran on one thread of another busy machine (its seconds are those of the specification), so compare in order of magnitude; the
aim is for graphs on which it takes over half a second. It does not finish on Inception-V3, for want of memory.

{table(("graph", "`linear_dp` s", "`ideal_dp` s", "times the authors'", "aim"), [_chain(result, name) for name in names])}

Peak memory of the process {result.value("exact", "peak memory"):.2f} GiB ({result.verdict("exact", "peak memory")}).

Splits of any shape (`--split free`), `auto` for 10 s: what is left between plan and bound. Median {result.value("exact", "median gap"):.2g} % ({result.verdict("exact", "median gap")}).

{table(("graph", "bound by", "gap"), gaps)}

Captured training steps (AdamW, 256 tokens a sample) over unequal devices, `auto` for 10 s. Median {result.value("exact", "captured steps, median gap"):.1f} %
({result.verdict("exact", "captured steps, median gap")}); where one device could hold the step {result.value("exact", held):.1f} % ({result.verdict("exact", held)}).

{table(("model", "batch", "devices", "bound by", "gap"), steps)}

What is missing of the last aim: the linear programme may put half of a unit on each of two devices without sending anything (docs/bounds.md), and over four and
more kinds of devices it does not end within the budget, so that weaker arguments stand. Branching on the devices of whole layers would close it.
"""


def _chain(result: Figures, name: str) -> tuple[str, ...]:
    linear = result.value("exact", f"{name}: linear_dp, processor time")
    ideal = result.value("exact", f"{name}{_TIME}")
    times = f"{name}: times the authors' programme"
    if not result.has("exact", times):
        return (
            f"`{name}`",
            f"{linear:.3f}",
            f"{ideal:.3f}",
            "did not finish",
            result.verdict("exact", f"{name}{_TIME}"),
        )
    ratio = result.value("exact", times)
    return (f"`{name}`", f"{linear:.3f}", f"{ideal:.3f}", f"{ratio:.1f}x", result.verdict("exact", times))
