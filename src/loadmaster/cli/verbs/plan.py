"""loadmaster plan: the best plan for a graph on devices, with its proof or its reasons."""

from typing import TYPE_CHECKING, Any

import typer

from loadmaster.cli import options as o

if TYPE_CHECKING:
    from loadmaster.core.placement import Placement
    from loadmaster.core.problem import Problem
    from loadmaster.core.question import Question
    from loadmaster.core.run import Budget
    from loadmaster.core.timeline import Timeline

SUMMARY = "Place a graph on devices."


def command(
    source: o.Source,
    devices: o.Devices = None,
    algorithm: o.Algorithm = "auto",
    budget: o.BudgetText = "10s",
    seed: o.Seed = 0,
    objective: o.ObjectiveName = None,
    links: o.LinksName = None,
    split: o.SplitName = None,
    load: o.LoadName = None,
    pipeline: o.PipelineName = None,
    spill: o.Spill = None,
    order: o.Order = "free",
    evaluate: o.Evaluate = "simulated",
    repeats: o.Repeats = 5,
    batch: o.Batch = None,
    seq: o.Seq = None,
    optimizer: o.Optimizer = None,
    precision: o.Precision = "fp32",
    target: o.Target = None,
    capture: o.Capture = None,
    assume: o.Assume = None,
    accumulation: o.Accumulation = None,
    range: o.Ranges = None,
    pin: o.Pin = None,
    reserve: o.Reserve = "0",
    format: o.Format = None,
    max_bytes: o.MaxBytes = "1GiB",
    measure: o.Measure = None,
    costs: o.Costs = None,
    database: o.Database = None,
    out: o.Out = None,
    trace: o.Trace = None,
    json: o.Json = False,
) -> None:
    """Place a model or graph on devices: step time, proven gap, peak memory, and why.

    Exit code 1 means that no plan fits; the reason names the device and the missing bytes. Ctrl-C keeps the
    best plan found so far: it is printed and written as usual, and the exit code is 130.
    """
    options = locals()  # by name, for build_question; before any other name is bound
    from dataclasses import replace

    from loadmaster import api
    from loadmaster.cli.console import print_json, progress, stderr, stdout
    from loadmaster.cli.question import build_question, check_outputs, read_problem
    from loadmaster.core.pipelines.schedule import AUTO
    from loadmaster.core.reasons import why_none_fits
    from loadmaster.core.run import parse_budget
    from loadmaster.graph.source import is_model
    from loadmaster.placers.ask import PlanInterrupted
    from loadmaster.placers.registry import objectives_of, placer
    from loadmaster.questions.problem import build_problem
    from loadmaster.report import documents
    from loadmaster.report.plain_text import escape_control_characters

    limit, chosen = parse_budget(budget), placer(algorithm)
    check_outputs({"--out": out, "--trace": trace}, inputs=[source, devices])
    question = build_question({"usual_costs": "auto", **options})
    asked: dict[str, Any] = {}
    served = objectives_of(chosen)
    if objective is None and pipeline not in (None, "", AUTO) and len(served) == 1:
        question = replace(question, objective=served[0].value)  # what it plans of a pipeline is clear
    problem = read_problem(question)
    if objective is None and pipeline is None and problem.objective not in served:
        asked = {"objective": served[0].value, "split": split}
        note = (
            f"{algorithm} supports only {served[0]}, so that is the objective here, not {problem.objective}"
        )
        stderr().print(escape_control_characters(note), style="dim", soft_wrap=True)
    interrupted = False
    try:
        with progress("planning") as say:

            def ask(one: "Problem", share: "Budget") -> "Placement":
                return api.plan(
                    one,
                    algorithm=chosen,
                    budget=share,
                    seed=seed,
                    spill=spill,
                    order=order,
                    evaluate=evaluate,
                    repeats=repeats,
                    pipeline=AUTO if pipeline == AUTO else None,
                    question=question,
                    progress=say,
                    **asked,
                )

            measured = evaluate == "measured"
            if target is None and pipeline is None and not measured and is_model(question.source):
                from loadmaster.capacity.mixed_plan import plan_with_own_kernels

                placement = plan_with_own_kernels(
                    problem, limit, ask, lambda: build_problem(replace(question, target="cpu"), progress=say)
                )
            else:
                placement = ask(problem, limit)
    except PlanInterrupted as stopped:
        placement, interrupted = stopped.placement, True
        stderr().print("interrupted: this is the best plan so far", soft_wrap=True)
    proposal = None if interrupted or pipeline is not None else _propose(placement, question)
    plan = placement.plan or placement.least_overflow_plan
    timeline = api.simulate(placement.problem, plan) if plan is not None else None
    written = {}
    if out is not None:
        api.save(placement, out)
        written["plan"] = out
    if trace is not None and timeline is not None:
        documents.save_trace(placement, timeline, trace)
        written["trace"] = trace
    if json:
        print_json(
            {
                "source": source,
                **documents.placement_document(placement, timeline),
                "proposal": proposal,
                **written,
            }
        )
        for line in [] if placement.fits else why_none_fits(placement):
            stderr().print(escape_control_characters(line), soft_wrap=True)
    else:
        _show(placement, timeline, written)
        if proposal is not None:
            stdout().print(proposal["text"], style="dim", soft_wrap=True)
    if interrupted:
        raise typer.Exit(130)
    if not placement.fits:
        raise typer.Exit(1)


