"""Read-only numpy columns: how every noun checks, freezes and digests its fields."""

import dataclasses
import hashlib
from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadmaster.core.errors import InputError

Bools = NDArray[np.bool_]
Bytes8 = NDArray[np.int8]  # small enumerations: phase, dtype, origin, span kind
Ints = NDArray[np.int32]  # indices and counts
Longs = NDArray[np.int64]  # bytes
Floats = NDArray[np.float64]  # seconds, rates, flops


def set_column(
    noun: object, field: str, dtype: type, shape: tuple[int, ...], error: type[InputError]
) -> None:
    """Replace `field` of a noun under construction by a checked read-only array.

    A writable array of the caller's is copied, never frozen in place. -1 in `shape` is any length.
    """
    given = getattr(noun, field)
    label = f"{type(noun).__name__}.{field}"
    try:
        array = np.asarray(given)
        if array.dtype != dtype:
            array = _convert_dtype(array, np.dtype(dtype), label, error)
    except (TypeError, ValueError, OverflowError) as problem:
        if isinstance(problem, InputError):
            raise
        raise error(f"{label}: {problem}; give numbers of one kind") from None
    if array.size == 0 and 0 in shape:
        array = array.reshape(shape)
    wanted = tuple(have if want == -1 else want for want, have in zip(shape, array.shape, strict=False))
    if array.ndim != len(shape) or array.shape != wanted:
        raise error(f"{label} has shape {list(array.shape)}, needs {list(shape)}")
    if array.flags.writeable or not array.flags.c_contiguous:
        array = np.array(array, order="C")
        array.flags.writeable = False
    object.__setattr__(noun, field, array)


def _convert_dtype(
    array: NDArray[Any], dtype: np.dtype[Any], label: str, error: type[InputError]
) -> NDArray[Any]:
    """`array` as `dtype`, refused where that would change a value."""
    if array.size == 0:
        return array.astype(dtype)
    if array.dtype.kind not in "buif":
        raise error(f"{label}: {array.reshape(-1)[0]!r} is not a number")
    if dtype.kind in "iu" and array.dtype.kind == "f":
        if not np.isfinite(array).all():
            raise error(f"{label}: {array[~np.isfinite(array)][0]} is not a finite number")
        if (array != np.rint(array)).any():
            raise error(f"{label}: {array[array != np.rint(array)][0]} is not a whole number")
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if array.min() < limits.min or array.max() > limits.max or float(array.max()) >= 2.0**63:
            raise error(f"{label}: {array.max()} is outside {limits.min}..{limits.max}")
    if dtype.kind == "b" and not np.isin(array, (0, 1)).all():
        raise error(f"{label}: needs true or false")
    return array.astype(dtype)


def set_names(noun: object, field: str, length: int, error: type[InputError]) -> None:
    """Replace `field` by a tuple of str of that length (-1: any)."""
    given: Sequence[str] = getattr(noun, field)
    values = given if isinstance(given, tuple) else tuple(given)
    label = f"{type(noun).__name__}.{field}"
    if length != -1 and len(values) != length:
        raise error(f"{label} has {len(values)} names, needs {length}")
    if not all(issubclass(kind, str) for kind in set(map(type, values))):
        raise error(f"{label} holds something that is not text")
    object.__setattr__(noun, field, values)


def require_unique(values: tuple[str, ...], what: str, error: type[InputError]) -> None:
    """Refuse a repeated name, naming it."""
    if len(set(values)) != len(values):
        seen: set[str] = set()
        for value in values:
            if value in seen:
                raise error(f"duplicate {what} {value!r}; every {what} needs a unique name")
            seen.add(value)


def require_finite(array: Floats, label: str, error: type[InputError], *, least: float = 0.0) -> None:
    """Refuse NaN, infinity and values under `least`, naming the first."""
    if array.size == 0 or (array.min() >= least and array.max() < np.inf):  # NaN fails both
        return
    bad = ~np.isfinite(array) | (array < least)
    if bad.any():
        where = int(np.flatnonzero(bad.reshape(-1))[0])
        value = array.reshape(-1)[where]
        raise error(f"{label}: {value} at position {where}; needs a finite number >= {least:g}")


def require_range(array: NDArray[Any], low: int, high: int, label: str, error: type[InputError]) -> None:
    """Refuse indices outside low..high-1, naming the first."""
    if array.size and (array.min() < low or array.max() >= high):
        where = int(np.flatnonzero((array < low) | (array >= high))[0])
        raise error(f"{label}: {array.reshape(-1)[where]} at position {where}; needs {low}..{high - 1}")


def content_digest(noun: Any, *, leave_out: tuple[str, ...] = ()) -> str:
    """SHA-256 over every field but `name` and those to `leave_out`, in field order.

    A field that is empty unless somebody fills it is left out while it is: files from before there was such
    a field keep their digests.
    """
    sha = hashlib.sha256(type(noun).__name__.encode())
    for field in dataclasses.fields(noun):
        unfilled = field.default == () and getattr(noun, field.name) == ()
        if field.name not in ("name", *leave_out) and not unfilled:
            sha.update(f"\0{field.name}\0".encode())
            _feed_digest(sha, getattr(noun, field.name))
    return sha.hexdigest()


def _feed_digest(sha: Any, value: object) -> None:
    if isinstance(value, np.ndarray):
        sha.update(f"{value.dtype.str}{value.shape}".encode())
        sha.update(np.ascontiguousarray(value).data)
    elif isinstance(value, tuple):
        sha.update(f"{len(value)}".encode())
        if value and isinstance(value[0], str):
            sha.update("\0".join(map(prefix_length, value)).encode("utf-8", "surrogatepass"))
        else:
            for part in value:
                _feed_digest(sha, part)
    elif isinstance(value, Enum):
        sha.update(repr(value.value).encode())
    elif dataclasses.is_dataclass(value):
        sha.update(content_digest(value).encode())
    else:
        sha.update(repr(value).encode())


def prefix_length(text: str) -> str:
    """Text that cannot be confused with its neighbours in a digest."""
    return f"{len(text)}:{text}"


def sorted_unique(keys: Longs) -> Longs:
    """Sorted distinct values (numpy's own `unique` is tens of times slower on large integer columns)."""
    if len(keys) == 0:
        return keys
    ordered = np.sort(keys)
    fresh: Bools = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    return ordered[fresh]


def offsets(keys: Ints, count: int) -> Ints:
    """CSR row pointer [count + 1] of keys in 0..count-1 (the rows of a stable argsort of keys)."""
    pointer = np.zeros(count + 1, dtype=np.int32)
    np.cumsum(np.bincount(keys, minlength=count), out=pointer[1:])
    return pointer
