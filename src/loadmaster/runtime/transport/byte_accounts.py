"""Accounts: counts the bytes of real storages on logical devices, each with a limit.

A storage is counted on the device whose op made it, from then until torch lets go of it, whoever holds it:
your variables, the graph that runs, or autograd. In the forward pass one counter (a dispatch mode) stands
around each op; in the backward pass hooks put it around each of autograd's nodes.

Between its nodes autograd adds up the gradients of a tensor that several ops read (a tied weight, a
residual). While it does, both terms and mostly a new sum stand there; the terms are gone when the next hook
sees the sum. So the hook after a node that brings a second gradient notes what stands there, and whoever
finds a sum in new memory counts it on top of that. What the node itself was given is gone before the sum is
made, but for a gradient that is the first term: what of it dies before the next hook did not stand there.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves

from loadmaster.core.errors import DeviceMemoryError
from loadmaster.core.units import format_apart, format_bytes
from loadmaster.modules.live_storages import LiveStorages
from loadmaster.runtime.transport.devices import RunDevice

NO_DEVICE = -1
_FEW = 3


_SUMS = "loadmaster_sums"


class _Waiting(NamedTuple):
    """A gradient that waits for others: where it came from, and what stood on each device at a second one."""

    term: Any  # what is known of the first term's storage
    stood: list[int]  # empty until there is a second one


_Sums = dict[int, _Waiting]  # input of a node that has a gradient


class _Stored(NamedTuple):
    """One storage."""

    device: int
    num_bytes: int
    what: str


class Accounts:
    """What stands on each device now, and the most that ever stood there."""

    def __init__(self, devices: Sequence[RunDevice]) -> None:
        self.devices = tuple(devices)
        self.live_bytes = [0] * len(devices)
        self.peak_bytes = [0] * len(devices)
        self.most_needed_bytes: list[int] | None = None  # [D] where a limit was passed: what stood there then
        self.predicted_bytes: list[int] = []  # [D] peaks of the simulated plan, or empty
        self._storages = LiveStorages[_Stored](self._subtract)
        self._counters = [_Counter(self, at) for at in range(len(devices))]
        self._weight_sums: _Sums = {}  # by the id of a weight
        self._leaving: list[tuple[_Stored, list[int]]] = []  # what a node was given, and what stood

    def owner(self, tensor: torch.Tensor) -> int:
        """The device that a tensor's storage is counted on, or NO_DEVICE."""
        known = self._storages.get(tensor.untyped_storage())
        return NO_DEVICE if known is None else known.device

    def list_standing(self, device: int) -> list[tuple[str, int]]:
        """What stands on a device and its bytes, the largest first."""
        found: dict[str, int] = {}
        for stored in self._storages.facts():
            if stored.device == device:
                found[stored.what] = found.get(stored.what, 0) + stored.num_bytes
        return sorted(found.items(), key=lambda item: -item[1])

    def add(self, tree: Any, device: int, what: str) -> None:
        """Count the storages that nobody counts yet; raises where they are too much."""
        for tensor in _list_tensors(tree):
            self._add(tensor, device, what)

    def move(self, tensor: torch.Tensor, device: int) -> None:
        """A storage is counted on another device from now on."""
        self._storages.drop(tensor.untyped_storage())
        self._add(tensor, device, "a weight")

    @contextmanager
    def running(self, device: int, what: str) -> Iterator[None]:
        """What is made is counted on a device."""
        counter = self._counters[device]
        before, counter.what = counter.what, what
        try:
            with counter:
                yield
        finally:
            counter.what = before

    def watch_backward(self, tree: Any, device: int, what: str, known: set[Any]) -> None:
        """What autograd's new nodes behind these outputs will make is counted on a device."""
        waiting = [tensor.grad_fn for tensor in _list_tensors(tree)]
        while waiting:
            node = waiting.pop()
            if node is None or node in known:
                continue
            known.add(node)
            waiting += [behind for behind, _ in node.next_functions]
            if node.name() != "torch::autograd::AccumulateGrad":  # weights have a hook of their own
                self._hook(node, device, f"the backward of {what}")

    def _hook(self, node: Any, device: int, what: str) -> None:
        counter = self._counters[device]

        behind = [(_sums_of(one), one, at) for one, at in node.next_functions if one is not None]
        places = [at for at, (one, _) in enumerate(node.next_functions) if one is not None]
        sums = _sums_of(node)

        def before(grads: Any) -> None:
            for at, grad in enumerate(grads):
                self._add_sum(grad, sums.pop(at, None), device, what)
            self._leaving = []
            counter.what = what
            _push_mode(counter)  # if the node raises, autograd restores the modes of its thread

        def after(made: Any, given: Any) -> None:
            _pop_mode()
            self.add(made, device, what)
            self._leaving = []
            for (later, target, at), place in zip(behind, places, strict=True):
                if made[place] is not None:
                    self._note_gradient(later, target, at, made[place], given)

        node.register_prehook(before)
        node.register_hook(after)

    def add_gradient(self, weight: torch.Tensor, device: int, what: str) -> None:
        """The gradient of a weight, which may be a sum."""
        self._add_sum(weight.grad, self._weight_sums.pop(id(weight), None), device, what)

    def _add_sum(self, grad: Any, waiting: _Waiting | None, device: int, what: str) -> None:
        """A gradient that arrives; in new memory it is a sum, made while what was noted still stood there."""
        if not isinstance(grad, torch.Tensor):
            return
        is_new = grad.layout == torch.strided and grad.untyped_storage() not in self._storages
        self.add(grad, device, what)
        if waiting is not None and waiting.stood and is_new and self.owner(grad) == device:
            most = waiting.stood[device] + grad.untyped_storage().nbytes()
            self.peak_bytes[device] = max(self.peak_bytes[device], most)

    def _note_gradient(self, sums: _Sums, target: Any, at: int, made: torch.Tensor, given: Any) -> None:
        """An input of a later node has a gradient; what stands there now, where it is not the first."""
        if hasattr(target, "variable"):  # a weight: its gradient is counted when it has it
            sums, at = self._weight_sums, id(target.variable)
        if at not in sums:
            sums[at] = _Waiting(self._storages.get(made.untyped_storage()), [])
            return
        stood = list(self.live_bytes)
        stays = (sums[at].term, self._storages.get(made.untyped_storage()))
        for grad in _list_tensors(given):
            stored = self._storages.get(grad.untyped_storage())
            if stored is not None and not any(stored is one for one in stays):
                self._leaving.append((stored, stood))
        sums[at] = _Waiting(sums[at].term, stood)

    def _add(self, tensor: torch.Tensor, device: int, what: str) -> None:
        if tensor.layout != torch.strided or tensor.device.type != self.devices[device].where.type:
            return  # pinned memory that a copy passes through is no device's own
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if storage in self._storages or not size:
            return
        self._storages.add(storage, _Stored(device, size, what))
        self.live_bytes[device] += size
        if self.live_bytes[device] > self.devices[device].limit_bytes:
            raise self._memory_error(device, size, what)
        self.peak_bytes[device] = max(self.peak_bytes[device], self.live_bytes[device])

    def _subtract(self, stored: _Stored) -> None:
        self.live_bytes[stored.device] -= stored.num_bytes
        for leaving, stood in self._leaving:
            if leaving is stored:
                stood[stored.device] -= stored.num_bytes

    def _memory_error(self, device: int, size: int, what: str) -> DeviceMemoryError:
        at, live = self.devices[device], self.live_bytes[device]
        known = self.most_needed_bytes or [0] * len(self.devices)
        self.most_needed_bytes = [max(one, self.peak_bytes[d]) for d, one in enumerate(known)]
        self.most_needed_bytes[device] = max(known[device], live)
        predicted = ""
        if self.predicted_bytes:
            predicted = f" (predicted peak {format_bytes(self.predicted_bytes[device])})"
        needed, there = format_apart(live, at.limit_bytes)
        return DeviceMemoryError(
            f"{at.name} needs {needed} of {there}{predicted}: {what} takes"
            f" {format_bytes(size)}, beside {self._describe_largest(device, what)};"
            " give it more memory, add a device, or use a smaller batch"
            " (placed.plan_that_fits() is the nearest plan that leaves room)"
        )

    def _describe_largest(self, device: int, what: str) -> str:
        """What else takes most there."""
        others = [(name, num_bytes) for name, num_bytes in self.list_standing(device) if name != what]
        words = [f"{name} {format_bytes(num_bytes)}" for name, num_bytes in others[:_FEW]]
        return ", ".join(words) + (f" and {len(others) - _FEW} more" if len(others) > _FEW else "")


class _Counter(TorchDispatchMode):
    """Counts on one device what ops make."""

    def __init__(self, accounts: Accounts, device: int) -> None:
        super().__init__()
        self.what = ""
        self._accounts, self._device = accounts, device

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the guard against it costs as much as an op

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op and count what it made."""
        out = func(*args, **(kwargs or {}))
        self._accounts.add(out, self._device, self.what)
        return out


def _sums_of(node: Any) -> _Sums:
    """What is noted of a node's inputs; it lives as long as the node, and no hook holds the node itself."""
    found: _Sums = node.metadata.setdefault(_SUMS, {})
    return found


def _list_tensors(tree: Any) -> Sequence[torch.Tensor]:
    """The tensors of a tree; most ops make one, and looking through a tree costs as much as a small op."""
    if isinstance(tree, torch.Tensor):
        return (tree,)
    if type(tree) is tuple:  # gradients
        return [tensor for item in tree if item is not None for tensor in _list_tensors(item)]
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
