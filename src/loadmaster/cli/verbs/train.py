"""loadmaster train: run a study from the user's own file, with a live table; run again to continue."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from loadmaster.cli import options as o

if TYPE_CHECKING:
    from loadmaster.train.study import Study

SUMMARY = "Train many models on few devices: a study of your own file."
Source = Annotated[
    str | None,
    typer.Argument(metavar="FILE.py:NAME", help="A loadmaster.train.Study, or a function that returns one."),
]
Status = Annotated[
    str | None,
    typer.Option("--status", metavar="DIR", help="Show the status of the study in a folder; train nothing."),
]
PlanOnly = Annotated[
    bool, typer.Option("--plan", help="Print the memory, disk and time it will need; train nothing.")
]
Trace = Annotated[
    str | None, typer.Option("--trace", metavar="FILE", help="Write a Chrome trace of what the devices did.")
]
Retry = Annotated[bool, typer.Option("--retry-failed", help="Try failed trials again.")]

Adopt = Annotated[
    bool,
    typer.Option("--adopt-checkpoints", help="Continue from checkpoints that a lost journal does not list."),
]
Grace = Annotated[
    str | None,
    typer.Option("--grace", metavar="TIME", help="How long a step and its save may take after a SIGTERM."),
]


def command(
    source: Source = None,
    plan: PlanOnly = False,
    status: Status = None,
    retry_failed: Retry = False,
    adopt_checkpoints: Adopt = False,
    grace: Grace = None,
    trace: Trace = None,
    json: o.Json = False,
) -> None:
    """Train all trials of a study.

    Ctrl-C stops at the next step and saves; the same command continues. SIGTERM does the same and exits with
    code 143, at the latest after the grace time. Exit code 1: no trial is done.
    """
    from loadmaster.cli.console import print_json, stderr, stdout
    from loadmaster.core.errors import InputError
    from loadmaster.core.files import require_writable
    from loadmaster.train.coordination.result import TrialStatus

    if (source is None) == (status is None):
        raise InputError("give FILE.py:NAME to train a study, or --status DIR to see how one stands")
    if status is not None:
        _show_status(status, json=json)
        return
    assert source is not None, "one of the two is given"
    if trace is not None:
        require_writable(trace)
    study = _load_study(source)
    if grace is not None:
        study.set_grace(grace)
    if plan:
        answer = study.plan()
        if json:
            print_json(answer.to_json())
        else:
            stdout().print(str(answer), soft_wrap=True)
        return
    result = _fit_with_progress(
        study, quiet=json, retry_failed=retry_failed, adopt_checkpoints=adopt_checkpoints
    )
    if trace is not None:
        result.trace(trace)
    if json:
        print_json(result.to_json())
    else:
        stdout().print(result.table(), soft_wrap=True)
    num_failed = sum(each.status == TrialStatus.FAILED for each in result.trials)
    if num_failed:  # who mends the file and calls again would wonder why nothing happens
        stderr().print(
            f"{num_failed} of {len(result.trials)} failed, and stay so; --retry-failed tries them again",
            soft_wrap=True,
        )
    if not any(each.status == TrialStatus.DONE for each in result.trials):
        raise typer.Exit(1)


def _show_status(folder: str, *, json: bool) -> None:
    from loadmaster.cli.console import print_json, stdout
    from loadmaster.train.coordination.study_status import read_status

    found = read_status(folder)
    if json:
        print_json(found.to_json())
    else:
        stdout().print(str(found), soft_wrap=True)


def _load_study(source: str) -> "Study":
    from importlib.util import find_spec

    from loadmaster.core.errors import InputError

    if find_spec("torch") is None:
        raise InputError("train needs PyTorch; install it: pip install 'loadmaster[train]'")
    from loadmaster.train.source import load_study

    return load_study(source)


def _fit_with_progress(study: "Study", *, quiet: bool, **how: Any) -> Any:
    """Fit with a live table on a terminal, a line now and then elsewhere."""
    from loadmaster.cli.console import stderr
    from loadmaster.report.study_table import LineReporter, LiveTable

    console = stderr()
    if not quiet:
        console.print(str(study.plan()), style="dim", soft_wrap=True)
    if not console.is_terminal:
        study.callbacks.append(LineReporter(console))
        return study.fit(progress=False, **how)
    table = LiveTable(console, study.names, study.evaluated)
    study.callbacks.append(table)
    with table:
        return study.fit(progress=False, **how)
