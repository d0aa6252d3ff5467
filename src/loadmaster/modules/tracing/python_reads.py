"""Reads: the Python that a forward ran, and every value that this Python could have read.

A graph holds what `forward` did with the functions, classes, globals, closures and objects it found. While a
graph is made, the code that runs is written down; then all that this code can reach by the names in it is
watched: another function of that name, another default argument, another value in an object. Before a graph
runs, `Reads.find_change` says what is no longer as it was. It compares identities first, a table at a time,
so a call at which nothing has changed costs a few nanoseconds for each value.

Not reached: what compiled code holds, files, the clock, and what lies in a container of more than `_MOST`.
"""

import builtins
import dis
import functools
import gc
import operator
import os
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributions import Distribution

from loadmaster.modules.tracing.library_objects import is_library_kind, make_fetch

_PLAIN = frozenset((int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device))
_MOST = 256  # values of a container, and elements of an array, that are watched one by one
_GONE = object()  # stands for a name that a table does not have
_CALLS = frozenset(
    ("forward", "__call__", "_call_impl", "_wrapped_call_impl", "__getattr__", "__getattribute__", "__new__")
)
_ALWAYS = ("torch.nn.modules.", "torch.nn.functional", "torch.nn.utils.")  # of torch, what models are made of
_NEVER = ("torch", "numpy", "sympy", "loadmaster.runtime", "loadmaster.modules", "loadmaster.graph")
_DRAWS = (random.Random, np.random.Generator, np.random.RandomState)
_SEQUENCES = (list, tuple, set, frozenset, deque)
_KEPT_APART = frozenset(vars(nn.Module()))  # of every module: what the engine looks at itself
Code = dict[types.CodeType, dict[str, Any]]  # what ran, and its globals


def _belongs_to_model(module: str) -> bool:
    """Whether code or a class of a Python module is the model's, and not of what models are run by."""
    if module.startswith(_ALWAYS):
        return True
    top = module.partition(".")[0]
    return not (top in _NEVER or module.startswith(_NEVER[3:]) or top in sys.stdlib_module_names)


def _is_collecting(frame: types.FrameType | None) -> bool:
    """Whether code runs because memory is freed, which may happen at any moment and is nobody's forward."""
    callbacks = {getattr(one, "__code__", None) for one in gc.callbacks}
    while frame is not None:
        code = frame.f_code
        finalizes = code.co_name == "__call__" and frame.f_globals.get("__name__") == "weakref"
        if finalizes or code.co_name == "__del__" or code in callbacks:
            return True
        frame = frame.f_back
    return False


@contextmanager
def follow_code(setters: Mapping[types.CodeType, str]) -> Iterator[tuple[Code, set[str]]]:
    """Write down the code of the model's that runs meanwhile, and which of `setters` are called."""
    found: Code = {}
    called_setters: set[str] = set()
    known: dict[types.CodeType, bool] = {}
    before = sys.gettrace()

    def note_call(frame: types.FrameType, event: Any, arg: Any) -> Any:
        code = frame.f_code
        if code in setters:
            called_setters.add(setters[code])
        if code not in known and not _is_collecting(frame):
            known[code] = _belongs_to_model(frame.f_globals.get("__name__") or "")
            if known[code]:
                found[code] = frame.f_globals
        return before(frame, event, arg) if before is not None else None

    sys.settrace(note_call)
    try:
        yield found, called_setters
    finally:
        sys.settrace(before)


@dataclass(slots=True)
class _Table:
    """Values that are fetched together, and what they were."""

    fetch: Callable[[], Sequence[Any]]
    names: Callable[[int], str]
    seen: list[Any]

    def find_change(self) -> str:
        """The name of a value that is another, '' = none is."""
        now = self.fetch()
        if len(now) == len(self.seen) and all(map(operator.is_, now, self.seen)):
            return ""
        if len(now) != len(self.seen):
            return self.names(min(len(now), len(self.seen)))
        for at, (one, other) in enumerate(zip(now, self.seen, strict=True)):
            if one is not other and not _is_same_value(one, other):
                return self.names(at)
        self.seen = list(now)  # equal, but other objects: the next look is a short one
        return ""


