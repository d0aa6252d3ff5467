"""loadmaster run: train a saved plan for some steps, and compare with the prediction."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loadmaster.cli import options as o

if TYPE_CHECKING:
    from loadmaster.core.answers.run_report import Outcome, Pair, Ran

SUMMARY = "Train on a saved plan and compare with its prediction."
Tell = Callable[[int, float, float, dict[str, int]], None]


def command(
    plan: Annotated[
        str, typer.Argument(metavar="PLAN", help="A file saved by: loadmaster plan MODEL --out plan.json")
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            help="hf:NAME, zoo:NAME or file.py:function. Default: what the plan was captured from.",
        ),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="Steps to train.")] = 20,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Seed of weights, data and dropout.")] = 0,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Write the measured times of ops to the cost database.")
    ] = False,
    database: o.Database = None,
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", metavar="FILE", help="Save the measured timeline (.json, .json.gz)."),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            "--trace", metavar="FILE", help="Write both timelines as a Chrome trace, one below the other."
        ),
    ] = None,
    launch: Annotated[
        str | None,
        typer.Option(
            "--launch",
            metavar="WHERE",
            help="For pipelines and strategies: 'local' starts the processes. Not needed under torchrun.",
        ),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint",
            metavar="DIR",
            help="For pipelines and strategies: resume from this folder, and save at the end.",
        ),
    ] = None,
    every: Annotated[
        int, typer.Option("--every", metavar="N", help="Also save a checkpoint every N steps.")
    ] = 0,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout", metavar="S", help="Seconds that a process waits for another before it fails."
        ),
    ] = 120.0,
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", help="Threads of each process on a CPU.")
    ] = None,
    emulate: Annotated[
        bool,
        typer.Option(
            "--emulate", help="Emulate the plan's hosts here, as network namespaces with limited links."
        ),
    ] = False,
    json: o.Json = False,
) -> None:
    """Train on a saved plan with synthetic data, and compare time, transfers and memory with the prediction.

    A pipeline or a strategy runs in several processes: `loadmaster run plan.json --launch local`, or
    `torchrun --nproc-per-node 2 -m loadmaster run plan.json` on each host.

    Exit code 1 means that the file has no plan that fits, or that the loss was not finite. After Ctrl-C, what
    was measured so far is shown.
    """
    from loadmaster import api
    from loadmaster.cli.console import print_json, stderr
    from loadmaster.cli.question import check_outputs
    from loadmaster.core.errors import InputError
    from loadmaster.core.strategy_answer import StrategyAnswer
    from loadmaster.report.plain_text import escape_control_characters

    if database is not None and not calibrate:
        raise InputError("--database names measured costs, which only --calibrate writes; add --calibrate")
    if steps < 1:
        raise InputError(f"--steps is {steps}; give a whole number >= 1")
    check_outputs({"--out": out, "--trace": trace}, inputs=[plan, database])
    with _told_to_other_ranks():
        placement = _read_runnable(plan)
    over_processes = (
        isinstance(placement, StrategyAnswer)
        or getattr(getattr(placement, "plan", None), "pipeline", None) is not None
    )
    if over_processes or launch is not None:
        from loadmaster.cli.verbs._processes_run import ProcessesRequest, run_processes

        request = ProcessesRequest(
            plan,
            placement,
            launch,
            model,
            steps,
            seed,
            checkpoint,
            every,
            timeout,
            threads,
            emulate,
            out,
            trace,
            json,
        )
        run_processes(request, lambda: _show_progress_bar(plan, steps))
        return
    for name, given in {"--checkpoint": checkpoint, "--every": every, "--emulate": emulate}.items():
        if given:
            raise InputError(f"{name} is for pipelines; {plan} has none (plan with --pipeline)")
    with _show_progress_bar(plan, steps) as (say, tell):
        outcome = api.run(
            placement,
            model=model,
            steps=steps,
            calibrate=calibrate,
            database=database,
            seed=seed,
            tell=tell,
            progress=say,
        )
    written = _write_files(outcome, out, trace)
    for line in list_unwritten(outcome, out=out, trace=trace, calibrate=calibrate):
        stderr().print(escape_control_characters(line), soft_wrap=True)
    if json:
        import msgspec

        print_json(msgspec.to_builtins(outcome.ran))
    else:
        _show(outcome.ran, written)
    ended = outcome.ran.ended
    if ended == "interrupted":
        stderr().print(f"interrupted after {outcome.ran.steps_done} of {steps} steps")
        raise typer.Exit(130)
    if ended != "done":
        stderr().print(
            escape_control_characters(f"error: the {ended} at step {outcome.ran.steps_done}"), soft_wrap=True
        )
        raise typer.Exit(1)


def _told_to_other_ranks() -> AbstractContextManager[None]:
    """Under torchrun the others, whose files may be good, would wait for this process."""
    if "RANK" not in os.environ:
        return nullcontext()
    from loadmaster.runtime.distributed.watch import failure_told

    return failure_told()


def _read_runnable(path: str) -> Any:
    """What a file holds; a placement without a plan ends here, before any model is built."""
    from loadmaster import api
    from loadmaster.cli.console import stderr
    from loadmaster.core.placement import Placement
    from loadmaster.core.reasons import why_none_fits
    from loadmaster.core.strategy_answer import StrategyAnswer
    from loadmaster.report.plain_text import escape_control_characters

    found = api.load(path)
    if isinstance(found, StrategyAnswer):
        return found
    if not isinstance(found, Placement):
        return path  # refused with its name
    if found.fits:
        return found
    stderr().print(
        escape_control_characters(f"{path} holds no plan that fits, so there is nothing to run:"),
        soft_wrap=True,
    )
    for line in why_none_fits(found):
        stderr().print(escape_control_characters(line), soft_wrap=True)
    raise typer.Exit(1)


def list_unwritten(outcome: "Outcome", *, out: str | None, trace: str | None, calibrate: bool) -> list[str]:
    """A line for everything that was asked for and could not be written, with the reason."""
    ran, why = outcome.ran, "" if outcome.measured is not None else _why_not_timed(outcome.ran)
    asked = {"measured timeline": out, "trace": trace} if why else {}
    lines = [f"{what} NOT written to {path}: {why}" for what, path in asked.items() if path is not None]
    if calibrate and not ran.num_calibrated:
        lines.append(f"cost database NOT written: {why or 'no op that was timed has a key in it'}")
    return lines


def _why_not_timed(ran: "Ran") -> str:
    """Why there is no measured timeline."""
    if ran.ended == "interrupted":
        return "the run was interrupted before the steps that are timed op by op, which come last"
    if ran.ended != "done":
        return f"the {ran.ended}, and the steps that are timed op by op come last"
    if ran.engine == "tensorflow":
        return "TensorFlow's ops are not timed one by one in a run"
    return "the model ran by hooks, module by module, so that no single op could be timed"


@contextmanager
def _show_progress_bar(plan: str, steps: int) -> Iterator[tuple[Callable[[str, float], None], Tell]]:
    """A bar on a terminal with step time and memory; elsewhere a line now and then."""
    from loadmaster.cli.console import progress, stderr
    from loadmaster.cli.interrupts import raise_if_lost
    from loadmaster.report.plain_text import escape_control_characters

    console = stderr()
    if not console.is_terminal:
        with progress(f"running {plan}") as say:
            yield say, lambda *news: say(_format_step(steps, *news), 0.0)
        return
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(escape_control_characters(f"running {plan}"), total=steps)

        def say_so(message: str, _share: float) -> None:
            raise_if_lost()
            bar.update(task, description=escape_control_characters(message))

        def tell(number: int, seconds: float, loss: float, live: dict[str, int]) -> None:
            raise_if_lost()
            bar.update(
                task,
                completed=number,
                description=escape_control_characters(_format_step(steps, number, seconds, loss, live)),
            )

        yield say_so, tell


def _format_step(steps: int, number: int, seconds: float, loss: float, live: dict[str, int]) -> str:
    """'step 3 of 20: 120 ms, loss 3.21, cpu#0 31.0 MiB, cpu#1 12.0 MiB'."""
    from loadmaster.core.units import format_bytes, format_seconds

    held = "".join(f", {name} {format_bytes(num_bytes)}" for name, num_bytes in live.items())
    return f"step {number} of {steps}: {format_seconds(seconds)}, loss {loss:.4g}{held}"


def _write_files(outcome: "Outcome", out: str | None, trace: str | None) -> dict[str, str]:
    """Files that were asked for; without a measured timeline there is nothing to write."""
    from loadmaster import api
    from loadmaster.core.files import write_bytes
    from loadmaster.report.trace import chrome_traces

    written: dict[str, str] = {}
    if outcome.measured is None:
        return written
    if out is not None:
        api.save(outcome.measured, out)
        written["measured timeline"] = out
    if trace is not None:
        both = {"predicted": outcome.predicted, "measured": outcome.measured}
        write_bytes(chrome_traces(both, outcome.placement.problem.graph), trace)
        written["trace"] = trace
    return written


def _show(ran: "Ran", written: dict[str, str]) -> None:
    from loadmaster.cli.console import stdout
    from loadmaster.core.units import format_seconds
    from loadmaster.report import tables
    from loadmaster.report.plain_text import escape_control_characters

    console = stdout()
    rows: dict[str, object] = {"model": ran.source, "engine": ran.engine}
    rows["steps"] = f"{ran.steps_done} of {ran.steps_asked} ({ran.ended})"
    finite = [loss for loss in ran.losses if loss is not None]
    if finite:
        rows["loss"] = f"{finite[0]:.6g} at first, {finite[-1]:.6g} at last"
    if ran.uncounted_step_s is not None:
        rows["under the clock"] = f"{format_seconds(ran.uncounted_step_s)} a step, bytes not counted"
    if ran.num_calibrated:
        rows["calibrated"] = f"{ran.num_calibrated} ops written to {ran.database}"
    console.print(tables.fields(rows))
    console.print()
    console.print(comparison_table(ran))
    console.print("error = predicted / measured - 1: negative if the prediction was too small", style="dim")
    for note in ran.notes:
        console.print(escape_control_characters(f"note: {note}"), style="dim", soft_wrap=True)
    for what, path in written.items():
        console.print(escape_control_characters(f"{what} written to {path}"), soft_wrap=True)


def comparison_table(ran: "Ran") -> Any:
    """A table: what was predicted, what was measured, and how far apart they are."""
    from loadmaster.core.units import format_bytes, format_seconds
    from loadmaster.report.text_columns import columns

    table = columns("", "predicted", "measured", "error", right=("predicted", "measured", "error"))
    _add_row(table, "step time", ran.step_s, format_seconds, error=ran.step_rel_error)
    for device in ran.devices:
        _add_row(table, f"{device.device} busy", device.busy_s, format_seconds)
    _add_row(table, "transfers", ran.num_transfers, lambda number: f"{number:.0f}")
    _add_row(table, "transfer time", ran.transfer_s, format_seconds)
    for device in ran.devices:
        _add_row(table, f"{device.device} peak", device.peak_bytes, format_bytes)
    return table


def _add_row(
    table: Any, name: str, pair: "Pair", words: Callable[[Any], str], *, error: float | None = None
) -> None:
    from loadmaster.core.units import format_percent
    from loadmaster.cost.error_bar import format_error
    from loadmaster.report.text_columns import one_line

    measured = "-" if pair.measured is None else words(pair.measured)
    off = "-" if pair.error is None else format_percent(pair.error)
    predicted = words(pair.predicted) if error is None else format_error(pair.predicted, error)
    table.add_row(one_line(name), predicted, measured, off)
