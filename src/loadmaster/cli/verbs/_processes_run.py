"""loadmaster run of a pipeline or a strategy: its processes are started here, or this is one of them."""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loadmaster.core.answers.run_report import LinkRan, PipelineRan
    from loadmaster.core.answers.strategy_report import StrategyRan

LOCAL = "local"


@dataclass(frozen=True, slots=True)
class ProcessesRequest:
    """What was typed."""

    path: str
    answer: Any  # a Placement or a StrategyAnswer
    launch: str | None
    model: str | None
    steps: int
    seed: int
    checkpoint: str | None
    every: int
    timeout: float
    threads: int | None
    emulate: bool
    out: str | None
    trace: str | None
    json: bool


def run_processes(asked: ProcessesRequest, bar: Callable[[], AbstractContextManager[Any]]) -> None:
    """Run, and show what rank 0 or the parent knows."""
    import typer

    from loadmaster import api
    from loadmaster.cli.console import print_json, stderr
    from loadmaster.core.answers.strategy_report import StrategyRan
    from loadmaster.core.errors import InputError, UnknownNameError
    from loadmaster.core.placement import Placement
    from loadmaster.core.strategy_answer import StrategyAnswer

    if asked.launch not in (None, LOCAL):
        raise UnknownNameError("way to launch", str(asked.launch), (LOCAL,))
    under_torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if asked.launch is None and not under_torchrun:
        raise InputError(
            f"{asked.path} is run by several processes; add --launch local, or start it with"
            " torchrun --nproc-per-node N -m loadmaster run PLAN"
        )
    if asked.launch is not None and under_torchrun:
        raise InputError(
            "--launch local starts processes, and torchrun has done so already; leave --launch out"
        )
    if not isinstance(asked.answer, Placement | StrategyAnswer):
        raise InputError(
            f"{asked.path} holds no plan to run; save one with: loadmaster plan MODEL --out plan.json"
        )
    if asked.every < 0 or (asked.every and asked.checkpoint is None):
        raise InputError(f"--every {asked.every} needs --checkpoint DIR, and a whole number >= 1")
    with bar() as (say, tell):
        say("starting processes" if asked.launch else "joining the other processes", 0.0)
        outcome = api.run_processes(
            asked.answer,
            model=asked.model,
            steps=asked.steps,
            seed=asked.seed,
            checkpoint=asked.checkpoint,
            every=asked.every,
            timeout=asked.timeout,
            threads=asked.threads,
            emulate=asked.emulate,
            tell=tell if os.environ.get("RANK", "0") == "0" else None,
        )
    if os.environ.get("RANK", "0") != "0":
        return
    written = _write_files(outcome, asked)
    if asked.json:
        import msgspec

        print_json(msgspec.to_builtins(outcome.ran))
    elif isinstance(outcome.ran, StrategyRan):
        _show_strategy(outcome.ran, written)
    else:
        _show(outcome.ran, written)
    if outcome.ran.ended != "done":
        stderr().print(f"error: the {outcome.ran.ended} at step {outcome.ran.steps_done}")
        raise typer.Exit(1)


def _write_files(outcome: Any, asked: ProcessesRequest) -> dict[str, str]:
    from loadmaster import api
    from loadmaster.core.files import write_bytes
    from loadmaster.report.trace import chrome_traces

    written: dict[str, str] = {}
    if asked.out is not None:
        api.save(outcome.measured, asked.out)
        written["measured timeline"] = asked.out
    if asked.trace is not None:
        graphs, timelines = {"measured": outcome.graph}, {"measured": outcome.measured}
        if outcome.predicted is not None:
            timelines = {"predicted": outcome.predicted.timeline} | timelines
            graphs["predicted"] = outcome.predicted.graph
        write_bytes(chrome_traces(timelines, graphs), asked.trace)
        written["trace"] = asked.trace
    return written