@dataclass(slots=True)
class Reads:
    """What the Python of a graph could read when the graph was made."""

    tables: list[_Table] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)  # found outside of the model's own tables
    sources: list[str] = field(default_factory=list)  # what gives another value each time it is asked
    writes: bool = False  # whether the code may change what is watched

    def find_change(self) -> str:
        """The name of something that is no longer as it was, '' = all is."""
        for table in self.tables:
            found = table.find_change()
            if found:
                return found
        return ""


def collect_reads(modules: Iterable[nn.Module], code: Code, ours: frozenset[str] = frozenset()) -> Reads:
    """All that `code`, run by these modules, can reach; `ours` of the first are not the model's."""
    walk = _Walk(code, list(modules))
    for module in walk.modules:
        walk.add_module(module, ours)
        ours = frozenset()
    walk.add_code(code)
    walk.follow()
    found = walk.reads
    found.writes = any(_may_write(one, scope) for one, scope in code.items())
    return found


def _is_same_value(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, float | complex):
        return repr(one) == repr(other)  # not a number is itself; 0.0 is not -0.0
    return (type(one) in _PLAIN or isinstance(one, np.generic)) and bool(one == other)


_STORES = ("STORE_ATTR", "STORE_GLOBAL", "STORE_SUBSCR", "STORE_DEREF", "DELETE_ATTR", "DELETE_SUBSCR")
_CHANGES = frozenset(
    ("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft")
) | {"remove", "reverse", "rotate", "setattr", "setdefault", "sort", "update", "__setattr__", "__setitem__"}


def _may_write(code: types.CodeType, scope: dict[str, Any]) -> bool:
    """Whether code may change an object; that of torch and `transformers` keeps to its modules."""
    if (scope.get("__name__") or "").partition(".")[0] in ("torch", "transformers"):
        return False
    return not _CHANGES.isdisjoint(code.co_names) or any(
        one.opname in _STORES for one in dis.get_instructions(code)
    )


def _find_functions(code: Code) -> list[types.FunctionType]:
    """Every function of this code, among those that share its globals: few to ask the collector for."""
    scopes = {id(scope): scope for scope in code.values()}
    known = set(map(id, code))
    return [
        one
        for one in gc.get_referrers(*scopes.values())
        if type(one) is types.FunctionType and id(one.__code__) in known
    ]


