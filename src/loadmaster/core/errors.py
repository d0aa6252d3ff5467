"""Every error Loadmaster raises on purpose, in one tree.

A message says what is wrong, gives both values, and says what to do. The command line
turns any `LoadmasterError` into one line on stderr and exit code 2; "searched and found
nothing" is not an error but a `Status`.
"""

import difflib
from collections.abc import Iterable

_LONGEST_GUESS = 100
_MOST_LISTED = 40
_FEW = 5


class LoadmasterError(Exception):
    """Base class of all errors that are caused by user input. The message says what to change."""


class InputError(LoadmasterError, ValueError):
    """A value is wrong: the root of the errors below."""


class GraphError(InputError):
    """A graph breaks one of its invariants."""


class ClusterError(InputError):
    """A cluster breaks one of its invariants."""


class CostError(InputError):
    """A cost is negative, missing or not a number."""


class ProblemError(InputError):
    """Graph, cluster, costs or pins do not belong together."""


class PlanError(InputError):
    """A plan cannot be used with its problem."""


class RunError(LoadmasterError, RuntimeError):
    """A plan that is running cannot go on."""


class DeviceMemoryError(RunError):
    """A device would hold more than its limit."""


class LossError(RunError):
    """A loss is not a number."""


class VerifyError(RunError):
    """A placed model gives other numbers than the model itself."""


class FileError(InputError):
    """A file cannot be read or written."""


class FormatError(FileError):
    """A file's content is not what its format says."""


class SchemaError(FormatError):
    """A file was written under another schema version, or holds another noun."""


class UnknownNameError(InputError):
    """A name is not among the known ones; the message offers the nearest, or some of those there are."""

    def __init__(self, what: str, name: str, known: Iterable[str], *, see: str = "") -> None:
        """`see` says what lists the known names."""
        choices = sorted(set(known) - {""})
        lowered = {choice.lower(): choice for choice in choices if len(choice) <= _LONGEST_GUESS}
        asked = name[: 2 * _LONGEST_GUESS].lower()  # the search is quadratic in the length of a name
        near = [choice for choice in lowered if asked and choice.startswith(asked)][:_FEW]
        if len(near) < 2:
            near = difflib.get_close_matches(asked, lowered, n=1, cutoff=0.5)
        hint = f"did you mean {' or '.join(repr(lowered[name]) for name in near)}? " if near else ""
        if not near or len(choices) <= _FEW:  # of two words, the nearest may be far
            hint += f"known: {_format_choices(choices)}"
        super().__init__(f"unknown {what} {name!r}; {hint.strip()}{f' ({see})' if see else ''}")


def _format_choices(choices: list[str]) -> str:
    """The choices, or the first of very many."""
    shown = ", ".join(choices[:_MOST_LISTED])
    more = len(choices) - _MOST_LISTED
    return f"{shown} and {more} more" if more > 0 else shown
