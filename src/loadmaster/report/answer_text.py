"""Answer text: what `fit`, `ways`, `explain`, `diff` and `whatif` found, printed."""

import io
from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.text import Text

from loadmaster.core.answers.fit_answer import Fit
from loadmaster.core.answers.outcomes import Difference, Explanation, Outcomes
from loadmaster.core.answers.ways_answer import Ways
from loadmaster.core.errors import InputError
from loadmaster.report import fit_tables, question_tables, ways_tables
from loadmaster.report.plain_text import escape_control_characters

_WIDTH = 100


def print_answer(answer: object, console: Console) -> None:
    """Print an answer: sentences as long as they are, tables as wide as the console."""
    for part in _list_parts(answer, console.width):
        console.print(part, soft_wrap=isinstance(part, Text))


def render_text(answer: object) -> str:
    """The same as text, without colours."""
    file = io.StringIO()
    print_answer(answer, Console(file=file, width=_WIDTH, markup=False, highlight=False, emoji=False))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def _list_parts(answer: object, width: int) -> Iterator[RenderableType]:
    if isinstance(answer, Fit):
        return _describe_fit(answer, width)
    if isinstance(answer, Explanation):
        return _describe_explanation(answer)
    if isinstance(answer, Outcomes):
        return iter([question_tables.outcomes_of(answer)])
    if isinstance(answer, Difference):
        return _describe_difference(answer)
    if isinstance(answer, Ways):
        return _describe_ways(answer)
    raise InputError(f"{type(answer).__name__} is not an answer of fit, ways, explain, diff or whatif")


def _sentence(text: str, style: str = "") -> Text:
    return Text(escape_control_characters(text), style=style)


def _describe_fit(answer: Fit, width: int) -> Iterator[RenderableType]:
    yield fit_tables.summary(answer)
    for line in fit_tables.findings(answer):
        yield _sentence(line, "yellow")
    shown = [
        ("each device alone:", fit_tables.devices(answer)),
        ("all devices, by a plan:", fit_tables.cluster(answer, width)),
        ("every preset alone:", fit_tables.presets(answer)),
        ("at the peak, on one device that holds everything:", fit_tables.modules(answer, width)),
        ("what would make it fit, the cheapest first:", fit_tables.changes(answer)),
    ]
    for title, table in shown:
        if table is not None:
            yield from ("", title, table)
    for line in fit_tables.notes(answer):
        yield _sentence(line, "dim")


def _describe_ways(answer: Ways) -> Iterator[RenderableType]:
    yield ways_tables.summary(answer)
    yield from ("", ways_tables.taken(answer))
    for line in ways_tables.deviations(answer):
        yield _sentence(line, "dim")
    reasons, commands = ways_tables.refused(answer), ways_tables.commands(answer)
    if reasons:
        yield from ("", "cannot be taken:")
        for line in reasons:
            yield _sentence(line)
    if commands:
        yield from ("", "what runs them:")
        for line in commands:
            yield _sentence(line)


def _describe_explanation(answer: Explanation) -> Iterator[RenderableType]:
    for reason in answer.reasons:
        yield _sentence(reason)
    if answer.elsewhere:
        yield from ("", question_tables.elsewhere(answer))
    if answer.changes:
        before = answer.time_s if answer.fits else None
        yield from ("", "single changes, the best first:", question_tables.outcomes(answer.changes, before))


def _describe_difference(answer: Difference) -> Iterator[RenderableType]:
    yield from (question_tables.difference_summary(answer), "", question_tables.difference_devices(answer))
    if answer.modules:
        yield from ("", question_tables.difference_modules(answer))
    for note in answer.notes:
        yield _sentence(f"note: {note}", "dim")
