"""One device of a shorthand, as it is written: 'A100-80GB', 'cpu#0-64MB', 'cuda:0#1-8GB'.

The grammar stands in docs/clusters.md. What the name of a kind means is the reader's business: the planner
looks it up among presets, a study among the devices of this machine.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from loadmaster.core.errors import ClusterError
from loadmaster.core.units import parse_bytes

K = TypeVar("K")
_MEMORY = re.compile(r"[0-9]*\.?[0-9]+\s*(?:[kmgt]i?b?|b)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class DeviceWord(Generic[K]):
    """A kind, the number of a logical device, and its memory."""

    kind: K
    number: str = ""  # '' = the whole device
    size: str = ""  # memory as it was typed; '' = what the kind has

    @property
    def memory_bytes(self) -> int | None:
        """The memory that was typed, or None."""
        return parse_bytes(self.size) if self.size else None


def parse_device_word(text: str, find_kind: Callable[[str], K | None]) -> DeviceWord[K] | None:
    """A kind, a number after '#' and a memory after '-' where they are given; None for an unknown kind."""
    head, sharp, tail = text.partition("#")
    if not sharp:
        return parse_sized_kind(text, find_kind)
    number, dash, size = (piece.strip() for piece in tail.partition("-"))
    if not re.fullmatch(r"[0-9]+", number):
        raise ClusterError(f"{text!r}: logical devices are numbered; write for example 'cpu#0-64MB'")
    found = parse_sized_kind(head.strip(), find_kind)
    if found is None:
        return None
    return DeviceWord(found.kind, number, _check_size(size, text) if dash else found.size)


def parse_sized_kind(text: str, find_kind: Callable[[str], K | None]) -> DeviceWord[K] | None:
    """The whole name as a kind, else a kind and its memory after the last '-'."""
    kind = find_kind(text)
    if kind is not None:
        return DeviceWord(kind)
    head, dash, size = text.rpartition("-")
    sized = find_kind(head) if dash else None
    return None if sized is None else DeviceWord(sized, size=_check_size(size, text))


def strip_size(text: str) -> str:
    """The name without a memory after its last '-'; the text itself where there is none."""
    head, dash, size = text.rpartition("-")
    return head if dash and _MEMORY.fullmatch(size.strip()) else text


def _check_size(size: str, text: str) -> str:
    if not _MEMORY.fullmatch(size.strip()):
        raise ClusterError(f"{text!r}: {size!r} is not a memory size; write for example '-16GB' or '-512MiB'")
    if parse_bytes(size) == 0:
        raise ClusterError(f"{text!r}: memory is 0; give the device some, for example '-16GB'")
    return size.strip()
