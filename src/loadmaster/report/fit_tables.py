"""Tables of `loadmaster fit`: verdicts, breakdowns, presets, changes."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from loadmaster.core.answers.fit_answer import Fit, LargestBatch, ModuleParts, Parts
from loadmaster.core.findings import describe_findings
from loadmaster.core.units import format_bytes, format_seconds
from loadmaster.report.tables import Bar, fields
from loadmaster.report.text_columns import columns, one_line

_PARTS = ("weights", "gradients", "optimizer", "activations", "workspace", "resident")
_WORTH_SHOWING = 1e-6  # of the largest part
_OTHER = "other"
_FEWEST = 3  # columns of parts
_LONGEST_SIZE, _LONGEST_NAME, _SHORTEST_BAR, _PADDING = 10, 24, 4, 2  # letters


def summary(answer: Fit) -> Table:
    """What was asked and the answer in a word."""
    asked = [f"batch {answer.batch}"] * (answer.batch is not None)
    asked += [f"seq {answer.seq}"] * (answer.seq is not None)
    asked += [answer.optimizer or ""] * (answer.optimizer is not None)
    rows: dict[str, object] = {"model": answer.source, "step": ", ".join([*asked, answer.precision])}
    rows["graph"] = f"{answer.num_ops} ops, {answer.capture}"
    rows["needs"] = f"{format_bytes(answer.parts.total_bytes)} on one device"
    if answer.fits is not None:
        rows["fits"] = Text("yes", style="green") if answer.fits else Text("no", style="red")
    if answer.cluster is not None:
        rows["largest batch"] = batch_text(answer.cluster.largest)
    if answer.cheapest is not None:
        best = next(change for change in answer.changes if change.name == answer.cheapest and change.fits)
        rows["cheapest change"] = f"{best.text} ({best.price})"
    return fields({name: value for name, value in rows.items() if value != "-"})


def findings(answer: Fit) -> list[str]:
    """What was assumed of a captured model, and what looks wrong in it."""
    lines = describe_findings(answer.assumptions, answer.warnings, answer.notes)
    return ["", *lines] if lines else []


def batch_text(largest: LargestBatch | None) -> str:
    """The largest batch, with a mark where it is a guess."""
    if largest is None:
        return "-"
    if largest.batch is None:
        return largest.note if largest.note.startswith("more than") else "-"
    return f"{'' if largest.confirmed else '~'}{largest.batch}" if largest.batch else "none"


def devices(answer: Fit) -> Table | None:
    """Every device alone."""
    if not answer.devices:
        return None
    titles = ("device", "kind", "needs", "memory", "fits", "largest batch", "")
    right = ("needs", "memory", "largest batch")
    table = columns(*titles, right=right, whole=("needs", "memory", "fits"))
    for d in answer.devices:
        table.add_row(
            one_line(d.device),
            one_line(d.kind),
            format_bytes(d.needs_bytes),
            memory_text(d.memory_bytes),
            verdict_text(d.fits, proven=d.proven),
            batch_text(d.largest),
            Bar(d.needs_bytes / d.memory_bytes if d.memory_bytes else 0.0),
        )
    return table


def memory_text(num_bytes: int | None) -> str:
    """A limit, or that there is none."""
    return "unlimited" if num_bytes is None else format_bytes(num_bytes)


def verdict_text(fits: bool | None, *, proven: bool = False) -> Text:
    """yes, no, or why there is no answer."""
    if fits is None:
        return Text("?", style="dim")
    if fits:
        return Text("yes", style="green")
    return Text("no (proven)" if proven else "no", style="red")


def cluster(answer: Fit, width: int) -> Table | None:
    """What each device holds at its peak in the plan that was found, or came nearest."""
    whole = answer.cluster
    if whole is None or len(whole.devices) < 2:
        return None
    names = min(max(map(len, whole.devices)), _LONGEST_NAME)
    room = width - names - _PADDING - _letters_of(("peak", "memory")) - _SHORTEST_BAR
    titles = ("device", *_parts_to_show(whole.parts, room), "peak", "memory", "")
    table = columns(*titles, right=titles[1:-1], whole=titles[1:-1])
    for name, parts, memory in zip(whole.devices, whole.parts, whole.memory_bytes, strict=True):
        sizes = [format_bytes(size) for size in _sizes_of(parts, titles[1:-3])]
        share = parts.total_bytes / memory if memory else 0.0
        table.add_row(
            one_line(name), *sizes, format_bytes(parts.total_bytes), memory_text(memory), Bar(share)
        )
    return table


def modules(answer: Fit, width: int) -> Table:
    """The tree of modules, what each holds when the whole holds most."""
    names = max((len(row.module.rpartition(".")[2]) + row.depth for row in answer.modules), default=0)
    room = width - min(names, _LONGEST_NAME) - _PADDING - _letters_of(("all",))
    shown = _parts_to_show([row.parts for row in answer.modules], room)
    table = columns("module", *shown, "all", right=(*shown, "all"), whole=(*shown, "all"))
    for row, num in _merge_alike_rows(answer.modules):
        name = row.module.rpartition(".")[2] if row.module else "whole model"
        name += f" ({num} alike)" if num > 1 else ""
        sizes = [format_bytes(size) if size else "-" for size in _sizes_of(row.parts, shown)]
        table.add_row(one_line(f"{' ' * row.depth}{name}"), *sizes, format_bytes(row.parts.total_bytes))
    return table


def _merge_alike_rows(rows: tuple[ModuleParts, ...]) -> list[tuple[ModuleParts, int]]:
    """Rows and how many siblings look the same; the first of them stands for all."""
    count: dict[tuple[object, ...], int] = {}
    first: dict[tuple[object, ...], ModuleParts] = {}
    for row in rows:
        key = (row.module.rpartition(".")[0], row.depth, row.parts)
        first.setdefault(key, row)
        count[key] = count.get(key, 0) + 1
    return [(row, count[key]) for key, row in first.items()]


def presets(answer: Fit) -> Table | None:
    """Every kind of device that can be named."""
    if not answer.presets:
        return None
    titles = ("kind", "needs", "memory", "fits", "largest batch", "")
    table = columns(*titles, right=("needs", "memory", "largest batch"), whole=titles[:4])
    for row in answer.presets:
        table.add_row(
            one_line(row.kind),
            format_bytes(row.needs_bytes),
            format_bytes(row.memory_bytes),
            verdict_text(row.fits),
            batch_text(row.largest),
            Bar(row.needs_bytes / row.memory_bytes),
        )
    return table


def changes(answer: Fit) -> Table | None:
    """What was tried, what it costs, whether it fits."""
    if not answer.changes:
        return None
    table = columns("change", "fits", "step time", "what it costs", right=("step time",), whole=("fits",))
    for row in answer.changes:
        seconds = "-" if row.step_s is None else format_seconds(row.step_s)
        style = "bold" if row.fits and row.name == answer.cheapest else ""
        table.add_row(
            one_line(row.text, 70), verdict_text(row.fits), seconds, one_line(row.price, 70), style=style
        )
    return table


def notes(answer: Fit) -> list[str]:
    """Why it does not fit, and what the marks mean."""
    lines = []
    if answer.cluster is not None and not answer.cluster.fits:
        proven = "proven: " if answer.cluster.proven else "no plan was found: "
        lines += ["", f"{proven}{answer.cluster.reason}"]
    unsure = [d.largest.note for d in answer.devices if d.largest is not None and d.largest.batch is None]
    lines += [f"largest batch: {note}" for note in dict.fromkeys(filter(None, unsure))]
    if any(row.largest is not None and not row.largest.confirmed for row in answer.presets):
        lines += ["", "~ on a line through captures at two batches; name the device to have it confirmed"]
    if any(row.fits is None for row in answer.changes):
        lines.append("? not checked, as a cheaper change fits: --all-changes checks them")
    return lines


def _parts_to_show(rows: Sequence[Parts], room: int) -> tuple[str, ...]:
    """The parts that are worth a column; where there is no room for all, the smaller ones are one column.

    The gradient of the loss alone, 4 bytes beside gigabytes, is worth none.
    """
    most = {name: max((getattr(row, f"{name}_bytes") for row in rows), default=0) for name in _PARTS}
    there = [name for name in _PARTS if most[name] > _WORTH_SHOWING * max(most.values())]
    if _letters_of(there) <= room or len(there) <= _FEWEST:
        return tuple(there)
    largest = sorted(there, key=lambda name: -most[name])
    for num in range(len(there) - 2, _FEWEST - 2, -1):
        shown = [name for name in there if name in largest[:num]]
        if _letters_of([*shown, _OTHER]) <= room:
            break
    return (*shown, _OTHER)


def _letters_of(titles: Sequence[str]) -> int:
    return sum(max(len(title), _LONGEST_SIZE) + _PADDING for title in titles)


def _sizes_of(parts: Parts, names: Sequence[str]) -> list[int]:
    named = {name: int(getattr(parts, f"{name}_bytes")) for name in names if name != _OTHER}
    return [named.get(name, parts.total_bytes - sum(named.values())) for name in names]
