"""What `loadmaster show` says of each noun: a JSON document and the tables for people."""

from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from loadmaster.core.cluster import Cluster
from loadmaster.core.graph import Dtype, Graph, Phase
from loadmaster.core.io import AnyNoun
from loadmaster.core.placement import Placement
from loadmaster.core.problem import FREE, Problem
from loadmaster.core.reasons import why_none_fits
from loadmaster.core.timeline import Timeline
from loadmaster.core.units import format_bytes, format_flops, format_percent, format_seconds
from loadmaster.graph.measures import measure
from loadmaster.report import documents, tables
from loadmaster.report.plain_text import escape_control_characters
from loadmaster.report.tables import fields, memory_text
from loadmaster.report.text_columns import columns, one_line

_MOST_LINKS = 40
Description = tuple[dict[str, Any], list[RenderableType]]


def describe_graph(graph: Graph, num_listed: int, where: tuple[str, ...] = ()) -> Description:
    """Size and shape, and the first `num_listed` ops, with the device of each where there is a plan."""
    m = measure(graph)
    document: dict[str, Any] = {
        "name": graph.name,
        "capture": graph.capture,
        "digest": graph.digest,
        **documents.findings_document(graph),
        **asdict(m),
    }
    phases = ", ".join(f"{count} {name}" for name, count in m.num_ops_of_phase.items() if count)
    rows: dict[str, object] = {
        "graph": one_line(graph.name),
        "made": Text("\n").join(one_line(part) for part in graph.capture.split("; ")),
        "ops": f"{m.num_ops} ({phases})",
        "edges": m.num_edges,
        "tensors": f"{m.num_tensors} ({format_bytes(m.tensor_bytes)})",
        "longest path": f"{m.depth} ops ({format_flops(m.critical_path_flops)})",
        "widest level": f"{m.width} ops",
        "flops": format_flops(m.flops),
        "parameters": format_bytes(m.parameter_bytes),
        "resident": format_bytes(m.resident_bytes),
        "digest": graph.digest[:16],
    }
    shown: list[RenderableType] = [fields(rows)]
    told = "\n".join(map(escape_control_characters, tables.findings(graph)))
    if told:
        shown.append(Text(told, style="yellow"))
    if num_listed:
        document["ops"], table = _list_ops(graph, num_listed, where)
        shown.append(table)
    return {"graph": document}, shown


def _list_ops(graph: Graph, num_listed: int, where: tuple[str, ...]) -> tuple[list[dict[str, Any]], Table]:
    num = min(num_listed, graph.num_ops)
    made = np.bincount(graph.tensor_op, graph.tensor_bytes.astype(np.float64), minlength=graph.num_ops)
    numbers = ("flops", "outputs", "resident")
    placed = ("device",) if where else ()
    table = columns("op", *placed, "kind", "module", "phase", *numbers, right=numbers, whole=("op", "device"))
    rows: list[dict[str, Any]] = []
    for op in range(num):
        row: dict[str, Any] = {
            "name": graph.op_name[op],
            **({"device": where[op]} if where else {}),
            "kind": graph.op_kind[op],
            "module": graph.module[op],
            "phase": Phase(int(graph.phase[op])).name.lower(),
            "flops": float(graph.flops[op]),
            "output_bytes": int(made[op]),
            "resident_bytes": int(graph.resident_bytes[op]),
        }
        rows.append(row)
        texts = (one_line(row[key]) for key in ("name", *placed, "kind", "module", "phase"))
        sizes = (format_bytes(row[key]) for key in ("output_bytes", "resident_bytes"))
        table.add_row(*texts, format_flops(row["flops"]), *sizes)
    if num < graph.num_ops:
        table.add_row(f"and {graph.num_ops - num} more")
    return rows, table


