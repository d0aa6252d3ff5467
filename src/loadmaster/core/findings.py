"""Findings: what a capture could not know and assumed, and what looks wrong in what it recorded.

A Graph carries them, so that every plan made of it, and every file of such a plan, can say them again.
"""

from dataclasses import dataclass

_MOST_NAMES = 4
FOR_THIS_BRANCH = "optimal for this branch"


@dataclass(frozen=True, slots=True)
class Assumption:
    """A value that the model reads in one place, which depends on weights or inputs that are not there."""

    where: str  # line of the model's code, 'modeling_opt.py:560', '' = not known
    module: str  # path of the module that ran, '' = the model itself
    read: (
        str  # what is read: 'bool', 'int', 'float', or the op whose result has a size that depends on values
    )
    assumed: str  # 'True', '1', 'all of them'
    count: int  # how often it is read in a step


@dataclass(frozen=True, slots=True)
class Finding:
    """Something a captured step does that a training step rarely means to do."""

    kind: str  # 'unread', 'no_gradient' or 'few_flops'
    text: str
    names: tuple[str, ...]  # of the weights


def describe_assumption(assumption: Assumption) -> str:
    """One line: where, what and how often."""
    where = assumption.where or "code that is not known"
    module = f" in module {assumption.module!r}" if assumption.module else ""
    times = f", {assumption.count} times" if assumption.count > 1 else ""
    return f"{where}{module}: {assumption.read} taken to be {assumption.assumed}{times}"


def describe_assumptions(assumptions: tuple[Assumption, ...]) -> list[str]:
    """What was assumed, place by place, and how to say otherwise."""
    if not assumptions:
        return []
    num = sum(one.count for one in assumptions)
    what = "1 value" if num == 1 else f"{num} values"
    verb = "depends" if num == 1 else "depend"
    head = (
        f"assumed: {what} that the model reads {verb} on weights or inputs that capture does not have;"
        " the plan holds for this branch only"
    )
    tail = (
        "  pass --assume VALUE (assume=VALUE in Python) to assume another value, or give a model and inputs"
        " that have values"
    )
    return [head, *(f"  {describe_assumption(one)}" for one in assumptions), tail]


def describe_findings(
    assumptions: tuple[Assumption, ...], warnings: tuple[Finding, ...], notes: tuple[str, ...]
) -> list[str]:
    """Everything a user must know of a captured step, line by line."""
    lines = describe_assumptions(assumptions)
    lines += [f"warning: {warning.text}" for warning in warnings]
    return [*lines, *(f"note: {note}" for note in notes)]


def group_names(names: tuple[str, ...]) -> str:
    """Names to show: the first ones, and how many more there are."""
    shown = ", ".join(names[:_MOST_NAMES])
    more = len(names) - _MOST_NAMES
    return f"{shown} and {more} more" if more > 0 else shown
