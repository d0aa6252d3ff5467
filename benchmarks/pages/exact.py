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

Processor seconds for the msr throughput graphs, including contraction, orders, all ideals and the proof. Every optimum is equal to the published one. The authors' program ran on one thread of another busy machine, so compare only the order of magnitude. The aim is for graphs on which their program takes more than half a second. On Inception-V3 it runs out of memory.

{table(("graph", "`linear_dp` s", "`ideal_dp` s", "times the authors'", "aim"), [_chain(result, name) for name in names])}

Peak memory of the process {result.value("exact", "peak memory"):.2f} GiB ({result.verdict("exact", "peak memory")}).

Gap between plan and bound for splits of any shape (`--split free`), `auto` for 10 s. Median {result.value("exact", "median gap"):.2g} % ({result.verdict("exact", "median gap")}).

{table(("graph", "bound by", "gap"), gaps)}

Captured training steps (AdamW, 256 tokens a sample) over unequal devices, `auto` for 10 s. Median {result.value("exact", "captured steps, median gap"):.1f} %
({result.verdict("exact", "captured steps, median gap")}); if one device has room for the step {result.value("exact", held):.1f} % ({result.verdict("exact", held)}).

{table(("model", "batch", "devices", "bound by", "gap"), steps)}

Why the last aim is missed: the linear programme may put half of a unit on each of two devices without sending anything (docs/bounds.md). With four or more kinds of devices it does not end within the budget, so weaker bounds are used.
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
