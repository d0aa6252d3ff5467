"""The section on placement time."""

# ruff: noqa: E501

from benchmarks import published
from benchmarks.cases import GENERATORS
from benchmarks.pages.figures import NOT_RUN, Figures, digits, table
from benchmarks.suites import placement as suite

_SUITE = suite.SUITE


def section(result: Figures) -> str:
    """Ours beside the published seconds, moves a second, and a million ops."""
    if not result.of(_SUITE):
        return f"## Placement time\n\n{NOT_RUN}\n"
    return f"""## Placement time

The graphs are those of the published generators (seed 0) with 10,000 ops, on their own 4 devices with 2.0x memory. Times are medians of warm runs; processor time is in brackets. They include the whole call: all passes, the simulation of their plans, and for `m_sct` the linear programme. The lower bound and the preparation of the simulator are not included ({_range(result)} ms). *Port*: a device sends one tensor and receives one tensor at a time; *free*: transfers
never wait.

The published columns: {published.SETTING}. The linear programme in brackets; a star: processor time on a busy machine (1.05 to 1.8 times an
idle one's); a dash: not measured. TF plans with one channel a device, PT with free links. Seconds compare in order of magnitude and in growth only.

{_times(result)}

{_growth(result)}

`refine` tries moves of ops, of rows of neighbours and of modules, swaps and changes of order (10,000 ops, from `m_etf`'s plan):

{_moves(result)}

{_large(result)}
"""


def _range(result: Figures) -> str:
    values = [row["value"] for row in result.of(_SUITE) if row["name"].endswith("bound and preparation")]
    return f"{min(values):.0f} to {max(values):.0f}" if values else "-"


def _times(result: Figures) -> str:
    rows = []
    for generator in GENERATORS:
        for name in suite.ALGORITHMS:
            theirs = [
                _told(published.placement_time(generator, suite.SIZE, name, code)) for code in ("TF", "PT")
            ]
            aim = suite.AIMS_S.get((generator, name))
            ours = [_time(result, f"{generator} {suite.SIZE:,}, {links}: {name}") for links in suite.LINKS]
            rows.append(
                (generator, f"`{name}`", *ours, "" if aim is None else f"<= {1e3 * aim:g} ms", *theirs)
            )
    return table(("graph", "algorithm", "port, ms", "free, ms", "aim", "published TF", "published PT"), rows)


def _time(result: Figures, name: str) -> str:
    if not result.has(_SUITE, name):
        return "-"
    text = digits(result.value(_SUITE, name), 3)
    cpu = f"{name}, processor time"
    text += f" ({digits(result.value(_SUITE, cpu), 3)})" if result.has(_SUITE, cpu) else ""
    verdict = result.verdict(_SUITE, name)
    return f"{text} {verdict.rpartition(': ')[2]}" if verdict else text


def _told(time: published.Time) -> str:
    return "-" if time is None else str(time)


def _growth(result: Figures) -> str:
    parts = []
    for row in result.of(_SUITE):
        head, _, rest = row["name"].partition(" to ")
        if head == f"many_source {suite.SIZE // 2:,}":
            links, _, name = rest.partition(", ")[2].partition(": ")
            verdict = "reached" if row["reached"] else "**missed**"
            parts.append(f"`{name}` {row['value']:.2f}x ({links}, {verdict})")
    most = suite.MOST_GROWTH
    return (
        f"From 5,000 to 10,000 ops of many_source, where the published m-ETF takes 4x as long: {', '.join(parts)}; aim <= {most:g}x."
        if parts
        else ""
    )


def _moves(result: Figures) -> str:
    rows = []
    for generator in suite.REFINED:
        cells = []
        for links in suite.LINKS:
            name = f"{generator} {suite.SIZE:,}, {links}: refine"
            verdict = result.verdict(_SUITE, name).rpartition(": ")[2]
            cells.append(f"{result.value(_SUITE, name):,.0f} {verdict}" if result.has(_SUITE, name) else "-")
        rows.append((generator, *cells))
    return table(("graph", "port, moves/s", f"free, moves/s (aim >= {suite.LEAST_MOVES_PER_S:,})"), rows)


def _large(result: Figures) -> str:
    source, devices = suite.LARGE
    rows = [
        (
            row["name"].partition(": ")[2],
            f"{row['value']:.3g} {row['unit']}",
            result.verdict(_SUITE, row["name"]),
        )
        for row in result.of(_SUITE)
        if row["name"].startswith("1,000,000 ops: ")
    ]
    return f"""A transformer of a million ops (`{source}`) on 16 unequal devices (`{devices}`: preset speeds; memories are enlarged so that all 16 together have 1.4 times its 10.7 TiB), in a new process. The time of the first row starts when `auto` is called:

{table(("what", "value", "aim"), rows)}"""
