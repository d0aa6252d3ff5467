"""loadmaster simulate: a saved plan run again, under the same or another model of the links."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from loadmaster.cli import options as o

if TYPE_CHECKING:
    from loadmaster.core.placement import Placement
    from loadmaster.core.plan import Plan
    from loadmaster.core.timeline import Timeline

SUMMARY = "Simulate a saved plan."


def command(
    plan: Annotated[
        str, typer.Argument(metavar="PLAN", help="A file saved by: loadmaster plan ... --out plan.json")
    ],
    links: Annotated[
        str | None,
        typer.Option(
            "--links",
            metavar="NAME",
            help="How transfers contend: shared, parallel, half-duplex or host. Default: as planned.",
        ),
    ] = None,
    dispatch: Annotated[
        str | None,
        typer.Option(
            "--dispatch", metavar="NAME", help="in_order (the plan's order, default) or ready (first come)."
        ),
    ] = None,
    max_bytes: o.MaxBytes = "1GiB",
    out: Annotated[
        str | None, typer.Option("--out", "-o", metavar="FILE", help="Save the timeline (.json, .json.gz).")
    ] = None,
    trace: o.Trace = None,
    json: o.Json = False,
) -> None:
    """Simulate a saved plan: step time, busy time and peak memory of every device."""
    from dataclasses import replace

    from loadmaster import api
    from loadmaster.cli.console import print_json, progress
    from loadmaster.cli.question import check_outputs, parse_size
    from loadmaster.core.problem import Objective
    from loadmaster.report import documents

    limit = parse_size("--max-bytes", max_bytes)
    check_outputs({"--out": out, "--trace": trace}, inputs=[plan])
    with progress(f"simulating {plan}"):
        placement, order = _read_placement(plan, limit)
        problem = placement.problem
        timeline = api.simulate(problem, order, links, dispatch=dispatch)
        per_sample = problem.objective == Objective.THROUGHPUT
        step_s = api.seconds_per_sample(problem, order, links) if per_sample else timeline.step_s
    if out is not None:
        api.save(timeline, out)
    if trace is not None:
        documents.save_trace(placement, timeline, trace)
    document = {
        "plan": plan,
        **documents.timeline_document(timeline),
        "objective": problem.objective.value,
        "step_s": step_s,
        "pass_s": timeline.step_s,
        "memory_bytes": problem.cluster.usable_bytes.tolist(),
        "fits": bool((timeline.peak_bytes <= problem.cluster.usable_bytes).all()),
        "links": links or problem.links.value,
        "out": out,
        "trace": trace,
    }
    if json:
        print_json(document)
        return
    _show(replace(placement, peak_bytes=timeline.peak_bytes), timeline, document)


def _read_placement(path: str, max_bytes: int) -> "tuple[Placement, Plan]":
    """The placement in a file and the plan to run."""
    from loadmaster import api
    from loadmaster.core.errors import SchemaError
    from loadmaster.core.placement import Placement
    from loadmaster.core.strategy_answer import StrategyAnswer

    placement = api.load(path, max_bytes=max_bytes)
    if isinstance(placement, StrategyAnswer):
        placement = api.lower(placement)
    if not isinstance(placement, Placement):
        kind = type(placement).__name__.lower()
        raise SchemaError(
            f"{path} holds a {kind}; simulate needs a placement, as saved by 'loadmaster plan --out'"
        )
    order = placement.plan or placement.least_overflow_plan
    if order is None:
        raise SchemaError(f"{path} holds no plan: nothing was found for it")
    return placement, order


def _show(placement: "Placement", timeline: "Timeline", document: dict[str, Any]) -> None:
    from loadmaster.cli.console import stdout
    from loadmaster.core.problem import Objective
    from loadmaster.core.units import format_seconds
    from loadmaster.cost.error_bar import format_error
    from loadmaster.report import pipelines, tables
    from loadmaster.report.documents import predicted_error
    from loadmaster.report.plain_text import escape_control_characters

    objective, error = placement.problem.objective, predicted_error(placement)
    rows: dict[str, object] = {tables.time_word(placement.problem): format_error(document["step_s"], error)}
    if placement.score_s is not None:
        rows["as planned"] = format_error(placement.score_s, error)
    rows["links"] = document["links"]
    if objective == Objective.THROUGHPUT:
        rows["one pass alone"] = format_seconds(document["pass_s"])
    if not document["fits"]:
        rows["memory"] = "does not fit: the peak exceeds the memory of a device"
    console = stdout()
    console.print(tables.fields(rows))
    console.print()
    console.print(tables.devices(placement, timeline))
    if pipelines.stepped_plan(placement) is not None:
        console.print()
        console.print(pipelines.stages(placement, timeline))
    for what, path in (("timeline", document["out"]), ("trace", document["trace"])):
        if path is not None:
            console.print(escape_control_characters(f"{what} written to {path}"), soft_wrap=True)