class _Walk:
    """Goes from modules, functions and globals to all that is reached by a name in the code."""

    def __init__(self, code: Code, modules: list[nn.Module]) -> None:
        self.modules, self.reads = modules, Reads()
        self._names = {name for one in code for name in _names_in(one)} | {"__defaults__", "__kwdefaults__"}
        self._own = set(map(id, modules))
        self._known: dict[int, Any] = {}  # held, so that no other object gets its identity
        self._waiting: list[tuple[str, Any]] = []
        self._globals: dict[int, tuple[dict[str, Any], dict[str, None]]] = {}
        self._code = set(code)
        self._classes: dict[type, set[str]] = {}  # names that are watched there

    def add_module(self, module: nn.Module, ours: frozenset[str]) -> None:
        """What a module of the model holds; its plain values and its children are looked at by the engine."""
        self._add_class(type(module))
        table, torchs = vars(module), type(module).__module__.startswith("torch.nn.")
        names = [
            name
            for name, value in table.items()
            if name not in _KEPT_APART and name not in ours and type(value) not in _PLAIN
        ]
        names = [name for name in names if not torchs or name == "forward"]
        self._watch_names(type(module).__name__, table, names)

    def add_code(self, code: Code) -> None:
        """Globals that the code names, and defaults and closures of its functions."""
        for one, scope in code.items():
            self._add_globals(scope, one)
        for function in _find_functions(code):
            self._add_function(function)

    def follow(self) -> None:
        """Look at all that waits, and at what is found there."""
        while self._waiting:
            self._look(*self._waiting.pop())
        for scope, names in list(self._globals.values()):
            self._watch_names(str(scope.get("__name__", "a global")), scope, list(names))
        while self._waiting:
            self._look(*self._waiting.pop())

    def _later(self, name: str, value: Any) -> None:
        if value is _GONE or type(value) in _PLAIN or id(value) in self._known or id(value) in self._own:
            return
        self._known[id(value)] = value
        self._waiting.append((name, value))

    def _watch(
        self, fetch: Callable[[], Sequence[Any]], names: Callable[[int], str], *, follow: bool = True
    ) -> None:
        seen = list(fetch())
        self.reads.tables.append(_Table(fetch, names, seen))
        for at, value in enumerate(seen if follow else ()):
            self._later(names(at), value)

    def _watch_names(self, what: str, table: Mapping[str, Any], names: list[str]) -> None:
        """Values of a dict, or of a class's, by name."""
        if names:
            keys = tuple(names)
            self._watch(lambda: list(map(table.get, keys, repeat(_GONE))), _name_by(what, keys))

    def _add_globals(self, scope: dict[str, Any], code: types.CodeType) -> None:
        _, names = self._globals.setdefault(id(scope), (scope, {}))
        names.update(dict.fromkeys(one for one in code.co_names if one in scope or hasattr(builtins, one)))

    def _add_function(self, function: types.FunctionType) -> None:
        self._known[id(function)] = function
        what = function.__qualname__
        cells = function.__closure__ or ()
        free = function.__code__.co_freevars
        names = ("__code__", "__defaults__", "__kwdefaults__", *free)

        def fetch() -> list[Any]:
            return [
                function.__code__, function.__defaults__, function.__kwdefaults__, *map(_content, cells)
            ]  # fmt: skip

        self._watch(fetch, _name_by(what, names))
        if vars(function):
            self._watch_names(what, vars(function), [one for one in vars(function) if one in self._names])

    def _add_static(self, function: Any) -> None:
        """A function whose result is kept: it did not run, so all that it names is looked at."""
        if not isinstance(function, types.FunctionType) or function.__code__ in self._code:
            return
        self._code.add(function.__code__)
        if _belongs_to_model(function.__module__ or ""):
            self._names.update(_names_in(function.__code__))
            self._add_function(function)
            self._add_globals(function.__globals__, function.__code__)
            for name in function.__code__.co_names:
                self._add_static(function.__globals__.get(name))

    def _add_class(self, kind: type) -> None:
        """Names of the code in a class and behind it: also those that a class does not have yet."""
        bases = [one for one in kind.__mro__ if one is nn.Module or _belongs_to_model(one.__module__ or "")]
        named = {name for one in kind.__mro__ for name in vars(one)} & self._names | _CALLS
        for one in bases:
            watched = self._classes.setdefault(one, set())
            self._watch_names(one.__name__, vars(one), sorted(named - watched))
            watched |= named

    def _look(self, name: str, value: Any) -> None:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            self.reads.tensors.append(value)
        elif isinstance(value, np.ndarray):
            if value.size <= _MOST and value.dtype != object:
                self._watch(lambda: (value.dtype.str, str(value.shape), value.tobytes()), lambda _: name)
        elif isinstance(value, dict):
            self._watch_dict(name, value)
        elif isinstance(value, _SEQUENCES):
            self._watch_sequence(name, value)
        elif value is os.environ:
            self._watch_dict("os.environ", os.environ._data)
        else:
            self._look_at_object(name, value, kind)
        if isinstance(value, (dict, *_SEQUENCES)) and kind not in (dict, *_SEQUENCES):
            self._watch_attributes(name, value)

    def _watch_dict(self, name: str, value: dict[Any, Any]) -> None:
        if len(value) > _MOST:
            self._watch(lambda: (len(value),), lambda _: name, follow=False)
            picked = [key for key in value if isinstance(key, str) and key in self._names]
            self._watch_names(name, value, picked)
            return
        self._watch(lambda: [*dict.keys(value), *dict.values(value)], lambda _: name)

    def _watch_sequence(self, name: str, value: Any) -> None:
        if len(value) > _MOST:
            self._watch(lambda: (len(value),), lambda _: name, follow=False)
        else:
            self._watch(lambda: list(value), lambda _: name)

    def _look_at_object(self, name: str, value: Any, kind: type) -> None:
        if isinstance(value, types.ModuleType):
            table = vars(value)
            if value is os and not self._names.isdisjoint(("getenv", "environ")):
                self._later("os.environ", os.environ)
            self._watch_names(value.__name__, table, [one for one in table if one in self._names])
        elif isinstance(value, type):
            if _belongs_to_model(value.__module__ or ""):
                self._add_class(value)
        elif isinstance(value, functools.partial):
            self._watch(lambda: (value.func, value.args, value.keywords), lambda _: name)
        elif isinstance(value, types.MethodType):
            self._watch(lambda: (value.__func__, value.__self__), lambda _: name)
        elif isinstance(value, staticmethod | classmethod):
            self._later(name, value.__func__)
        elif isinstance(value, property):
            self._watch(lambda: (value.fget,), lambda _: name)
        elif hasattr(value, "cache_info") and hasattr(value, "__wrapped__"):
            self._add_static(value.__wrapped__)
        elif isinstance(value, (*_DRAWS, Iterator)):
            if kind.__module__ != "_io" and name.rpartition(".")[2] in self._names:
                self.reads.sources.append(name)
        elif isinstance(value, types.FunctionType) and not hasattr(value, "registry"):
            pass
        elif _belongs_to_model(kind.__module__ or "") or kind in (types.SimpleNamespace,):
            self._watch_attributes(name, value)
        elif not (kind.__module__ or "").startswith(_NEVER) or isinstance(value, Distribution):
            self._watch_library_object(name, value)

    def _watch_library_object(self, name: str, value: Any) -> None:
        """What an object of Python's library holds, whose own code is not written down."""
        fetch = make_fetch(value, _MOST)
        if fetch is not None:
            self._watch(fetch, lambda _: name)
        if isinstance(value, weakref.ref):
            self._later(name, value())

    def _watch_attributes(self, name: str, value: Any) -> None:
        """What the code may ask of an object: attributes of a name in it, of the object and of its class."""
        kind = type(value)
        if kind.__module__ != "types":
            self._add_class(kind)
        if is_library_kind(kind):
            self._watch_library_object(name, value)
        known = {each for one in kind.__mro__ for each in vars(one)}
        if isinstance(value, nn.Module):
            self._watch_module(name, value)
        table = getattr(value, "__dict__", None)
        if isinstance(table, dict):
            self._watch_names(name, table, sorted(one for one in self._names if one in table or one in known))
            self._watch(lambda: (type(value), value.__dict__), lambda _: name, follow=False)
        slots = [one for one in known & self._names if isinstance(getattr(kind, one, None), _SLOT)]
        if slots:
            self._watch(lambda: [getattr(value, one, _GONE) for one in slots], _name_by(name, tuple(slots)))

    def _watch_module(self, name: str, module: nn.Module) -> None:
        """A module that is none of the model's, held by a closure or a list."""
        for each in ("_parameters", "_buffers", "_modules"):
            self._watch_dict(name, vars(module)[each])
        self._watch(lambda: (module.training,), lambda _: f"{name}.training")


_SLOT = types.MemberDescriptorType


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Names in code, and text that may be one (`getattr(self, "scale")`)."""
    yield from code.co_names
    yield from code.co_freevars
    yield from (one for one in code.co_consts if isinstance(one, str) and one.isidentifier())


def _name_by(what: str, names: Sequence[str]) -> Callable[[int], str]:
    return lambda at: f"{what}.{names[at]}" if at < len(names) else what


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return _GONE
