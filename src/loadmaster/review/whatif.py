"""What if: a plan's problem changed and planned again, change by change or along a sweep."""

import re
from collections.abc import Sequence
from dataclasses import replace

from loadmaster.core.answers.outcomes import Changed, Outcomes
from loadmaster.core.errors import InputError, LoadmasterError
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Plan
from loadmaster.core.problem import Objective, Problem
from loadmaster.core.reasons import why_none_fits
from loadmaster.core.units import format_bytes, parse_bytes
from loadmaster.graph.origin import samples_in_a_pass
from loadmaster.review.look import shown_plan
from loadmaster.review.replanning import Replanner
from loadmaster.review.settings import Changed as ChangedProblem
from loadmaster.review.settings import Settings, change_problem
from loadmaster.review.steps import samples_of

_RANGE = re.compile(r"\s*([0-9.]+)\s*([A-Za-z/]*)\s*\.\.\s*([0-9.]+)\s*([A-Za-z/]*)\s*(?::\s*([0-9]+)\s*)?")
_MOST_POINTS = 64
_WHOSE = {"given": "the plan as it was", "refine": "the plan improved", "auto": "a new plan"}
_OF_SOURCE = ("batch", "seq")
_REFUSED = "cannot be asked: "


def try_changes(
    placement: Placement, changes: Sequence[Settings], replanner: Replanner
) -> tuple[Outcomes, list[Placement | None]]:
    """Each of the changes on its own, with the plan as it is in the first row; and what was planned.

    What cannot be asked is refused before anything is planned.
    """
    asked = [change_problem(placement.problem, settings, progress=replanner.progress) for settings in changes]
    rows, found = [_as_it_is(placement)], list[Placement | None]([placement])
    for at, (settings, changed) in enumerate(zip(changes, asked, strict=True)):
        replanner.progress(f"{settings} ({at + 1} of {len(changes)})", at / max(len(changes), 1))
        row, answer = _plan_again(placement, settings, changed, replanner)
        rows.append(row)
        found.append(answer)
    lead = (
        "The same question with something changed, planned again each time: the best of the old plan,"
        " the old plan"
        f" improved, and a new one ({replanner.budget} plans each)."
    )
    return Outcomes(placement.score_s, tuple(rows), lead=lead), found


def sweep(
    placement: Placement, text: str, settings: Settings, replanner: Replanner
) -> tuple[Outcomes, list[Placement | None]]:
    """One setting at several values ('batch=1..64', 'gpu1.memory=8GB..24GB:5', 'batch=1,2,3').

    Values that cannot be asked have a row that says why; where none can, the sweep is refused.
    """
    name, values = parse_sweep(text)
    rows, found = list[Changed](), list[Placement | None]()
    for at, value in enumerate(values):
        replanner.progress(f"{name}={value} ({at + 1} of {len(values)})", at / len(values))
        asked = _with_value(settings, name, value)
        before = next((each for each in reversed(found) if each is not None), None)
        row, answer = try_change(placement, asked, replanner, before)
        rows.append(replace(row, value=value))
        found.append(answer)
    if all(answer is None for answer in found):
        raise InputError(f"--sweep {text!r}: no value is valid: {rows[0].note.removeprefix(_REFUSED)}")
    lead = (
        f"The same question at every value of {name}, planned again each time ({replanner.budget}"
        " plans each)."
    )
    return Outcomes(placement.score_s, tuple(rows), name, lead), found


def _with_value(settings: Settings, name: str, value: str) -> Settings:
    if name == "batch":
        return replace(settings, batch=int(value))
    if name == "seq":
        return replace(settings, seq=int(value))
    return replace(settings, sets=(*settings.sets, f"{name}={value}"))


def parse_sweep(text: str) -> tuple[str, list[str]]:
    """The name and the values; a range of whole numbers doubles, any other takes equal steps."""
    name, equals, body = text.rpartition("=")
    name = name.strip()
    if not equals or not name or not body.strip():
        raise InputError(
            f"--sweep {text!r}: write for example batch=1..64, gpu1.memory=8GB..24GB:5 or batch=1,2,3"
        )
    match = _RANGE.fullmatch(body)
    if match is None:
        values = [value.strip() for value in body.split(",")]
    else:
        values = _list_range(text, *match.groups())
    if name in _OF_SOURCE and not all(value.isdecimal() and 0 < int(value) < 2**31 for value in values):
        raise InputError(f"--sweep {text!r}: {name} takes whole numbers >= 1")
    if not all(values):
        raise InputError(f"--sweep {text!r} has an empty value; write for example batch=1,2,3")
    if len(values) > _MOST_POINTS:
        raise InputError(f"--sweep {text!r} has {len(values)} values; at most {_MOST_POINTS} are planned for")
    return name, list(dict.fromkeys(values))


