"""Library objects: what an object of Python's own library holds, as values that can be compared later.

`python_reads` follows objects of the user's own by the names in the code that ran. Code of the standard
library is not written down, so what its objects hold is read here: by kind where the value is not an
attribute (a context variable, an array, a weak reference), else all attributes.
"""

import collections
import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

Fetch = Callable[[], Sequence[Any]]
_GONE = object()  # stands for a value that is not there
_MOST_BYTES = 4096
# kinds whose attributes change by being used, or that hold nothing a forward computes with
_PASSED = frozenset(("_io", "_thread", "inspect", "logging", "re", "threading", "types", "warnings"))
_NO_STATE = frozenset(("abc", "builtins", "enum", "typing"))  # bases that hold nothing


def is_library_kind(kind: type) -> bool:
    """Whether a class has a base in the library that keeps something for it."""
    return any(home in sys.stdlib_module_names and home not in _NO_STATE for home in _list_homes(kind))


def make_fetch(value: object, most: int) -> Fetch | None:
    """What gives the values that a library's object holds, None = nothing to watch.

    Containers of more than `most` values give their length only. Nothing that is referred to weakly is held.
    """
    if isinstance(value, ContextVar):
        return lambda: (value.get(_GONE),)
    if isinstance(value, threading.local):
        return lambda: [*vars(value).keys(), *vars(value).values()]
    if isinstance(value, weakref.ref):
        return lambda: (value() is None,)
    if isinstance(value, weakref.WeakSet | weakref.WeakValueDictionary):
        return lambda: (len(value),)
    if isinstance(value, weakref.WeakKeyDictionary):
        return _limit_fetch(value, lambda: [*map(id, value.keys()), *value.values()], most)
    if isinstance(value, types.FunctionType):  # of functools.singledispatch
        registry = getattr(value, "registry", None)
        return make_fetch(registry, most) if isinstance(registry, Mapping) else None
    if isinstance(value, Mapping):
        return _limit_fetch(value, lambda: [*value.keys(), *value.values()], most)
    if isinstance(value, collections.UserList | collections.UserString):
        return _limit_fetch(value, lambda: list(value), most)
    return _fetch_bytes(value) or _fetch_attributes(value)


def _limit_fetch(value: Any, fetch: Fetch, most: int) -> Fetch:
    return fetch if len(value) <= most else lambda: (len(value),)


def _fetch_bytes(value: Any) -> Fetch | None:
    """Of what lays its memory open: arrays, byte arrays, values of ctypes."""
    try:
        size = memoryview(value).nbytes
    except TypeError:
        return None
    if isinstance(value, bytes):
        return None
    return (lambda: (bytes(value),)) if size <= _MOST_BYTES else (lambda: (memoryview(value).nbytes,))


def _fetch_attributes(value: Any) -> Fetch | None:
    if isinstance(value, functools.partialmethod):
        return lambda: (value.func, value.args, value.keywords)
    table = getattr(value, "__dict__", None)
    if not isinstance(table, dict) or not _PASSED.isdisjoint(_list_homes(type(value))):
        return None
    return lambda: [*table.keys(), *table.values()]


def _list_homes(kind: type) -> list[str]:
    """The top packages of a class and of those behind it."""
    return [(one.__module__ or "").partition(".")[0] for one in kind.__mro__]
