"""The section on plan quality."""

# ruff: noqa: E501

from collections.abc import Iterator
from typing import Any

from benchmarks import published
from benchmarks.cases import CLUSTERS, EQUAL, GENERATORS, LINK_SETTINGS, SIZES, Case
from benchmarks.pages.figures import NOT_RUN, Figures, digits, mark, table
from benchmarks.suites import quality as suite

_SUITE = suite.SUITE
_SHOWN = tuple(name for name in suite.CONSTRUCTORS if name != "single_device")
_CHECKS = {  # ending of a figure's name: what is asked
    "m_etf first come / better published": "`m_etf` over the better published m-ETF, first come",
    "m_sct first come / better published": "`m_sct` over the better published m-SCT, first come",
    "auto / best published": "`auto` over the best published, where that is over 1.03x the bound",
    "auto / best constructor": "`auto` over the best constructor",
    f"auto / {suite.QUARTER}": "`auto` over `refine(m_etf)` with a quarter of its budget",
    "auto / m_etf, geometric mean": "`auto` over `m_etf`, geometric mean over unequal clusters",
}


def section(result: Figures) -> str:
    """What was asked, published plans, every case."""
    if not result.of(_SUITE):
        return f"## Plan quality\n\n{NOT_RUN}\n"
    return f"""## Plan quality

Simulated step times in ms, for one graph (seed 0) of every published generator.

- *4 equal*: the generator's own devices; *2 fast + 2 slow*: the slow ones half as fast; *8 on two hosts*: 4 + 4 equal devices. All devices of a cluster have the same memory, together 2.0x of what the graph needs if nothing is freed. So no single device is large enough.
- *free*: transfers never wait; *port*: a device sends one tensor and receives one tensor at a time; *shared*: the devices of a host share one bus that carries one tensor at a time. Transfers take 0.0001754 us per byte and 134 us each. The two hosts have one link out and one link in, with a quarter of that rate and twice the latency.

`auto` had {result.value(_SUITE, "budget of auto"):g} s, `{suite.QUARTER}` a quarter of that, constructors no limit; seed 0. *Bound* is the best proven lower bound. *Serial* is everything on the fastest device, whether it fits or not. All times are predicted. `auto` stops when its plan is within 1 % of the bound; such a plan counts as no worse than any other.

{_checks(result)}

### Beside published plans

4 equal devices. {published.SETTING}. Their plans carry devices only and are scored first come first served (FIFO), as ours are in the FIFO
columns; the other columns are scored in the order that our plans carry.

{_published(result)}

Strengths of Baechi: with free links PT m-ETF and m-SCT are within 5 % of the bound on random graphs and at it with 10,000 ops, PT m-SCT is within 1.4 % (free) and 7 % (port) of it
on the 10,000-op grid; its code is simple, and its memory check is cheap. Weaknesses: with contended links the same PT plans of
random graphs take 1.3 to 1.6 times as long as one device. Its authors claim {published.CLAIMS}; the seconds above are not comparable with that
claim, whose baseline is learned placement. What placing branches cannot give shows in their record: {published.INCEPTION}, so no
speed-up over one GPU. Pipelining, replication and spilling are other rewrites.

### Every case

{_every(result)}
"""


def _checks(result: Figures) -> str:
    """One row per thing asked, then where it was missed."""
    rows, missed = [], []
    for ending, asked in _CHECKS.items():
        found = [row for row in result.of(_SUITE) if row["name"].endswith(f": {ending}") and row["aim"]]
        if not found:
            continue
        bad = [row for row in found if not row["reached"]]
        missed += bad
        worst = max(found, key=lambda row: (not row["reached"], row["value"]))
        where = worst["name"].removesuffix(f": {ending}")
        verdict = f"reached, {len(found)} cases" if not bad else f"**missed** in {len(bad)} of {len(found)}"
        rows.append((asked, f"{worst['aim']}x", f"{worst['value']:.3f}x ({where})", verdict))
    text = table(("asked", "aim", "worst", "verdict"), rows)
    return text + _list(missed) + _means(result)


