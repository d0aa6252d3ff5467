"""Choices: the member of an enumeration that a user named by a word."""

from enum import StrEnum
from typing import TypeVar

from loadmaster.core.errors import UnknownNameError

E = TypeVar("E", bound=StrEnum)


def parse_choice(kind: type[E], value: object) -> E | None:
    """A member of an enumeration by its value; None stays None."""
    if value is None or isinstance(value, kind):
        return value
    known = [member.value for member in kind]
    if value not in known:
        raise UnknownNameError(kind.__name__.lower(), str(value), known)
    return kind(str(value))
