"""What the readers of record-per-op JSON share: decoding, keys, names, groups, whole bytes."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from loadmaster.core.errors import FormatError, GraphError
from loadmaster.core.graph import NO_GROUP

T = TypeVar("T")

REF_FLOPS_PER_S = 1e12  # a given time becomes flops at this rate, the preset `ref`
_BEGINNING_BYTES = 4096
_KEY = re.compile(rb'"([A-Za-z_]+)"\s*:')
_BYTE = re.compile(r"\(byte (\d+)\)")


def decode(data: bytes, kind: type[T], *, what: str) -> T:
    """The JSON of `data` as `kind`; anything else is a FormatError with the path of the problem."""
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError:
        raise FormatError(f"not {what}: the JSON is nested too deep; no such file nests at all") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise FormatError(f"not {what}: {problem}{_text_near_error(data, str(problem))}") from None


def _text_near_error(data: bytes, message: str) -> str:
    """The bytes around a malformed place, for a person to look for."""
    match = _BYTE.search(message)
    if match is None:
        return ""
    at = int(match[1])
    near = data[max(0, at - 16) : at + 16]
    hint = "; NaN and Infinity are not JSON, use finite numbers" if re.search(rb"nan|inf", near, re.I) else ""
    return f" near {near!r}{hint}"


def top_keys(data: bytes) -> frozenset[str]:
    """The keys of a JSON object, or of the beginning of a damaged one; empty for anything else."""
    if data[:64].lstrip()[:1] != b"{":
        return frozenset()
    try:
        return frozenset(msgspec.json.decode(data, type=dict[str, msgspec.Raw]))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return frozenset(match.decode() for match in _KEY.findall(data[:_BEGINNING_BYTES]))


def unique_names(names: Sequence[str], ids: Iterable[object]) -> list[str]:
    """The names, a repeated one made unique by appending its record's id."""
    taken = set[str]()
    result = []
    for name, own_id in zip(names, ids, strict=True):
        unique = name
        while unique in taken:
            unique = f"{unique}#{own_id}"
        taken.add(unique)
        result.append(unique)
    return result


def group_ids(classes: Sequence[int | str | None]) -> list[int]:
    """Group of each op: its class where all classes are int32 >= 0, else numbered as they appear."""
    given = [value for value in classes if value is not None]
    if all(isinstance(value, int) and 0 <= value < 2**31 - 1 for value in given):
        return [NO_GROUP if value is None else int(value) for value in classes]
    number = {value: at for at, value in enumerate(dict.fromkeys(given))}
    return [NO_GROUP if value is None else number[value] for value in classes]


def whole_bytes(value: float, label: str) -> int:
    """Bytes from any JSON number, a fraction rounded up; negative or too many is an error."""
    if not 0 <= value < 2**63:
        raise GraphError(f"{label} is {value}; bytes are a finite number >= 0 and < 2**63")
    return value if isinstance(value, int) else math.ceil(value)
