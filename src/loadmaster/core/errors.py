"""Every error Loadmaster raises on purpose, in one tree.

A message says what is wrong, gives both values, and says what to do. The command line
turns any `LoadmasterError` into one line on stderr and exit code 2; "searched and found
nothing" is not an error but a `Status`.
"""

import difflib
from collections.abc import Iterable


class LoadmasterError(Exception):
    """Something the user gave cannot be used."""


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


class FileError(InputError):
    """A file cannot be read or written."""


class FormatError(FileError):
    """A file's content is not what its format says."""


class SchemaError(FormatError):
    """A file was written under another schema version, or holds another noun."""


class UnknownNameError(InputError):
    """A name is not among the known ones; the message offers the nearest."""

    def __init__(self, what: str, name: str, known: Iterable[str], *, see: str = "") -> None:
        """`see` names the command or page that lists the known names."""
        choices = sorted(known)
        lowered = {choice.lower(): choice for choice in choices}
        near = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.5)
        hint = f"; did you mean {lowered[near[0]]!r}?" if near else f"; known: {', '.join(choices)}"
        super().__init__(f"unknown {what} {name!r}{hint}{f' ({see})' if see else ''}")
