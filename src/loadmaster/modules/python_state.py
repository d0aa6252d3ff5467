"""What modules keep in Python (counters, lists, tables), put back after a run that must leave no trace.

Attributes of modules and of plain objects they hold, the contents of lists, dicts, sets and deques, and the
values of tensors that are attributes: all are put back in place, so whoever shares one sees it, too. Not put
back is what only compiled code can see, globals, and what closures hold.
"""

import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

Table = tuple[dict[str, Any], dict[str, Any]]  # the attributes of a module, and what they were
_MOST = 100_000  # objects: what is behind them stays as it is
_LARGEST = 1 << 22  # elements of a tensor that is copied
_TABLES = ("_parameters", "_buffers")  # whose tensors others put back
_OF_OTHERS = ("threading", "queue", "multiprocessing", "logging", "concurrent", "asyncio", "socket", "io")
_CONTAINERS = (list, deque, set, dict)
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


def copy_contents(tables: Iterable[dict[str, Any]]) -> list[tuple[Any, Any]]:
    """Lists, dicts, sets and deques that attributes hold, beside what is in them now."""
    found = {
        id(value): value
        for table in tables
        for name, value in table.items()
        if isinstance(value, _CONTAINERS) and not name.startswith("_")
    }
    return [(each, _copy_container(each)) for each in found.values()]


def holds_same(container: Any, before: Any) -> bool:
    """Whether nothing was put into a container, or taken out."""
    return _has_same_items(container, before)


def refill(rows: list[tuple[Any, Any]]) -> None:
    """Put back what was in containers."""
    for container, before in rows:
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


def watch_objects(roots: Iterable[Any], *, with_modules: bool = False) -> Callable[[], bool]:
    """Whether anything was written into some objects, or into what they lead to (modules only on request)."""
    found = list(_iter_reachable(roots, with_modules=with_modules))
    tensors = [
        (each, each._version) for each in found if isinstance(each, torch.Tensor) and not each.is_inference()
    ]
    tables = [each if isinstance(each, _CONTAINERS) else getattr(each, "__dict__", None) for each in found]
    held = [(each, _copy_container(each)) for each in tables if isinstance(each, _CONTAINERS)]

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
        if isinstance(each, torch.Tensor):
            act = _make_tensor_undo(each)
            undo.extend([act] if act is not None else [])
        elif isinstance(each, list | deque | set | dict):
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
    if isinstance(each, torch.Tensor):
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
        if _has_same_items(container, before):
            return
        container.clear()
        (container.extend if isinstance(container, list | deque) else container.update)(before)

    return act


def _copy_container(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def _has_same_items(container: Any, before: Any) -> bool:
    if isinstance(container, dict):
        return not differs(container, before) and list(container) == list(before)
    if isinstance(container, set):
        return container == set(before)
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