def _list_range(
    text: str, low: str, low_unit: str, high: str, high_unit: str, steps: str | None
) -> list[str]:
    try:
        first, last = float(low), float(high)
    except ValueError:
        raise InputError(f"--sweep {text!r}: {low!r} or {high!r} is not a number") from None
    if low_unit != high_unit and low_unit and high_unit:
        one = parse_bytes(f"1000{high_unit}") / 1000
        first = parse_bytes(low + low_unit) / one
    unit = high_unit or low_unit
    if not 0 < first <= last:
        raise InputError(f"--sweep {text!r}: write the smaller value first, above 0")
    if steps is not None:
        num = int(steps)
        if not 2 <= num <= _MOST_POINTS:
            raise InputError(f"--sweep {text!r}: {num} steps; give 2 to {_MOST_POINTS}")
        points = [first + (last - first) * at / (num - 1) for at in range(num)]
        if not unit:  # whole numbers, as batches are
            points = [float(round(point)) for point in points]
    else:
        points = [first]
        while points[-1] * 2 < last:
            points.append(points[-1] * 2)
        points += [last] if last > points[-1] else []
    return [f"{point:.10g}{unit}" for point in points]


def try_change(
    placement: Placement, settings: Settings, replanner: Replanner, neighbour: Placement | None = None
) -> tuple[Changed, Placement | None]:
    """One change planned for; what cannot be asked says why. The plan of a `neighbour` is tried, too."""
    try:
        changed = change_problem(placement.problem, settings, progress=replanner.progress)
    except LoadmasterError as problem:
        return _refused(str(settings), str(problem)), None
    return _plan_again(placement, settings, changed, replanner, neighbour)


def _plan_again(
    placement: Placement,
    settings: Settings,
    changed: ChangedProblem,
    replanner: Replanner,
    neighbour: Placement | None = None,
) -> tuple[Changed, Placement]:
    start = changed.carry(placement.problem, shown_plan(placement))
    near = _plan_of_neighbour(changed.problem, neighbour) if neighbour is not None else None
    found = replanner.find(changed.problem, start, near)
    return make_row(str(settings), found, changed.notes), found


def _plan_of_neighbour(problem: Problem, neighbour: Placement) -> Plan | None:
    """Its plan, where it is of the same ops on the same devices."""
    other = neighbour.problem
    same = (other.graph.op_name, other.cluster.device_name) == (
        problem.graph.op_name,
        problem.cluster.device_name,
    )
    return neighbour.plan if same else None


def _refused(name: str, reason: str) -> Changed:
    return Changed(name, None, None, 0.0, (), (), f"{_REFUSED}{reason}")


def _as_it_is(placement: Placement) -> Changed:
    row = make_row("as it is", placement, ())
    return replace(row, note=row.note.replace(_WHOSE["auto"], "the plan as it is")) if placement.fits else row


def make_row(name: str, found: Placement, notes: Sequence[str]) -> Changed:
    """What came of a change, as a row."""
    cluster = found.problem.cluster
    note = [
        _WHOSE.get(found.algorithm, f"a new plan ({found.algorithm})")
        if found.fits
        else why_none_fits(found)[0],
        *notes,
    ]
    if found.fits:
        fullest = int((found.peak_bytes / cluster.usable_bytes).argmax())
        peak = format_bytes(found.peak_bytes[fullest])
        note.insert(1, f"fullest {cluster.device_name[fullest]} with {peak}")
    return Changed(
        name=name,
        time_s=found.score_s,
        per_sample_s=_per_sample(found),
        bound_s=found.bound_s,
        peak_bytes=tuple(found.peak_bytes.tolist()),
        devices=cluster.device_name,
        note="; ".join(note),
    )


def _per_sample(found: Placement) -> float | None:
    """Seconds a sample, where the batch is known."""
    if found.score_s is None:
        return None
    if found.problem.objective == Objective.THROUGHPUT:
        return found.score_s / (samples_in_a_pass(found.problem.graph) or 1)
    samples = samples_of(found.problem, found.plan)
    return found.score_s / samples if samples else None
