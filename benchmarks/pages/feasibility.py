"""The section on feasibility."""

# ruff: noqa: E501

from benchmarks.pages.figures import NOT_RUN, Figures, digits, table
from benchmarks.suites import feasibility as suite

_SUITE = suite.SUITE
_PROOF = "fork_join 300 at 1x: auto"


def section(result: Figures) -> str:
    """What auto finds at little memory, and the repaired algorithms at 1.2x."""
    if not result.of(_SUITE):
        return f"## Feasibility\n\n{NOT_RUN}\n"
    return f"""## Feasibility

In the never-freed model, every output and every copy stays to the end of the step. The need is the sum of 2 params + output over all ops; workspaces and copies are extra. Four devices together have 1.02 to 1.2 times the need. The table has the time until `auto`, with a budget of 2 s, finds its first plan that fits.

{_auto(result)}

"None exists": no plan fits (`tests/unit/placers/test_memory_first.py`, `tests/properties/test_feasibility.py` say why). At 1.0x, fork_join of 300
ops: {_proof(result)}

At {max(suite.FACTORS):g}x every algorithm that repairs its plans: time of its call.

{_repaired(result)}

{_missed(result)}
"""


def _auto(result: Figures) -> str:
    rows = []
    for generator in suite.GENERATORS:
        for num_ops in suite.SIZES:
            cells = [
                _cell(
                    result,
                    f"{generator} {num_ops:,} at {factor:g}x: auto",
                    possible=(generator, num_ops, factor) not in suite.IMPOSSIBLE,
                )
                for factor in suite.FACTORS
            ]
            rows.append((generator, f"{num_ops:,}", *cells))
    return table(("graph", "ops", *(f"{factor:g}x" for factor in suite.FACTORS)), rows)


def _repaired(result: Figures) -> str:
    rows = []
    for generator in suite.GENERATORS:
        for num_ops in suite.SIZES:
            at = f"{generator} {num_ops:,} at {max(suite.FACTORS):g}x"
            cells = [_cell(result, f"{at}: {name}", possible=True) for name in suite.REPAIRED]
            rows.append((generator, f"{num_ops:,}", *cells))
    return table(("graph", "ops", *(f"`{name}`" for name in suite.REPAIRED)), rows)


def _cell(result: Figures, name: str, *, possible: bool) -> str:
    if not result.has(_SUITE, name):
        return "-"
    value, unit = result.value(_SUITE, name), result.unit(_SUITE, name)
    if unit == "s":
        return f"{digits(1e3 * value, 3)} ms"
    return f"**{value:,.1f} {unit}**" if possible else "none exists"


def _proof(result: Figures) -> str:
    if not result.has(_SUITE, _PROOF):
        return "not measured."
    said = "`infeasible`, with its proof" if "reached" in result.verdict(_SUITE, _PROOF) else "**not proven**"
    return f"{said}, after {digits(1e3 * result.value(_SUITE, _PROOF), 3)} ms."


def _missed(result: Figures) -> str:
    asked = [row for row in result.of(_SUITE) if row["aim"]]
    missed = [row for row in asked if not row["reached"]]
    return f"Plans and proofs to find: {len(asked)}, found: {len(asked) - len(missed)}."