def _list(missed: list[dict[str, Any]]) -> str:
    if not missed:
        return ""
    items = [f"- {row['name']}: {row['value']:.4f}x ({row['aim']}x)" for row in missed]
    return "\n\nMissed:\n\n" + "\n".join(items)


def _means(result: Figures) -> str:
    ending = ": auto / m_etf, geometric mean"
    rows = [row for row in result.of(_SUITE) if row["name"].endswith(ending)]
    said = ", ".join(
        f"{row['name'].removesuffix(ending)} {row['value']:.3f}x{' ' + mark(row) if row['aim'] else ''}"
        for row in rows
    )
    return f"\n\n`auto` over `m_etf`, geometric means: {said}."


def _published(result: Figures) -> str:
    tables = []
    ours = (
        "m_etf first come",
        "m_sct first come",
        "m_etf",
        "m_sct",
        suite.QUARTER,
        "auto",
        "auto first come",
    )
    head = ("m_etf FIFO", "m_sct FIFO", "m_etf", "m_sct", suite.QUARTER, "auto", "auto FIFO")
    for links in published.LINKS:
        rows = []
        for generator in GENERATORS:
            for num_ops in SIZES:
                theirs = published.step_ms(generator, num_ops, links)
                case = Case(generator, num_ops, EQUAL, links)
                if not theirs or not result.has(_SUITE, f"{case}: auto"):
                    continue
                columns = [_plain(theirs.get(name)) for name in published.PLACERS]
                values = [_ms(result, case, name) for name in ("bound", "serial")]
                rows.append(
                    (
                        f"{generator} {num_ops:,}",
                        *values,
                        *columns,
                        *(_ms(result, case, name) for name in ours),
                        _gap(result, case, "auto"),
                    )
                )
        header = (
            links,
            "bound",
            "serial",
            *published.PLACERS,
            *(f"`{name}`" for name in head),
            "gap of `auto`",
        )
        tables.append(table(header, rows))
    return "\n\n".join(tables)


def _every(result: Figures) -> str:
    tables = []
    for cluster in CLUSTERS:
        for links in LINK_SETTINGS:
            rows = list(_rows(result, cluster, links))
            if rows:
                names = (*_SHOWN, suite.QUARTER, "auto")
                header = (
                    f"{cluster}, {links}",
                    "bound",
                    "serial",
                    *(f"`{n}`" for n in names),
                    "gap of best constructor",
                    "of refine",
                    "of auto",
                )
                tables.append(table(header, rows))
    return "\n\n".join(tables)


def _rows(result: Figures, cluster: str, links: str) -> Iterator[tuple[str, ...]]:
    for generator in GENERATORS:
        for num_ops in SIZES:
            case = Case(generator, num_ops, cluster, links)
            if result.has(_SUITE, f"{case}: auto"):
                values = [
                    _ms(result, case, name) for name in ("bound", "serial", *_SHOWN, suite.QUARTER, "auto")
                ]
                fitting = [n for n in suite.CONSTRUCTORS if _fits(result, case, n)]
                best = min(fitting, key=lambda name: result.value(_SUITE, f"{case}: {name}"), default="auto")
                gaps = [_gap(result, case, name) for name in (best, suite.QUARTER, "auto")]
                yield (f"{generator} {num_ops:,}", *values, *gaps)


def _fits(result: Figures, case: Case, name: str) -> bool:
    return result.has(_SUITE, f"{case}: {name}") and result.unit(_SUITE, f"{case}: {name}") == "ms"


def _ms(result: Figures, case: Case, name: str) -> str:
    if not result.has(_SUITE, f"{case}: {name}"):
        return "-"
    return digits(result.value(_SUITE, f"{case}: {name}"), 4) if _fits(result, case, name) else "no plan"


def _gap(result: Figures, case: Case, name: str) -> str:
    if not _fits(result, case, name):
        return "no plan"
    bound = result.value(_SUITE, f"{case}: bound")
    return f"{100 * (result.value(_SUITE, f'{case}: {name}') / bound - 1):.1f} %"


def _plain(milliseconds: float | None) -> str:
    return "fails" if milliseconds is None else f"{milliseconds:,g}"
