"""The weights of a trial of a group: frozen ones that the group streams for all, and adapters of its own."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from loadmaster.shards.device.streams import Device
from loadmaster.shards.plan.host_store import HostPiece
from loadmaster.train.backbone.adapter import Adapter
from loadmaster.train.backbone.frozen_weights import is_frozen
from loadmaster.train.backbone.weight_stream import WeightStream
from loadmaster.train.execute.trial_state import TrialState


class AdapterWeights:
    """Leaves of one trial; the group says which frozen pieces stand on the device."""

    def __init__(
        self,
        state: TrialState,
        device: Device,
        adapters: Mapping[int, Adapter],
        *,
        shared: Sequence[HostPiece],
    ) -> None:
        self._state, self._device, self._adapters = state, device, adapters
        mine = [piece.index for piece in state.layout.pieces if is_frozen(piece, state.chain)]
        self._shared = {own: host.piece.index for own, host in zip(mine, shared, strict=True)}
        self.frozen: Mapping[int, list[torch.Tensor]] = {}  # the group's pieces that stand there now
        self.stream: WeightStream | None = None  # where they come from

    @contextmanager
    def lend(self, shard: int) -> Iterator[dict[int, torch.Tensor]]:
        """The parameters of the shard that the group has brought."""
        yield self.get_leaves(shard)

    @contextmanager
    def lend_to_evaluate(self, shard: int) -> Iterator[dict[int, torch.Tensor]]:
        """The parameters of a shard; the stream goes as in a forward pass."""
        assert self.stream is not None, "a group that has entered its device has one"
        self.frozen = self.stream.take(shard)
        held = self.unit_bytes(shard, "F")
        try:
            with self._device.arena.hold(f"{self._state.trial.name} activations", held):
                yield self.get_leaves(shard)
        finally:
            self.frozen = {}
        self.stream.finish_unit(shard)

    def unit_bytes(self, shard: int, kind: str) -> int:
        """Device memory a unit takes beside weights and boundaries."""
        return visit_bytes(self._state, shard, kind)

    def get_leaves(self, shard: int) -> dict[int, torch.Tensor]:
        """The parameters of a shard by number; those of adapters want gradients."""
        leaves = {}
        for index in self._state.layout.pieces_of[shard]:
            adapter = self._adapters.get(index)
            views = self.frozen[self._shared[index]] if adapter is None else adapter.compute_views()
            for number, view in zip(self._state.layout.pieces[index].parameters, views, strict=True):
                leaves[number] = view if adapter is None else view.detach().requires_grad_()
        return leaves

    def frozen_addresses(self, shard: int) -> tuple[int, ...]:
        """Where the frozen weights of a shard stand."""
        pieces = (index for index in self._state.layout.pieces_of[shard] if index in self._shared)
        return tuple(self.frozen[self._shared[index]][0].data_ptr() for index in pieces)


def lowest_trained_shard(state: Any) -> int:
    """The first shard with something to train: backward need not go below."""
    return int(min(p.shards[0] for p in state.layout.pieces if not is_frozen(p, state.chain)))


def visit_bytes(state: Any, shard: int, kind: str) -> int:
    """Device memory a unit of a group's trial takes beside weights and boundaries."""
    low, high = state.layout.cuts[shard]
    facts = state.facts
    if kind == "F":
        return 2 * int(max(facts.output_bytes[low:high]))
    numbers = [n for piece in state.layout.pieces_of[shard] for n in state.layout.pieces[piece].parameters]
    grads = sum(state.sizes.grad_bytes[n] for n in numbers)
    return int(1.25 * sum(facts.saved_bytes[low:high])) + 2 * int(facts.output_bytes[high - 1]) + int(grads)
