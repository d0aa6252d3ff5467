"""Boundary activations between forward and backward: on the device, or in pinned host memory by need.

An input is laid down after its shard's forward and brought back before its backward; one that no backward
reads, because nothing is trained at or below its shard, is dropped at once.
"""

from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from loadmaster.shards.device.streams import Copy, Device, Event
from loadmaster.shards.model.profile import tree_bytes
from loadmaster.train.execute.units import ForwardRecord


class ActivationOffload:
    """The inputs of one trial's shards; every byte on the device is booked."""

    def __init__(self, device: Device, name: str, *, on_device: bool, lowest: int) -> None:
        """`lowest`: the first shard that runs backward."""
        self._device, self._name, self._on_device, self._lowest = device, name, on_device, lowest
        self._values: dict[int, Any] = {}  # on the device
        self._below: dict[int, tuple[list[torch.Tensor], list[Any], Any, Event]] = {}
        self._rising: dict[int, tuple[Any, Event]] = {}
        self._booked: dict[int, int] = {}
        self._falling: list[tuple[Event, int, list[torch.Tensor]]] = []
        self._spare: dict[Any, list[torch.Tensor]] = {}  # host memory to use again, by form
        self.up_bytes = self.down_bytes = 0

    def keep(self, shard: int, values: list[Any], *, stays: bool) -> list[Any]:
        """The inputs of a shard, from the one before; `stays`: their memory is booked elsewhere."""
        self._release_landed()
        if stays:
            self._booked[shard] = 0
        else:
            self._book(shard, values)
        self._values[shard] = values
        return values

    def leave(self, kind: str, shard: int, records: list[ForwardRecord]) -> None:
        """After a forward it is wanted only by the shard's backward, if it has one; else not any more."""
        if shard == 0:  # the batch itself
            return
        if kind != "F" or shard < self._lowest:
            self._drop(shard)
            return
        for record in records:
            record.value = None
        self._lay_down(shard)

    def recall(self, shard: int, records: list[ForwardRecord]) -> None:
        """Give the inputs back to what backward reads."""
        if shard > 0:
            for record, value in zip(records, self._take_input(shard), strict=True):
                record.value = value

    def prefetch(self, shard: int) -> None:
        """Bring the input of a shard back, ahead of its backward."""
        if shard > max(0, self._lowest - 1):
            self._reach_for(shard)

    def _lay_down(self, shard: int) -> None:
        """It is not wanted for a while."""
        if self._on_device:
            return
        value = self._values.pop(shard)
        leaves, spec = tree_flatten(value)
        sources = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        targets = [self._get_host_buffer(leaf) for leaf in sources]
        copies = [Copy(target, source) for target, source in zip(targets, sources, strict=True)]
        landed = self._device.down(copies, after=[self._device.mark()], label=self._name)
        self.down_bytes += tree_bytes(sources)
        self._below[shard] = (targets, leaves, spec, landed)
        leaves[:] = [None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves]
        self._falling.append((landed, self._booked.pop(shard), sources))

    def _reach_for(self, shard: int) -> None:
        """Send for it, if it is below."""
        if shard not in self._below or shard in self._rising:
            return
        self._release_landed()
        sources, marks, spec, landed = self._below[shard]
        self._book(shard, sources)
        targets = [torch.empty_like(s, device=self._device.torch_device) for s in sources]
        copies = [Copy(target, source) for target, source in zip(targets, sources, strict=True)]
        after = [landed, self._device.mark()]  # the memory may have been compute's a moment ago
        arrived = self._device.up(copies, after=after, label=self._name, lane=1)
        self.up_bytes += tree_bytes(sources)
        following = iter(targets)
        leaves = [next(following) if mark is None else mark[0] for mark in marks]
        self._rising[shard] = (tree_unflatten(leaves, spec), arrived)

    def _take_input(self, shard: int) -> Any:
        """The input of a shard, which compute may read."""
        if shard in self._values:
            return self._values[shard]
        self._reach_for(shard)
        value, arrived = self._rising.pop(shard)
        self._device.hold(arrived)
        for place in self._below.pop(shard)[0]:
            self._spare.setdefault(_layout_key(place), []).append(place)
        self._values[shard] = value
        return value

    def _drop(self, shard: int) -> None:
        """It is not wanted any more."""
        self._values.pop(shard, None)
        self._device.arena.release(self._name, self._booked.pop(shard))

    def clear(self) -> None:
        """Everything, after a step or a failure."""
        for _, arrived in self._rising.values():
            arrived.wait()
        for landed, size, _ in self._falling:
            landed.wait()
            self._device.arena.release(self._name, size)
        for size in self._booked.values():
            self._device.arena.release(self._name, size)
        for table in (self._values, self._below, self._rising, self._booked):
            table.clear()
        self._falling.clear()

    def _book(self, shard: int, value: Any) -> None:
        size = tree_bytes(value)
        if self._falling and self._device.arena.used_bytes + size > self._device.arena.cap_bytes:
            self._release_landed(wait=True)
        self._device.arena.book(self._name, size)
        self._booked[shard] = size

    def _release_landed(self, *, wait: bool = False) -> None:
        """Forget what has landed; its memory on the device is free."""
        still = []
        for landed, size, sources in self._falling:
            if wait:
                landed.wait()
            if landed.done():
                self._device.arena.release(self._name, size)
            else:
                still.append((landed, size, sources))
        self._falling = still

    def _get_host_buffer(self, leaf: torch.Tensor) -> torch.Tensor:
        spare = self._spare.get(_layout_key(leaf))
        if spare:
            return spare.pop()
        return torch.empty_like(leaf, device="cpu", pin_memory=leaf.device.type == "cuda")


def _layout_key(tensor: torch.Tensor) -> Any:
    return tensor.shape, tensor.stride(), tensor.dtype
