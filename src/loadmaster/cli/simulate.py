"""loadmaster simulate: a saved plan run again, under the same or another model of the links."""

from typing import Annotated

import typer

from loadmaster.cli import options as o


def command(
    plan: Annotated[str, typer.Argument(help="A plan saved by: loadmaster plan --out plan.json")],
    links: o.LinksName = None,
    dispatch: Annotated[
        str | None, typer.Option("--dispatch", help="in_order (the plan's order) or ready (first come).")
    ] = None,
    max_bytes: o.MaxBytes = "1GiB",
    out: o.Out = None,
    trace: o.Trace = None,
    json: o.Json = False,
) -> None:
    """Simulate a saved plan: step time, busy time and peak memory of every device."""
    from dataclasses import replace

    from loadmaster import api
    from loadmaster.cli import answers, tables
    from loadmaster.cli.console import print_json, progress, stdout
    from loadmaster.core.errors import SchemaError
    from loadmaster.core.placement import Placement
    from loadmaster.core.units import format_seconds, parse_bytes

    with progress(f"simulating {plan}") as say:
        placement = api.load(plan, max_bytes=parse_bytes(max_bytes))
        if not isinstance(placement, Placement):
            raise SchemaError(
                f"{plan} holds a {type(placement).__name__.lower()}; simulate wants a placement, as"
                " 'loadmaster plan --out' saves it"
            )
        order = placement.plan or placement.least_overflow_plan
        if order is None:
            raise SchemaError(f"{plan} holds no plan: nothing was found for it")
        say("running", 0.0)
        timeline = api.simulate(placement.problem, order, links, dispatch=dispatch)
    if out is not None:
        api.save(timeline, out)
    if trace is not None:
        answers.save_trace(placement, timeline, trace)
    if json:
        print_json({"plan": plan, **answers.timeline_document(timeline), "out": out, "trace": trace})
        return
    console = stdout()
    console.print(f"one pass takes {format_seconds(timeline.step_s)}")
    console.print(tables.devices(replace(placement, peak_bytes=timeline.peak_bytes), timeline))
    for what, path in (("timeline", out), ("trace", trace)):
        if path is not None:
            console.print(f"{what} written to {path}", soft_wrap=True)
