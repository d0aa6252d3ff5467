"""python -m benchmarks.learned_page RESULT.json: write docs/learned-results.md from a result file of `learned`."""

# ruff: noqa: E501

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.learned_held_out import BUDGETS as HELD_OUT_BUDGETS
from benchmarks.learned_table import BUDGETS, METHODS, OPTIMA
from loadmaster.core.problem import Objective

PAGE = Path(__file__).resolve().parents[1] / "docs" / "learned-results.md"
_STARTS = {"throughput": "linear_dp", "step": "heft"}
_WAYS = ("equal evaluations", "equal processor time")
Found = dict[str, dict[str, Any]]


def page(result: dict[str, Any], source: str) -> str:
    """The whole page."""
    found = {figure["name"]: figure for figure in result["figures"]}
    machine = result["machine"]
    head = f"""# Learned placement: figures

Written by `python -m benchmarks.learned_page` from `{source}`: {machine["date"]}, {machine["processor"]}, {machine["cores"]} cores, one thread,
Python {machine["python"]}, numpy {machine["versions"]["numpy"]}, torch {machine["versions"]["torch"]}. [Learned placement](learned.md) says what the
algorithms are. An evaluation is one request for the time of a complete plan; a proposed move is one.
{_busy(machine)}"""
    parts = (
        _not_measured(found),
        _table(found, "throughput"),
        _table(found, "step"),
        _held_out(found),
        _hsdag(found),
        _large(found),
    )
    return "\n".join((head, *(part for part in parts if part)))


_MODELS = ("Inception-V3", "ResNet-50", "BERT-base")
_TABLE = {"throughput": ("Searches for throughput", len(OPTIMA)), "step": ("Searches for a step", 6)}
_TABLE_SEEDS, _POLICY_SEEDS = 10, 5  # that the rules of judgement ask for


def _not_measured(found: Found) -> str:
    """What this run left out: parts, inputs, seeds; '' if it is complete."""
    parts = []
    for objective, (title, listed) in _TABLE.items():
        labels = _inputs(found, objective)
        seeds = found[f"{labels[0]}: random, 100 evaluations"]["seeds"] if labels else 0
        parts.append((title, len(labels), listed, seeds, _TABLE_SEEDS))
    held_out = next((one for name, one in found.items() if name.startswith("held-out graphs")), None)
    measured = int(held_out["value"]) if held_out else 0
    listed = int(held_out["name"].rsplit(" ", 1)[1]) if held_out else 0
    parts.append(("Held-out graphs", measured, listed, held_out["seeds"] if held_out else 0, _POLICY_SEEDS))
    lacks = []
    for title, measured, listed, seeds, wanted in parts:
        if not measured:
            lacks.append(f"{title}: not measured.")
            continue
        if measured < listed:
            lacks.append(f"{title}: {listed - measured} of {listed} inputs are not measured.")
        if seeds < wanted:
            lacks.append(f"{title}: {seeds} seeds; the rules of judgement ask for {wanted}.")
    done = {label.partition(" (")[0] for label in _compared(found)}
    missing = [name for name in _MODELS if name not in done]
    if missing:
        lacks.append(f"HSDAG's comparison: {', '.join(missing)} not measured.")
    compared = [one for name, one in found.items() if ": HSDAG, as published" in name]
    if compared and compared[0]["seeds"] < _POLICY_SEEDS:
        lacks.append(f"HSDAG's comparison: {compared[0]['seeds']} seeds instead of 5.")
    lacks.append("A search on a GPU and its host with measured steps: not measured, it needs a GPU.")
    lacks.append(
        "Trainings with other seeds: not measured. All figures are of the one shipped set of weights."
    )
    shown = "\n".join(f"- {each}" for each in lacks)
    return f"## What is not measured\n\n{shown}\n"


def _busy(machine: dict[str, Any]) -> str:
    """A sentence where other programs ran beside the benchmark."""
    load = machine.get("load", 0.0)
    if load <= machine["cores"]:
        return ""
    return (
        f"{load:g} processes shared the cores: processor seconds count this process alone, and are longer than on a quiet machine;"
        " a budget of wall seconds bought less than it says.\n"
    )


