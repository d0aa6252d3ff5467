"""Adapters: the few trained parameters of a shard whose other weights are frozen and shared."""

from collections.abc import Mapping, Sequence

import torch

from loadmaster.shards.device.streams import Device
from loadmaster.shards.plan.host_store import HostPiece
from loadmaster.shards.plan.layout import Packer
from loadmaster.train.execute.device_updates import PinnedPiece
from loadmaster.train.execute.execution_config import TransferLedger
from loadmaster.train.execute.optimizer_step import UpdateEntry


class Adapter(PinnedPiece):
    """Trained parameters of one shard, on the device with their state and their compute copies."""

    def __init__(self, host: HostPiece, device: Device, ledger: TransferLedger, *, name: str) -> None:
        packer = Packer()
        places = [
            packer.place(view.shape, view.dtype) if apart else None
            for view, apart in zip(host.compute, host.separate, strict=True)
        ]
        self._copies = device.arena.region(name, packer.end_bytes)
        try:
            super().__init__(host, device, ledger, name=name)
        except BaseException:
            device.arena.give_back(self._copies)
            raise
        memory = self._copies.memory
        self._compute = [
            master if place is None else place.view(memory)
            for master, place in zip(self.master, places, strict=True)
        ]
        with device.computing():
            self.refresh()

    def compute_views(self) -> list[torch.Tensor]:
        """The parameters as units read them."""
        return self._compute

    def entries(self, groups: Sequence[int], grads: Mapping[int, torch.Tensor]) -> list[UpdateEntry]:
        """What a step of the optimizer needs of them; they are not what the host has any more."""
        self._dirty = True
        return [
            UpdateEntry(self.host, p, groups[p], self.master[p], grads[p], self.state[p])
            for p in sorted(grads)
        ]

    def close(self) -> None:
        """Give the memory back."""
        self._compute = []
        super().close()
        self._device.arena.give_back(self._copies)

    def refresh(self) -> None:
        """Round the parameters to what units read."""
        pairs = [
            (copy, master)
            for copy, master, apart in zip(self._compute, self.master, self.host.separate, strict=True)
            if apart
        ]
        if pairs:
            with torch.no_grad():
                torch._foreach_copy_([copy for copy, _ in pairs], [master for _, master in pairs])
