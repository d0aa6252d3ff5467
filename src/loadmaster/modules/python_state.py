"""What modules keep in Python (counters, lists, tables), put back after a run that must leave no trace.

Attributes of modules and of plain objects they hold, the contents of lists, dicts, sets, deques and arrays,
the values of tensors that are attributes, and the states of generators: all are put back in place, so whoever
shares one sees it, too. Not put back is what only compiled code can see, globals, and what closures hold.
"""

import operator
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

Table = tuple[dict[str, Any], dict[str, Any]]  # the attributes of a module, and what they were
_MOST = 100_000  # objects: what is behind them stays as it is
_LARGEST = 1 << 22  # elements of a tensor that is copied
_TABLES = ("_parameters", "_buffers")  # whose tensors others put back
_LONGEST = 10_000  # entries of a container that is copied before every call
_OF_OTHERS = ("threading", "queue", "multiprocessing", "logging", "concurrent", "asyncio", "socket", "io")
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_CONTAINERS = (list, deque, set, dict)
_OF_MODULES = frozenset(vars(nn.Module()))  # what every module has
_OPAQUE = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, str, bytes, int, float, complex)


@contextmanager
def preserve_state(modules: Iterable[Any]) -> Iterator[None]:
    """Whatever happens inside, these modules' Python state comes out as it went in."""
    undo = _collect_undo(modules)
    try:
        yield
    finally:
        with torch.no_grad():
            for act in undo:
                act()


@contextmanager
def preserve_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Whatever is written to these modules' buffers inside, they come out with the values they had."""
    buffers = {
        id(buffer): buffer for module in modules for buffer in module._buffers.values() if buffer is not None
    }
    kept = [(one, one._version, one.detach().clone()) for one in buffers.values() if not one.is_meta]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, version, value in kept:
                if buffer._version != version:
                    buffer.copy_(value)