def _row(*cells: object) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _lines(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join([_row(*head), _row(*("---" for _ in head)), *(_row(*row) for row in rows)]) + "\n"


def _value(found: Found, name: str, default: float = np.nan) -> float:
    figure = found.get(name)
    return default if figure is None else float(figure["value"])


def _digits(value: float) -> str:
    return "-" if not np.isfinite(value) else f"{value:.4g}"


def _inputs(found: Found, objective: str) -> list[str]:
    ending = ": lower bound"
    return [
        name.removesuffix(ending)
        for name in found
        if name.startswith(f"{objective} ") and name.endswith(ending)
    ]


def _reference(found: Found, label: str) -> tuple[float, str]:
    optimum = _value(found, f"{label}: proven optimum")
    if np.isfinite(optimum):
        return optimum, f"**{_digits(optimum)}**"
    bound = _value(found, f"{label}: lower bound")
    return bound, _digits(bound)


_TITLES = {
    "throughput": """## Searches for throughput

Max-load of the published throughput inputs, free splits, colour classes as groups, in closed form (the simulator's own figure, checked on every
best plan). Medians of {seeds} seeds after 2,400 / 10,000 evaluations, in the units of the inputs. Reference: bold where a plan is proven optimal, else
the proven lower bound. Warm searches start from `linear_dp`'s plan. *Post* has the defaults of the paper's open parameters; *warm post* is the
`post` of the registry, which spends its second half on single moves.
""",
    "step": """## Searches for a step

The published latency inputs, simulated; groups are colour classes, ops are served by how much waits for them. Medians of {seeds} seeds after
500 / 2,400 evaluations. Reference: the proven lower bound. Warm searches start from `heft`'s devices.
""",
}


def _table(found: Found, objective: str) -> str:
    labels = _inputs(found, objective)
    if not labels:
        return ""
    budgets = BUDGETS[Objective(objective)]
    shown, methods = budgets[-2:], list(METHODS)
    rows = []
    for label in labels:
        cells = [
            " / ".join(_digits(_value(found, f"{label}: {m}, {b} evaluations")) for b in shown)
            for m in methods
        ]
        start = _digits(_value(found, f"{label}: {_STARTS[objective]}"))
        rows.append([label.removeprefix(f"{objective} "), _reference(found, label)[1], start, *cells])
    seeds = found[f"{labels[0]}: {methods[0]}, {shown[0]} evaluations"]["seeds"]
    text = (
        _TITLES[objective].format(seeds=seeds)
        + "\n"
        + _lines(["input (groups)", "reference", _STARTS[objective], *methods], rows)
    )
    text += (
        "\nGeometric mean of median / reference over these inputs, and the median's worst seed beside it:\n\n"
    )
    rows = []
    for budget in budgets:
        cells = []
        for method in methods:
            both = [_ratios(found, label, method, budget) for label in labels]
            middle, worst = (float(np.exp(np.mean(np.log([one[at] for one in both])))) for at in (0, 1))
            cells.append(f"{middle:.3f} ({worst:.3f})")
        rows.append([f"{budget:,}", *cells])
    text += _lines(["evaluations", *methods], rows)
    seconds = [f"{method} {_median_seconds(found, labels, method, budgets[-1]):.2g}" for method in methods]
    text += f"\nProcessor seconds of one search of {budgets[-1]:,} evaluations, median over inputs: {', '.join(seconds)}.\n"
    return text + "\n" + _warm_post(found, labels)


def _ratios(found: Found, label: str, method: str, budget: int) -> tuple[float, float]:
    reference, figure = _reference(found, label)[0], found[f"{label}: {method}, {budget} evaluations"]
    return figure["value"] / reference, figure["worst"] / reference


def _median_seconds(found: Found, labels: list[str], method: str, budget: int) -> float:
    return float(
        np.median([found[f"{label}: {method}, {budget} evaluations"]["processor_s"] for label in labels])
    )


def _warm_post(found: Found, labels: list[str]) -> str:
    ratios = {at: _value(found, f"{at}: warm post / warm hill climbing, 2400 evaluations") for at in labels}
    good = [label for label, ratio in ratios.items() if ratio <= 1 + 1e-9]
    bad = [f"{label.split(' ', 1)[1]} ({ratio:.4f})" for label, ratio in ratios.items() if label not in good]
    told = f"At 2,400 evaluations warm Post is no worse than warm hill climbing on {len(good)} of {len(ratios)} inputs"
    return f"{told}{'; it is worse on ' + ', '.join(bad) if bad else ''}.\n"


def _held_out(found: Found) -> str:
    ending = f", {HELD_OUT_BUDGETS[0]} evaluations, {_WAYS[0]}: mean log ratio"
    classes = sorted(name.removesuffix(ending) for name in found if name.endswith(ending))
    if not classes:
        return ""
    rows = []
    for klass in [*(name for name in classes if name != "all"), "all"]:
        for count in HELD_OUT_BUDGETS:
            if f"{klass}, {count} evaluations, {_WAYS[0]}: mean log ratio" not in found:
                continue  # the run ended before
            cells = [klass, str(count)]
            for way in _WAYS:
                figure = found[f"{klass}, {count} evaluations, {way}: mean log ratio"]
                equal = figure["graphs"] - figure["better"] - figure["worse"]
                low, high = figure["interval"]
                cells += [
                    f"{figure['better']} / {equal} / {figure['worse']}",
                    f"{figure['value']:+.4f} [{low:+.4f}, {high:+.4f}]",
                ]
            rows.append(
                [
                    *cells,
                    found[f"{klass}, {count} evaluations, {_WAYS[0]}: mean log ratio"]["strongest_baseline"],
                ]
            )
    head = [
        "class",
        "evaluations",
        *("better / equal / worse, mean log ratio [95 %], " + way for way in _WAYS),
    ]
    head = ["class", "evaluations"]
    for way in _WAYS:
        head += [f"better / equal / worse, {way}", "mean log ratio [95 %]"]
    seeds = next(one["seeds"] for name, one in found.items() if name.startswith("held-out graphs"))
    text = f"""## Held-out graphs

`learned_order` with the shipped weights, which were trained on generated graphs alone: every family here is left out. Against the best of the
mandatory baselines on each graph (`linear_dp`, for free splits with hill climbing; `heft`, `m_etf`, each also with hill climbing; warm cross-entropy;
the best single device), medians of {seeds} seeds of the search, one training. Throughput in closed form, steps simulated. 0 evaluations: the first plan.
Equal processor time: baselines get as many evaluations as fit into the time that `learned_order` took, its network included. Below zero is better;
intervals are bootstrapped over graphs.

{_lines([*head, "most often best baseline"], rows)}
"""
    ablation = [
        found.get(f"{count} evaluations: trained / untrained, geometric mean") for count in HELD_OUT_BUDGETS
    ]
    told = [
        f"{count}: {one['value']:.4f} ({one['better']} better, {one['worse']} worse of {one['graphs']})"
        for count, one in zip(HELD_OUT_BUDGETS, ablation, strict=True)
        if one
    ]
    text += f"The same search and slicers with an untrained network: trained / untrained, geometric mean, at {'; '.join(told)}.\n\n"
    return text + _every_graph(found)


def _every_graph(found: Found) -> str:
    part = " evaluations: learned_order / "
    graphs: dict[str, dict[int, dict[str, Any]]] = {}
    for name, figure in found.items():
        if part in name:
            graph, count = name.partition(part)[0].rsplit(", ", 1)
            graphs.setdefault(graph, {})[int(count)] = {**figure, "best": name.partition(part)[2]}
    cell: Callable[[dict[str, Any]], str] = lambda one: f"{one['value']:.4f} ({one['best']})"  # noqa: E731
    rows = []
    for graph, by_count in sorted(graphs.items()):
        if len(by_count) < len(HELD_OUT_BUDGETS):
            continue  # the run ended before
        over = by_count[max(by_count)].get("over_bound")
        told = f"{over:.3f}" if over is not None and np.isfinite(over) else "-"
        rows.append([graph, *(cell(by_count[count]) for count in HELD_OUT_BUDGETS), told])
    head = ["graph", *(f"{count} evaluations" for count in HELD_OUT_BUDGETS), "over the quick bound at 100"]
    return f"Every graph, time over that of the best baseline at equal evaluations:\n\n{_lines(head, rows)}"


def _compared(found: Found) -> list[str]:
    """Models of HSDAG's comparison that were measured to the end, which is their bound."""
    every = [name.partition(": lower bound")[0] for name in found if ": lower bound (" in name]
    return [label for label in every if f"{label}: GPU only" in found]


def _hsdag(found: Found) -> str:
    labels = _compared(found)
    if not labels:
        return ""
    rows = []
    seeds = next(one["seeds"] for one in found.values() if "HSDAG, as published" in one["name"])
    for label in labels:
        gpu = _value(found, f"{label}: GPU only")
        for name, figure in found.items():
            if name.startswith(f"{label}: "):
                value = float(figure["value"])
                rows.append(
                    [label, name.removeprefix(f"{label}: "), f"{1e3 * value:.4f}", f"{value / gpu:.4f}"]
                )
    return f"""## HSDAG's comparison

Inference of a batch of one on a GPU and a CPU, times by presets, both with room for everything; medians of {seeds} seeds. The paper reports 2 to 12 %
less than GPU only, measured on other devices: not comparable with these, which are simulated.

{_lines(["model", "method", "ms", "over GPU only"], rows)}"""


def _large(found: Found) -> str:
    rows = [
        [name.removeprefix("zero-shot, ").removesuffix(", processor time"), f"{one['value']:.3f}"]
        for name, one in found.items()
        if name.startswith("zero-shot, ")
    ]
    return (
        f"## Large graphs\n\nThe first plan in a warm process on one core, features included:\n\n{_lines(['graph', 'processor seconds'], rows)}"
        if rows
        else ""
    )


def main() -> None:
    """Write the page."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m benchmarks.learned_page benchmarks/results/DATE-learned.json")
    path = Path(sys.argv[1])
    PAGE.write_text(page(json.loads(path.read_text(encoding="utf-8")), path.as_posix()), encoding="utf-8")


if __name__ == "__main__":
    main()
