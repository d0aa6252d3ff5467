"""loadmaster plan: the best plan for a graph on devices, with its proof or its reasons."""

import typer

from loadmaster.cli import options as o


def command(
    source: o.Source,
    devices: o.Devices = None,
    algorithm: o.Algorithm = "auto",
    budget: o.BudgetText = "10s",
    seed: o.Seed = 0,
    objective: o.ObjectiveName = None,
    links: o.LinksName = None,
    split: o.SplitName = None,
    load: o.LoadName = "sum",
    optimizer: o.Optimizer = None,
    precision: o.Precision = "fp32",
    pin: o.Pin = None,
    reserve: o.Reserve = "0",
    format: o.Format = None,
    max_bytes: o.MaxBytes = "1GiB",
    out: o.Out = None,
    trace: o.Trace = None,
    json: o.Json = False,
) -> None:
    """Place a graph on devices: step time, proven gap, peak memory, and why."""
    from loadmaster import api
    from loadmaster.cli import answers, tables
    from loadmaster.cli.console import print_json, progress, stdout
    from loadmaster.cli.question import ask
    from loadmaster.core.run import parse_budget
    from loadmaster.placers.registry import objectives_of, placer

    limit, chosen = parse_budget(budget), placer(algorithm)
    only = objectives_of(chosen)
    problem = ask(
        source,
        devices,
        objective=objective or (only[0].value if len(only) == 1 else None),
        links=links,
        split=split,
        load=load,
        optimizer=optimizer,
        precision=precision,
        pin=pin,
        reserve=reserve,
        format=format,
        max_bytes=max_bytes,
    )
    with progress("planning") as say:
        placement = api.plan(problem, algorithm=chosen, budget=limit, seed=seed, progress=say)
    plan = placement.plan or placement.least_overflow_plan
    timeline = api.simulate(problem, plan) if plan is not None else None
    written = []
    if out is not None:
        api.save(placement, out)
        written.append(("plan", out))
    if trace is not None and timeline is not None:
        answers.save_trace(placement, timeline, trace)
        written.append(("trace", trace))
    if json:
        document = answers.placement_document(placement)
        print_json({"source": source, **document, **dict(written)})
    else:
        console = stdout()
        console.print(tables.summary(placement))
        console.print()
        console.print(tables.devices(placement, timeline))
        if placement.members:
            console.print()
            console.print(tables.members(placement))
        for line in [] if placement.fits else tables.why_not_fit(placement):
            console.print(line, style="red", soft_wrap=True)
        for what, path in written:
            console.print(f"{what} written to {path}", soft_wrap=True)
    if not placement.fits:
        raise typer.Exit(1)
