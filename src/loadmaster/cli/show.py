"""loadmaster show: what is in a graph, a plan, a cluster or any saved file."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from loadmaster.cli import options as o

if TYPE_CHECKING:
    from loadmaster.core.cluster import Cluster
    from loadmaster.core.graph import Graph


def command(
    source: Annotated[
        str | None, typer.Argument(help="A graph source, or any file Loadmaster wrote.")
    ] = None,
    devices: o.Devices = None,
    format: o.Format = None,
    max_bytes: o.MaxBytes = "1GiB",
    json: o.Json = False,
) -> None:
    """Show a graph's size and shape, a saved plan, or (with --devices) a cluster."""
    from loadmaster.cli.console import print_json, stdout
    from loadmaster.core.errors import InputError

    if source is None and devices is None:
        raise InputError("nothing to show; name a source, a file or --devices")
    document: dict[str, Any] = {}
    tables: list[Any] = []
    if source is not None:
        _add_thing(source, format, max_bytes, document, tables)
    if devices is not None:
        from loadmaster.cluster.parse import parse_cluster
        from loadmaster.core.units import parse_bytes

        _add_cluster(parse_cluster(devices, max_bytes=parse_bytes(max_bytes)), document, tables)
    if json:
        print_json(document)
        return
    console = stdout()
    for table in tables:
        console.print(table)
        console.print()


def _add_thing(
    source: str, format: str | None, max_bytes: str, document: dict[str, Any], tables: list[Any]
) -> None:
    """A saved noun is shown as what it is; anything else is read as a graph."""
    from loadmaster.cli import answers
    from loadmaster.cli import tables as t
    from loadmaster.core import io
    from loadmaster.core.cluster import Cluster
    from loadmaster.core.placement import Placement
    from loadmaster.core.timeline import Timeline
    from loadmaster.core.units import parse_bytes
    from loadmaster.graph.formats import own
    from loadmaster.graph.source import read_source

    limit = parse_bytes(max_bytes)
    noun = None
    if format is None and not source.startswith("gen:"):
        data = io.read_bytes(source, max_bytes=limit)
        noun = io.decode(data, where=source) if own.recognises(data) else None
    if isinstance(noun, Cluster):
        _add_cluster(noun, document, tables)
    elif isinstance(noun, Timeline):
        document["timeline"] = answers.timeline_document(noun)
        tables.append(_fields(document["timeline"]))
    elif isinstance(noun, Placement):
        document["placement"] = answers.placement_document(noun)
        tables.extend([t.summary(noun), t.devices(noun, None)])
        _add_graph(noun.problem.graph, document, tables)
    else:
        workload = read_source(source, format=format, max_bytes=limit)
        _add_graph(workload.graph, document, tables)
        if workload.cluster is not None:
            _add_cluster(workload.cluster, document, tables)


def _fields(rows: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table


def _add_graph(graph: "Graph", document: dict[str, Any], tables: list[Any]) -> None:
    from dataclasses import asdict

    from loadmaster.cli.tables import one_line
    from loadmaster.core.units import format_bytes, format_flops
    from loadmaster.graph.measures import measure

    measures = asdict(measure(graph))
    document["graph"] = {"name": graph.name, "capture": graph.capture, "digest": graph.digest, **measures}
    shown: dict[str, Any] = {"graph": one_line(graph.name), "made": graph.capture}
    for name, value in measures.items():
        text = format_bytes(value) if name.endswith("bytes") else value
        shown[name.replace("_", " ")] = format_flops(value) if name.endswith("flops") else text
    tables.append(_fields({**shown, "digest": graph.digest[:16]}))


def _add_cluster(cluster: "Cluster", document: dict[str, Any], tables: list[Any]) -> None:
    from rich.table import Table

    from loadmaster.cli.tables import memory_text, one_line
    from loadmaster.core.graph import Dtype
    from loadmaster.core.units import format_bytes, format_flops, format_seconds

    rows = []
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for title in ("device", "kind", "host", "memory", "float32", "bfloat16", "memory rate"):
        table.add_column(title)
    for d, name in enumerate(cluster.device_name):
        k = int(cluster.kind[d])
        rate = cluster.flops_per_s[k]
        rows.append(
            {"name": name, "kind": cluster.kind_name[k], "memory_bytes": int(cluster.memory_bytes[d])}
        )
        table.add_row(
            one_line(name),
            one_line(cluster.kind_name[k]),
            str(cluster.host[d]),
            memory_text(int(cluster.memory_bytes[d])),
            f"{format_flops(rate[Dtype.FLOAT32])}/s",
            f"{format_flops(rate[Dtype.BFLOAT16])}/s",
            f"{format_bytes(cluster.memory_bytes_per_s[k])}/s",
        )
    links = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for title in ("link", "rate", "latency"):
        links.add_column(title)
    for i, name in enumerate(cluster.link_name[:40]):
        latency = format_seconds(cluster.link_latency_s[i])
        links.add_row(one_line(name), f"{format_bytes(cluster.link_bytes_per_s[i])}/s", latency)
    document["cluster"] = {"name": cluster.name, "digest": cluster.digest, "devices": rows}
    document["cluster"]["links"] = [
        {"name": name, "bytes_per_s": float(rate), "latency_s": float(latency)}
        for name, rate, latency in zip(
            cluster.link_name, cluster.link_bytes_per_s, cluster.link_latency_s, strict=True
        )
    ]
    tables.extend([table, links])
