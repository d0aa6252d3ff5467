"""The host store: one flat slab for each piece, mapped once, pinned once, never reallocated."""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from loadmaster.shards.model.optimizer_state import StateLayout
from loadmaster.shards.plan.layout import Layout, Packer, Piece, Place


def allocate_host_memory(num_bytes: int, *, for_gpu: bool = False) -> torch.Tensor:
    """Anonymous pages: zero, and taken when first touched.

    For a GPU they are private, since most systems make only such pages huge, and huge ones are what a bus
    reads fast while the host's threads are at the same memory. Forks do not get them (pinned private pages
    would be copied whole for each worker of a loader), as it is with all pinned memory.
    """
    if not for_gpu or not hasattr(mmap, "MAP_PRIVATE"):
        return torch.frombuffer(mmap.mmap(-1, max(num_bytes, 1)), dtype=torch.uint8)
    pages = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):
            pages.madvise(getattr(mmap, advice))
    return torch.frombuffer(pages, dtype=torch.uint8)


@dataclass(slots=True, eq=False)
class HostPiece:
    """A piece in host memory. Views are made once; the lists run over the piece's parameters."""

    piece: Piece
    slab: torch.Tensor
    up: torch.Tensor  # flat bytes a unit needs
    up_places: list[Place]
    compute: list[torch.Tensor]
    master: list[torch.Tensor]
    separate: list[bool]  # whether the master is a tensor of its own
    trainable: list[bool]
    state: list[dict[str, torch.Tensor]]  # large state by key, views
    small: list[dict[str, Any]]  # step counts and the like
    landing: torch.Tensor  # flat bytes of gradients
    grad_places: list[Place | None]
    started: list[bool] = field(default_factory=list)  # whether the optimizer has made its state
    step: int = 0  # of the last update
    _grads: list[torch.Tensor | None] | None = None

    @property
    def grads(self) -> list[torch.Tensor | None]:
        """Gradients as they land."""
        if self._grads is None:
            self._grads = [None if place is None else place.view(self.landing) for place in self.grad_places]
        return self._grads


def make_host_piece(
    piece: Piece,
    layout: Layout,
    parameters: Sequence[torch.Tensor],
    states: Sequence[StateLayout | None],
    *,
    grad_dtype: Sequence[torch.dtype],
    landing: bool,
    for_gpu: bool = False,
) -> HostPiece:
    """Lay a piece out, take its memory and move the parameters in, narrow ones first."""
    order = sorted(
        piece.parameters, key=lambda number: layout.compute_dtype[number] == parameters[number].dtype
    )
    assert tuple(order) == tuple(piece.parameters), "a piece lists its parameters in slab order"
    up, rest, land = Packer(), Packer(), Packer()
    up_places = [up.place(parameters[n].shape, layout.compute_dtype[n]) for n in order]
    separate = [layout.compute_dtype[n] != parameters[n].dtype for n in order]
    master_places = [
        rest.place(parameters[n].shape, parameters[n].dtype) if apart else None
        for n, apart in zip(order, separate, strict=True)
    ]
    keys = sorted({key for n in order for key in (states[n].large if states[n] else ())})  # type: ignore[union-attr]
    state_places: list[dict[str, Place]] = [{} for _ in order]
    for key in keys:
        for position, n in enumerate(order):
            layout_of = states[n]
            if layout_of is not None and key in layout_of.large:
                shape = layout_of.shape(key, parameters[n].shape)
                state_places[position][key] = rest.place(shape, layout_of.large[key][1])
    trainable = [states[n] is not None for n in order]
    grad_places = [
        land.place(parameters[n].shape, grad_dtype[n]) if wanted else None
        for n, wanted in zip(order, trainable, strict=True)
    ]
    slab = allocate_host_memory(
        up.end_bytes + rest.end_bytes + (land.end_bytes if landing else 0), for_gpu=for_gpu
    )
    low, high = slab[: up.end_bytes], slab[up.end_bytes : up.end_bytes + rest.end_bytes]
    compute = [place.view(low) for place in up_places]
    master = [c if p is None else p.view(high) for c, p in zip(compute, master_places, strict=True)]
    for view, copy, n in zip(master, compute, order, strict=True):
        view.copy_(parameters[n].detach())
        if copy is not view:
            copy.copy_(view)
    return HostPiece(
        piece,
        slab,
        low,
        up_places,
        compute,
        master,
        separate,
        trainable,
        [{key: place.view(high) for key, place in places.items()} for places in state_places],
        [{} for _ in order],
        slab[up.end_bytes + rest.end_bytes :],
        grad_places,
        [False] * len(order),
    )