def differs(table: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether an attribute was set to another object, made or taken away."""
    return table.keys() != before.keys() or any(table[name] is not value for name, value in before.items())


@contextmanager
def swap_attributes(tables: list[Table]) -> Iterator[None]:
    """Attributes as they were, for a while; afterwards as they are now."""
    now = [(table, dict(table)) for table, _ in tables]
    try:
        for table, before in tables:
            table.clear()
            table.update(before)
        yield
    finally:
        for table, after in now:
            table.clear()
            table.update(after)


def list_held(modules: Iterable[nn.Module]) -> list[Any]:
    """What modules keep beside tensors and modules, however deep: containers, arrays, tables of objects."""
    values = (value for each in modules for name, value in vars(each).items() if name not in _OF_MODULES)
    found: dict[int, Any] = {}
    for each in _iter_reachable(values, with_modules=False):
        table = each if isinstance(each, (*_CONTAINERS, np.ndarray)) else getattr(each, "__dict__", None)
        if not isinstance(table, (*_CONTAINERS, np.ndarray)) or isinstance(each, torch.Tensor):
            continue
        if len(table) <= _LONGEST if not isinstance(table, np.ndarray) else table.size <= _LARGEST:
            found[id(table)] = table
    return list(found.values())


def copy_contents(held: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Containers and arrays beside what is in them now."""
    return [(each, _copy_container(each)) for each in held]


def holds_same(container: Any, before: Any) -> bool:
    """Whether nothing was put into a container, or taken out."""
    return _has_same_items(container, before)


def refill(rows: list[tuple[Any, Any]]) -> None:
    """Put back what was in containers."""
    for container, before in rows:
        _fill_container(container, before)


def _fill_container(container: Any, before: Any) -> None:
    if isinstance(container, np.ndarray):
        container[...] = before
        return
    container.clear()
    (container.extend if isinstance(container, list | deque) else container.update)(before)


@contextmanager
def preserve_contents(containers: Iterable[Any]) -> Iterator[None]:
    """Whatever happens inside, these containers hold afterwards what they hold now."""
    undo = [_make_container_undo(each) for each in containers]
    try:
        yield
    finally:
        for act in undo:
            act()


def list_generators(modules: Iterable[nn.Module]) -> list[Any]:
    """Generators that modules hold (torch's, Python's, NumPy's), however deep."""
    values = (value for each in modules for name, value in vars(each).items() if name not in _OF_MODULES)
    return [each for each in _iter_reachable(values, with_modules=False) if isinstance(each, _GENERATORS)]


def capture_generators(generators: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Generators beside their states."""
    return [(each, _get_generator_state(each)) for each in generators]


@contextmanager
def use_generators(rows: list[tuple[Any, Any]]) -> Iterator[None]:
    """Generators in the states beside them, for a while; afterwards as they are now."""
    now = [(each, _get_generator_state(each)) for each, _ in rows]
    try:
        for each, state in rows:
            _set_generator_state(each, state)
        yield
    finally:
        for each, state in now:
            _set_generator_state(each, state)


def _get_generator_state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    with _disable_current_modes():
        return generator.get_state()


def _set_generator_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        with _disable_current_modes():
            generator.set_state(state)


def watch_objects(roots: Iterable[Any], *, with_modules: bool = False) -> Callable[[], bool]:
    """Whether anything was written into some objects, or into what they lead to (modules only on request)."""
    found = list(_iter_reachable(roots, with_modules=with_modules))
    tensors = [
        (each, each._version) for each in found if isinstance(each, torch.Tensor) and not each.is_inference()
    ]
    kinds = (*_CONTAINERS, np.ndarray)
    tables = [each if isinstance(each, kinds) else getattr(each, "__dict__", None) for each in found]
    held = [(each, _copy_container(each)) for each in tables if isinstance(each, kinds)]

    def was_written() -> bool:
        if any(tensor._version != version for tensor, version in tensors):
            return True
        return any(not _has_same_items(table, before) for table, before in held)

    return was_written


def plain_tensors(modules: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Tensors that modules hold beside parameters and buffers."""
    return (each for each in _iter_reachable(modules) if isinstance(each, torch.Tensor))


def _collect_undo(roots: Iterable[Any]) -> list[Callable[[], None]]:
    """How to put back everything that can be reached."""
    undo: list[Callable[[], None]] = []
    for each in _iter_reachable(roots):
        if isinstance(each, _GENERATORS):
            undo.append(partial(_set_generator_state, each, _get_generator_state(each)))
        elif isinstance(each, torch.Tensor):
            act = _make_tensor_undo(each)
            undo.extend([act] if act is not None else [])
        elif isinstance(each, (*_CONTAINERS, np.ndarray)):
            undo.append(_make_container_undo(each))
        elif isinstance(getattr(each, "__dict__", None), dict):
            tables = [vars(each)[name] for name in _TABLES if isinstance(each, nn.Module)]
            undo.extend(_make_container_undo(table) for table in (vars(each), *tables))
    return undo


def _iter_reachable(roots: Iterable[Any], *, with_modules: bool = True) -> Iterator[Any]:
    """All objects behind some, each once; no recursion."""
    waiting = list(roots)
    seen: dict[int, Any] = {}  # kept, so that no other gets its id
    while waiting and len(seen) < _MOST:
        each = waiting.pop()
        if id(each) in seen or _is_opaque(each) or (isinstance(each, nn.Module) and not with_modules):
            continue
        seen[id(each)] = each
        yield each
        waiting.extend(_list_children(each))


def _list_children(each: Any) -> list[Any]:
    if isinstance(each, (torch.Tensor, np.ndarray, *_GENERATORS)):
        return []
    if isinstance(each, list | deque | set | tuple | frozenset):
        return list(each)
    if isinstance(each, dict):
        return list(each.values())
    attributes = getattr(each, "__dict__", None)
    if not isinstance(attributes, dict):
        return []
    return [value for name, value in attributes.items() if name not in _TABLES]


def _make_container_undo(container: Any) -> Callable[[], None]:
    before = _copy_container(container)

    def act() -> None:
        if not _has_same_items(container, before):
            _fill_container(container, before)

    return act


def _copy_container(container: Any) -> Any:
    if isinstance(container, np.ndarray):
        return container.copy()
    return dict(container) if isinstance(container, dict) else list(container)


def _has_same_items(container: Any, before: Any) -> bool:
    if isinstance(container, dict):
        return not differs(container, before) and list(container) == list(before)
    if isinstance(container, set):
        return container == set(before)
    if isinstance(container, np.ndarray):
        return container.tobytes() == before.tobytes()
    return len(container) == len(before) and all(map(operator.is_, container, before))


def _is_opaque(each: Any) -> bool:
    """Numbers, texts and code; and what threads or other processes may be changing meanwhile."""
    if each is None or isinstance(each, _OPAQUE):
        return True
    home = type(each).__module__
    return home.partition(".")[0] in _OF_OTHERS or home.startswith(("torch.utils.data", "torch.distributed"))


def _make_tensor_undo(tensor: torch.Tensor) -> Callable[[], None] | None:
    """A plain tensor (no parameter, nothing of a graph): its value."""
    if tensor.requires_grad or tensor.numel() > _LARGEST or tensor.device.type == "meta":
        return None
    before = tensor.clone()

    def act() -> None:
        if not torch.equal(tensor, before):
            tensor.copy_(before)

    return act
