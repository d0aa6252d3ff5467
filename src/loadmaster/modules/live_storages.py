"""Storages that are alive: what is known of each, from when it is noted until torch lets go of it.

A storage is alive as long as anyone holds a tensor on it: a variable, a graph that runs, or autograd. Views
share their base's storage, so it is storages that are counted, not tensors.
"""

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Facts = TypeVar("Facts")


class LiveStorages(Generic[Facts]):
    """Facts of storages; those of one that dies, or is dropped, are handed to `on_gone`."""

    def __init__(self, on_gone: Callable[[Facts], None]) -> None:
        self._on_gone = on_gone
        self._known: dict[int, tuple[Facts, Any]] = {}  # address -> facts, weak reference

    def __contains__(self, storage: Any) -> bool:
        """Whether a storage is noted."""
        return storage._cdata in self._known

    def get(self, storage: Any) -> Facts | None:
        """The facts of a storage, None = nobody noted it."""
        known = self._known.get(storage._cdata)
        return None if known is None else known[0]

    def facts(self) -> list[Facts]:
        """Those of all storages, in the order in which they were noted."""
        return [facts for facts, _ in self._known.values()]

    def add(self, storage: Any, facts: Facts) -> None:
        """Note a storage; facts noted before are replaced."""
        address = storage._cdata
        self._known[address] = facts, weakref.ref(storage, lambda _: self._remove(address))

    def drop(self, storage: Any) -> None:
        """Forget a storage as if it had died."""
        self._remove(storage._cdata)

    def _remove(self, address: int) -> None:
        known = self._known.pop(address, None)
        if known is not None:
            self._on_gone(known[0])


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors made while it is on: now, and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now_bytes = self.peak_bytes = 0
        self._storages = LiveStorages[int](self._subtract)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op, then count what it made."""
        given = {storage._cdata for storage in _list_storages((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for storage in _list_storages(out):
            if storage._cdata not in given and storage not in self._storages:
                self.note(storage)
        return out

    def note(self, storage: Any) -> None:
        """Count a tensor's memory until it dies."""
        size = int(storage.nbytes())
        self._storages.add(storage, size)
        self.now_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def _subtract(self, size: int) -> None:
        self.now_bytes -= size


def count_storage_bytes(tree: Any) -> int:
    """Bytes of the distinct storages of the tensors in a tree."""
    return sum({storage._cdata: storage.nbytes() for storage in _list_storages(tree)}.values())


def _list_storages(tree: Any) -> list[Any]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
