"""loadmaster report: a plan, or the folder of a study, as one HTML page."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loadmaster.cli import options as o

if TYPE_CHECKING:
    from loadmaster.core.placement import Placement

SUMMARY = "Draw a plan, or the folder of a study, as one HTML page."


def command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="PLAN|FOLDER",
            help="A file saved by: loadmaster plan ... --out plan.json; or a study's folder.",
        ),
    ],
    out: Annotated[
        str,
        typer.Option(
            "--out", "-o", metavar="FILE", help="The HTML page to write; one file that loads nothing else."
        ),
    ] = "report.html",
    measured: Annotated[
        str | None,
        typer.Option(
            "--measured",
            "-m",
            metavar="FILE",
            help="A measured timeline (loadmaster run --out), or a Chrome trace of torch.profiler, below the"
            " prediction.",
        ),
    ] = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            "--compare", metavar="FILE", help="Another saved plan to compare with. May be repeated."
        ),
    ] = None,
    max_bytes: o.MaxBytes = "1GiB",
    json: o.Json = False,
) -> None:
    """Write an HTML page: timeline, memory, idle time, critical path, cluster, modules and algorithms.

    The page is one file: open it from disk, send it, or print it. The exit code is 0 also for a plan that
    does not fit; the page then shows the nearest plan.
    """
    from loadmaster.cli.console import print_json, progress, stdout
    from loadmaster.cli.question import check_outputs, parse_size
    from loadmaster.core.errors import InputError
    from loadmaster.report.plain_text import escape_control_characters

    limit = parse_size("--max-bytes", max_bytes)
    check_outputs({"--out": out}, inputs=[source, measured, *(compare or [])])
    with progress(f"drawing {source}"):
        if Path(source).is_dir():
            if measured is not None or compare:
                raise InputError("--measured and --compare belong to a plan; a study's folder has neither")
            what = _write_study(source, out)
        else:
            what = _write_plan(source, out, measured, compare or [], limit)
    size = Path(out).stat().st_size if Path(out).is_file() else None
    if json:
        print_json({"report": out, "of": what, "num_bytes": size})
    else:
        stdout().print(escape_control_characters(f"report written to {out}"), soft_wrap=True)


def _write_plan(source: str, out: str, measured: str | None, compare: list[str], limit: int) -> str:
    from loadmaster import api
    from loadmaster.core.errors import PlanError

    placement = read_placement(source, limit)
    seen = api.load_measured(measured, placement, max_bytes=limit) if measured is not None else None
    others: dict[str, Placement] = {}
    for path in compare:
        other = read_placement(path, limit)
        if other.problem.digest != placement.problem.digest:
            raise PlanError(f"{path} answers another question than {source}; compare answers to one question")
        others[f"{other.algorithm} ({path})"] = other
    api.write_report(placement, out, measured=seen, compare=others)
    return "plan"


def _write_study(folder: str, out: str) -> str:
    from loadmaster.core.files import write_bytes
    from loadmaster.report.study_page import render_study_page
    from loadmaster.train.disk.study_log import read_study_log

    write_bytes(render_study_page(read_study_log(Path(folder))), out)
    return "study"


def read_placement(path: str, limit: int) -> "Placement":
    """The placement in a file, of a strategy that of its lowered graph; anything else is refused."""
    from loadmaster import api
    from loadmaster.core.errors import PlanError
    from loadmaster.core.placement import Placement
    from loadmaster.core.strategy_answer import StrategyAnswer
    from loadmaster.report.documents import require_matching

    found = api.load(path, max_bytes=limit)
    if isinstance(found, StrategyAnswer):
        found = api.lower(found)
    if not isinstance(found, Placement):
        word = type(found).__name__.lower()
        raise PlanError(
            f"{path} holds a {word}; a plan with its problem is needed: loadmaster plan ... --out"
        )
    require_matching(found)
    return found