def _show(ran: "PipelineRan", written: dict[str, str]) -> None:
    from loadmaster.cli.console import stdout
    from loadmaster.core.units import format_bytes, format_percent, format_seconds
    from loadmaster.report import tables
    from loadmaster.report.text_columns import columns, one_line

    console = stdout()
    rows: dict[str, object] = {"model": ran.source}
    copies = f", {ran.replicas} replicas" if ran.replicas > 1 else ""
    rows["pipeline"] = (
        f"{ran.processes} processes{copies}, {ran.schedule}, {ran.num_microbatches} micro-batches"
    )
    rows["steps"] = f"{ran.steps_done} of {ran.steps_asked} ({ran.ended})"
    finite = [loss for loss in ran.losses if loss is not None]
    if finite:
        rows["loss"] = f"{finite[0]:.6g} at first, {finite[-1]:.6g} at last"
    if ran.step_s.measured is not None:
        off = f", off by {format_percent(ran.step_s.error)}" if ran.step_s.error is not None else ""
        rows["step time"] = (
            f"{format_seconds(ran.step_s.measured)}, predicted {format_seconds(ran.step_s.predicted)}{off}"
        )
    if ran.bubble_share.measured is not None:
        seen, expected = 100 * ran.bubble_share.measured, 100 * ran.bubble_share.predicted
        rows["bubbles"] = f"{seen:.0f} % of the step, predicted {expected:.0f} %"
    rows["sent"] = f"{format_bytes(ran.sent_bytes)} a step"
    if ran.checkpoint is not None:
        rows["checkpoint"] = ran.checkpoint
    console.print(tables.fields(rows))
    console.print()
    right = ("predicted", "measured", "forward", "backward", "bubble", "weights")
    table = columns("stage", "rank", "device", *right, right=right)
    for one in ran.stages:
        table.add_row(
            str(one.stage),
            str(one.rank),
            one_line(one.device),
            format_seconds(one.microbatch_s.predicted),
            format_seconds(one.microbatch_s.measured or 0.0),
            format_seconds(one.forward_s),
            format_seconds(one.backward_s),
            f"{100 * one.bubble_share:.0f} %",
            format_bytes(one.weight_bytes),
        )
    console.print(table)
    console.print("predicted, measured: one micro-batch; bubble: share of the step without work", style="dim")
    if ran.links:
        console.print()
        console.print(_tabulate_links(ran.links))
        console.print("of one micro-batch; hidden: it came while the receiver computed", style="dim")
    _show_notes(ran.notes, written)


def _tabulate_links(links: "Sequence[LinkRan]") -> Any:
    from loadmaster.core.units import format_bytes, format_seconds
    from loadmaster.report.text_columns import columns

    right = ("bytes", "predicted", "measured")
    table = columns("stages", "ranks", *right, right=right)
    for one in links:
        table.add_row(
            f"{one.stage} to {one.to_stage}",
            f"{one.rank} to {one.to_rank}",
            format_bytes(one.num_bytes),
            format_seconds(one.transfer_s.predicted),
            "hidden" if one.transfer_s.measured is None else format_seconds(one.transfer_s.measured),
        )
    return table


def _show_strategy(ran: "StrategyRan", written: dict[str, str]) -> None:
    from loadmaster.cli.console import stdout
    from loadmaster.core.units import format_bytes, format_percent, format_seconds
    from loadmaster.report import tables
    from loadmaster.report.text_columns import columns, one_line

    console = stdout()
    rows: dict[str, object] = {"model": ran.source}
    rows["strategy"] = f"{ran.strategy}: {ran.groups} groups on {ran.processes} processes"
    rows["steps"] = f"{ran.steps_done} of {ran.steps_asked} ({ran.ended})"
    finite = [loss for loss in ran.losses if loss is not None]
    if finite:
        rows["loss"] = f"{finite[0]:.6g} at first, {finite[-1]:.6g} at last"
    if ran.step_s.measured is not None:
        off = f", off by {format_percent(ran.step_s.error)}" if ran.step_s.error is not None else ""
        rows["step time"] = (
            f"{format_seconds(ran.step_s.measured)}, predicted {format_seconds(ran.step_s.predicted)}{off}"
        )
    sent = ", ".join(f"{format_bytes(size)} {what}" for what, size in ran.sent_bytes.items())
    rows["sent"] = f"{sent or 'nothing'} a step"
    if ran.comparisons:
        apart = (
            f", apart by {ran.largest_drift:.1e} ({ran.drifted_weight})" if ran.largest_drift else ", equal"
        )
        rows["copies"] = f"compared {ran.comparisons} times, {apart}"
    if ran.checkpoint is not None:
        rows["checkpoint"] = ran.checkpoint
    console.print(tables.fields(rows))
    console.print()
    right = ("rows", "forward", "backward", "waited", "gradients", "update", "weights", "sent")
    table = columns("rank", "device", *right, right=right)
    for one in ran.ranks:
        times = (one.forward_s, one.backward_s, one.waited_s, one.meeting_s, one.update_s)
        table.add_row(
            str(one.rank),
            one_line(one.device),
            "+".join(map(str, one.rows)),
            *(format_seconds(seconds) for seconds in times),
            format_bytes(one.weight_bytes),
            format_bytes(one.sent_bytes),
        )
    console.print(table)
    console.print("waited: for tensors of other ranks; gradients: until they are summed", style="dim")
    _show_notes(ran.notes, written)


def _show_notes(notes: tuple[str, ...], written: dict[str, str]) -> None:
    from loadmaster.cli.console import stdout
    from loadmaster.report.plain_text import escape_control_characters

    console = stdout()
    for note in notes:
        console.print(escape_control_characters(f"note: {note}"), style="dim", soft_wrap=True)
    for what, path in written.items():
        console.print(escape_control_characters(f"{what} written to {path}"), soft_wrap=True)