def describe_cluster(cluster: Cluster) -> Description:
    """Devices with their rates, and links."""
    reserved = bool(cluster.reserve_bytes.any())
    titles = ["device", "kind", "host", "memory", *(["reserve"] if reserved else [])]
    table = columns(*titles, "float32", "bfloat16", "memory rate", whole=("memory",))
    rows = []
    for d, name in enumerate(cluster.device_name):
        k = int(cluster.kind[d])
        rate, memory_rate = cluster.flops_per_s[k], float(cluster.memory_bytes_per_s[k])
        rows.append(
            {
                "name": name,
                "kind": cluster.kind_name[k],
                "host": int(cluster.host[d]),
                "memory_bytes": int(cluster.memory_bytes[d]),
                "reserve_bytes": int(cluster.reserve_bytes[d]),
                "flops_per_s": {dtype.name.lower(): float(rate[dtype]) for dtype in Dtype},
                "memory_bytes_per_s": memory_rate,
            }
        )
        table.add_row(
            one_line(name),
            one_line(cluster.kind_name[k]),
            str(cluster.host[d]),
            memory_text(int(cluster.memory_bytes[d])),
            *([format_bytes(cluster.reserve_bytes[d])] if reserved else []),
            f"{format_flops(rate[Dtype.FLOAT32])}/s",
            f"{format_flops(rate[Dtype.BFLOAT16])}/s",
            f"{format_bytes(memory_rate)}/s",
        )
    links, link_table = _list_links(cluster)
    document = {"name": cluster.name, "digest": cluster.digest, "devices": rows, "links": links}
    return {"cluster": document}, [table, link_table]


def _list_links(cluster: Cluster) -> tuple[list[dict[str, Any]], Table]:
    columns_of_links = (cluster.link_name, cluster.link_bytes_per_s.tolist(), cluster.link_latency_s.tolist())
    rows = [
        {"name": name, "bytes_per_s": rate, "latency_s": latency_s}
        for name, rate, latency_s in zip(*columns_of_links, strict=True)
    ]
    table = columns("link", "rate", "latency")
    for row in rows[:_MOST_LINKS]:
        rate, latency = format_bytes(row["bytes_per_s"]), format_seconds(row["latency_s"])
        table.add_row(one_line(row["name"]), f"{rate}/s", latency)
    if len(rows) > _MOST_LINKS:
        table.add_row(f"and {len(rows) - _MOST_LINKS} more")
    return rows, table


def describe_problem(problem: Problem) -> Description:
    """What is asked."""
    pinned = int((problem.pinned != FREE).sum())
    words = {name: getattr(problem, name).value for name in ("objective", "links", "split", "load")}
    document = {**words, "num_pinned": pinned, "digest": problem.digest}
    rows: dict[str, object] = {**words, "pinned ops": pinned, "digest": problem.digest[:16]}
    return {"problem": document}, [fields(rows)]


def describe_placement(placement: Placement) -> Description:
    """The answer, its devices, and how others did."""
    documents.require_matching(placement)
    shown: list[RenderableType] = [tables.summary(placement), tables.devices(placement, None)]
    if placement.members:
        shown.append(tables.members(placement))
    if placement.plan is not None:
        shown.append(tables.modules(placement))
    if not placement.fits:
        reasons = "\n".join(map(escape_control_characters, why_none_fits(placement)))
        shown.append(Text(reasons, style="red"))
    return {"placement": documents.placement_document(placement)}, shown


def describe_timeline(timeline: Timeline) -> Description:
    """How long it took and what every device did."""
    document = documents.timeline_document(timeline)
    rows: dict[str, object] = {
        "timeline": timeline.origin.value,
        "step time": format_seconds(timeline.step_s),
        "spans": len(timeline.kind),
        "digest": timeline.digest[:16],
    }
    table = columns("device", "busy", "peak", right=("busy", "peak"))
    for name, busy_s, peak in zip(
        timeline.device_name, timeline.busy_s.tolist(), timeline.peak_bytes.tolist(), strict=True
    ):
        busy = format_percent(busy_s / timeline.step_s) if timeline.step_s else "-"
        table.add_row(one_line(name), busy, format_bytes(peak))
    return {"timeline": document}, [fields(rows), table]


def describe_other(noun: AnyNoun) -> Description:
    """Any other noun: its kind, its digest and the shapes of its columns."""
    kind, digest = type(noun).__name__.lower(), noun.digest
    shapes: dict[str, Any] = {}
    for name in noun.__dataclass_fields__:
        value = getattr(noun, name)
        if isinstance(value, np.ndarray):
            shapes[name] = f"{' x '.join(map(str, value.shape))} numbers"
        elif value is None or isinstance(value, str | int | float):
            shapes[name] = value
        else:
            shapes[name] = type(value).__name__.lower()
    return {kind: {"digest": digest, **shapes}}, [fields({"holds": kind, **shapes, "digest": digest[:16]})]
