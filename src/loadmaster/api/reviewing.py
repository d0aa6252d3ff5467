"""Reviewing a plan: its page, export to other programs, explanations, comparisons and what-if questions."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from loadmaster.api.planning import plan
from loadmaster.api.simulation import simulate
from loadmaster.core.errors import InputError
from loadmaster.core.files import MAX_BYTES
from loadmaster.core.placement import Placement
from loadmaster.core.run import Budget, ignore_progress, parse_budget
from loadmaster.core.timeline import Timeline

if TYPE_CHECKING:
    from loadmaster.core.answers.outcomes import Difference, Explanation, Outcomes


def write_report(
    placement: Placement,
    path: str | os.PathLike[str],
    *,
    measured: Timeline | None = None,
    compare: Mapping[str, Placement] | None = None,
    outcomes: "Sequence[Outcomes]" = (),
) -> None:
    """Write the HTML page of a placement: one file that loads nothing else (docs/report.md).

    - `measured`: a timeline that is drawn below the prediction, on the same axis.
    - `compare`: other answers to the same question, by name.
    - `outcomes`: what `whatif` returned.
    """
    from loadmaster.core.files import write_bytes
    from loadmaster.report.plan_page import PlanPage, render_plan_page
    from loadmaster.review.look import review_measured, review_plan, shown_plan

    review = review_plan(placement)
    seen = None
    if measured is not None:
        seen = review_measured(placement.problem, shown_plan(placement), measured)
    others = tuple((compare or {}).items())
    write_bytes(render_plan_page(PlanPage(placement, review, seen, others, outcomes)), path)


def load_measured(
    path: str | os.PathLike[str], placement: Placement, *, max_bytes: int = MAX_BYTES
) -> Timeline:
    """Read the measured timeline of a plan: a file of `run`, or a Chrome trace of `torch.profiler`."""
    from loadmaster.review.profiler_trace import read_measured

    return read_measured(path, placement, max_bytes=max_bytes)


def export(
    placement: Placement, to: str, path: str | os.PathLike[str] | None = None
) -> tuple[bytes, tuple[str, ...]]:
    """Write a plan in the format of another program, and say what that format cannot express.

    `to` is 'device_map', 'torchtitan', 'openvino', 'chrome', 'graphml', 'nodelink' or 'csv'. If `path` is
    given, the file is written there.
    """
    from loadmaster.core.files import write_bytes
    from loadmaster.report.exports.registry import export_plan
    from loadmaster.review.look import shown_plan

    made = export_plan(placement, simulate(placement.problem, shown_plan(placement)), to)
    if path is not None:
        write_bytes(made.content, path)
    return made.content, made.lost


def import_file(
    path: str | os.PathLike[str], placement: Placement, *, max_bytes: int = MAX_BYTES
) -> tuple[Placement | Timeline, tuple[str, ...]]:
    """Read a device_map as a scored plan, or a Chrome trace as a measured timeline. Also returns notes."""
    from loadmaster.review.imports import read_device_map, read_import

    read = read_import(path, placement, max_bytes=max_bytes)
    if isinstance(read, tuple):
        return read
    imported, notes = read_device_map(read, placement)
    return plan(placement.problem, algorithm=imported), notes


def explain(
    placement: Placement,
    target: str = "",
    *,
    budget: Budget | float | str = "100x",
    replan: bool = True,
    seed: int = 0,
    progress: Callable[[str, float], None] = ignore_progress,
) -> "Explanation":
    """Explain a plan, or why an op or module is where it is, by trying the alternatives (docs/report.md).

    Without `target`, single changes of the devices or the batch are planned. With one, it is put on every
    other device. `budget` is for each of these plans. With `replan=False` the target is only simulated on the
    other devices.
    """
    from loadmaster.review.explain import explain_plan
    from loadmaster.review.replanning import Replanner

    replanner = Replanner(parse_budget(budget), seed=seed, progress=progress)
    return explain_plan(placement, target, replanner, replan=replan)


def diff(
    before: Placement, after: Placement, *, names: tuple[str, str] = ("before", "after")
) -> "Difference":
    """Compare two plans of one model: which ops moved, and time and memory before and after."""
    from loadmaster.review.diff import compare_plans

    return compare_plans(before, after, names)


def whatif(
    placement: Placement,
    *,
    set: str | Sequence[str] = (),
    add: str | Sequence[str] = (),
    remove: str | Sequence[str] = (),
    batch: int | None = None,
    seq: int | None = None,
    optimizer: str | None = None,
    precision: str | None = None,
    sweep: str | None = None,
    together: bool = False,
    budget: Budget | float | str = "100x",
    order: str = "free",
    seed: int = 0,
    progress: Callable[[str, float], None] = ignore_progress,
) -> "tuple[Outcomes, Placement | None]":
    """Plan again with something changed. Returns one outcome per change, and the plan with all changes.

    - `set`: 'gpu1.memory=24GB'; `add`: '1xA100-80GB'; `remove`: 'gpu1'. One text or a list of them.
    - `batch`, `seq`, `optimizer`, `precision`: capture the model again with other values.
    - `sweep`: 'batch=1..64' tries several values of one of these.
    - `together`: only show all changes together, not each one alone.
    """
    from loadmaster.review import whatif as trials
    from loadmaster.review.replanning import Replanner
    from loadmaster.review.settings import Settings

    replanner = Replanner(parse_budget(budget), order, seed, progress)
    words: dict[str, Any] = {"batch": batch, "seq": seq, "optimizer": optimizer, "precision": precision}
    sets, adds, removals = ((each,) if isinstance(each, str) else tuple(each) for each in (set, add, remove))
    asked = Settings(sets, adds, removals, batch, seq, optimizer, precision)
    if sweep is not None:
        found, answers = trials.sweep(placement, sweep, asked, replanner)
        return found, answers[-1]
    single = [Settings(sets=(each,)) for each in sets]
    single += [Settings(add=(each,)) for each in adds] + [Settings(remove=(each,)) for each in removals]
    single += [Settings(**{name: value}) for name, value in words.items() if value is not None]
    if not single:
        raise InputError("nothing is changed; name --set, --add, --remove, --batch or --sweep")
    changes = [asked] if together or len(single) == 1 else [*single, asked]
    found, answers = trials.try_changes(placement, changes, replanner)
    return found, answers[-1]