def _propose(placement: "Placement", question: "Question") -> dict[str, Any] | None:
    """A pipeline of micro-batches that would be faster by a tenth or more, where one is found at a glance."""
    from loadmaster.core.units import format_seconds
    from loadmaster.placers.microbatches import propose_pipeline
    from loadmaster.questions.problem import batch_of

    proposed = propose_pipeline(placement, batch_of(placement.problem.graph, question))
    if proposed is None:
        return None
    found, now_s = proposed
    if found.score_s is None or found.problem.schedule is None:
        return None
    count = found.problem.schedule.num_microbatches
    gain = f"{now_s / found.score_s:.2f}x faster than this plan in training" if now_s else "which fits"
    text = (
        f"note: a pipeline of {count} micro-batches would take about {format_seconds(found.score_s)} ({gain})"
    )
    return {
        "pipeline": "auto",
        "num_microbatches": count,
        "step_s": found.score_s,
        "text": f"{text}; use --pipeline auto",
    }


def _show(placement: "Placement", timeline: "Timeline | None", written: dict[str, str]) -> None:
    from loadmaster.cli.console import stdout
    from loadmaster.core.reasons import why_none_fits
    from loadmaster.report import pipelines, tables
    from loadmaster.report.plain_text import escape_control_characters

    console = stdout()
    console.print(tables.summary(placement, timeline))
    console.print()
    told = tables.findings(placement.problem.graph)
    for line in told:
        console.print(escape_control_characters(line), style="yellow", soft_wrap=True)
    if told:
        console.print()
    if not placement.fits:
        console.print("the nearest plan:")
    console.print(tables.devices(placement, timeline))
    if pipelines.stepped_plan(placement) is not None:
        console.print()
        console.print(pipelines.stages(placement, timeline))
        for line in pipelines.why(placement):
            console.print(escape_control_characters(line), soft_wrap=True)
    elif placement.plan is not None and any(placement.problem.graph.module):
        console.print()
        console.print(tables.modules(placement))
    if placement.members:
        console.print()
        console.print(tables.members(placement))
    if placement.guarantee:
        console.print()
        console.print(escape_control_characters(f"guarantee: {placement.guarantee}"), soft_wrap=True)
    if not placement.fits:
        console.print()
    for line in [] if placement.fits else why_none_fits(placement):
        console.print(escape_control_characters(line), style="red", soft_wrap=True)
    for line in _note_torch_order(placement):
        console.print(escape_control_characters(line), style="dim", soft_wrap=True)
    for what, path in written.items():
        console.print(
            escape_control_characters(_describe_written_file(what, path, fits=placement.fits)), soft_wrap=True
        )


def _describe_written_file(what: str, path: str, *, fits: bool) -> str:
    """What a file holds; one without a plan that fits cannot be run."""
    if fits:
        return f"{what} written to {path}"
    if what == "plan":
        return f"the nearest plan, and why nothing fits, written to {path}; it cannot be run"
    return f"{what} of the nearest plan written to {path}"


def _note_torch_order(placement: "Placement") -> list[str]:
    """What to know of a captured step whose plan has another order than torch's."""

    from loadmaster.review.look import put_off

    return [f"note: the plan {text}; use --order captured to plan for that" for text in put_off(placement)]
