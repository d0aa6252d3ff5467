"""loadmaster show: what is in a graph, a plan, a cluster or any saved file."""

from typing import TYPE_CHECKING, Annotated

import typer

from loadmaster.cli import options as o

if TYPE_CHECKING:
    from loadmaster.core.io import AnyNoun
    from loadmaster.core.question import Question
    from loadmaster.report.descriptions import Description

SUMMARY = "Show a graph, a cluster or any saved file."


def command(
    source: Annotated[
        str | None, typer.Argument(metavar="[SOURCE]", help="A graph source, or any file Loadmaster wrote.")
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices",
            "-d",
            metavar="CLUSTER",
            help="A cluster to show: '2xA100-80GB, cpu-64GB', a .toml or a saved .json file.",
        ),
    ] = None,
    ops: Annotated[
        int,
        typer.Option(
            "--ops", metavar="N", min=0, help="Also list the first N ops, whose names can be pinned."
        ),
    ] = 0,
    batch: o.Batch = None,
    seq: o.Seq = None,
    optimizer: o.Optimizer = None,
    precision: o.Precision = "fp32",
    target: o.Target = None,
    capture: o.Capture = None,
    assume: o.Assume = None,
    accumulation: o.Accumulation = None,
    range: o.Ranges = None,
    format: o.Format = None,
    max_bytes: o.MaxBytes = "1GiB",
    json: o.Json = False,
) -> None:
    """Show the size and shape of a graph, a saved plan, or (with --devices) a cluster."""
    options = locals()  # by name, for build_question; before any other name is bound
    from loadmaster.cli.console import print_json, progress, stdout
    from loadmaster.cli.question import build_question, parse_size
    from loadmaster.core.errors import InputError

    if source is None and devices is None:
        raise InputError("nothing to show; name a source, a file or --devices")
    limit = parse_size("--max-bytes", max_bytes)
    parts: list[Description] = []
    with progress(f"reading {source if source is not None else devices}"):
        if source is not None:
            parts += _describe(build_question(options), source, ops)
        if devices is not None:
            from loadmaster.cluster.parse import parse_cluster
            from loadmaster.report.descriptions import describe_cluster

            parts.append(describe_cluster(parse_cluster(devices, max_bytes=limit)))
    if json:
        print_json({key: value for document, _ in parts for key, value in document.items()})
        return
    console = stdout()
    for number, table in enumerate(table for _, shown in parts for table in shown):
        if number:
            console.print()
        console.print(table)


def _describe(question: "Question", source: str, num_listed: int) -> "list[Description]":
    """A saved noun is described as what it is; anything else is read as a graph."""
    from loadmaster.core.cluster import Cluster
    from loadmaster.core.graph import Graph
    from loadmaster.core.placement import Placement
    from loadmaster.core.problem import Problem
    from loadmaster.core.timeline import Timeline
    from loadmaster.graph.models import CaptureOptions
    from loadmaster.graph.source import read_source
    from loadmaster.report import descriptions as d

    asked, format, limit = CaptureOptions.of(question), question.format, question.max_bytes
    noun = _read_noun(source, limit) if format is None else None
    if isinstance(noun, Cluster):
        return [d.describe_cluster(noun)]
    if isinstance(noun, Timeline):
        return [d.describe_timeline(noun)]
    if isinstance(noun, Placement):
        answer, names = d.describe_placement(noun), noun.problem.cluster.device_name
        where = tuple(names[i] for i in noun.plan.device) if noun.plan is not None else ()
        graph = d.describe_graph(noun.problem.graph, num_listed, where)
        return [answer, d.describe_problem(noun.problem), graph]
    if isinstance(noun, Problem):
        graph = d.describe_graph(noun.graph, num_listed)
        return [d.describe_problem(noun), graph, d.describe_cluster(noun.cluster)]
    if noun is not None and not isinstance(noun, Graph):
        return [d.describe_other(noun)]
    workload = read_source(source, format=format, max_bytes=limit, asked=asked)
    parts = [d.describe_graph(workload.graph, num_listed)]
    return parts + ([d.describe_cluster(workload.cluster)] if workload.cluster is not None else [])


def _read_noun(source: str, limit: int) -> "AnyNoun | None":
    """The noun in a file of our own, None for any other source."""
    import os

    from loadmaster.core import files, io
    from loadmaster.graph.formats import own

    if source.startswith("gen:") or not os.path.exists(source):
        return None
    data = files.read_bytes(source, max_bytes=limit)
    return io.decode(data, where=source) if own.recognises(data) else None
