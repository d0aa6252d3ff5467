"""How a trial lies in memory: shards of blocks, pieces of parameters, regions of a slab.

A *shard* is a run of blocks. A *piece* is what moves as one: the parameters of one shard, or one tied
parameter with all the shards that use it. Of a piece, the slab holds in this order

    up       what a unit needs: compute copies (16 bit), then parameters that compute in their own dtype
    master   parameters whose compute copy is another dtype
    state    optimizer state, key by key
    landing  gradients on their way to an update on the host
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from loadmaster.core.errors import InputError
from loadmaster.shards.device.arena import align_bytes
from loadmaster.shards.model.blocks import Chain

Placement = Literal["device", "host", "pinned"]


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Parameters that move as one."""

    index: int
    name: str
    parameters: tuple[int, ...]
    shards: tuple[int, ...]  # users, ascending

    @property
    def tied(self) -> bool:
        """Whether several shards use it."""
        return len(self.shards) > 1


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Shards and pieces of one trial."""

    cuts: tuple[tuple[int, int], ...]  # [shard] first block and one past the last
    pieces: tuple[Piece, ...]
    pieces_of: tuple[tuple[int, ...], ...]  # [shard]
    compute_dtype: tuple[torch.dtype, ...]  # [parameter]
    calls: tuple[int, ...] | None = None  # shards in the order of their calls; None: a chain
    recompute: tuple[bool, ...] = ()  # [shard] by call: its activations are dropped, and made again
    rest: int | None = None  # by call: the piece that stays for a whole step

    @property
    def num_shards(self) -> int:
        """How many shards there are."""
        return len(self.cuts)


def lay_out(
    chain: Chain, cuts: Sequence[int], *, compute_dtype: torch.dtype | None, castable: Sequence[bool]
) -> Layout:
    """Shards that start at the given blocks, and their pieces."""
    if chain.by_call:
        cuts = range(len(chain.blocks))
    starts = list(cuts)
    num_blocks = len(chain.blocks)
    if not starts or starts[0] != 0 or starts != sorted(set(starts)) or starts[-1] >= num_blocks:
        raise InputError(
            f"cuts {starts} do not divide {num_blocks} blocks: they must rise from 0, each below {num_blocks}"
        )
    spans = tuple(zip(starts, [*starts[1:], num_blocks], strict=True))
    shard_of = [shard for shard, (first, last) in enumerate(spans) for _ in range(first, last)]
    users: dict[int, set[int]] = {}
    for block, slots in enumerate(chain.parameter_slots):
        for slot in slots:
            users.setdefault(slot.tensor, set()).add(shard_of[block])
    dtypes = tuple(
        compute_dtype
        if compute_dtype is not None and castable[number] and parameter.dtype == torch.float32
        else parameter.dtype
        for number, parameter in enumerate(chain.parameters)
    )
    pieces: list[Piece] = []
    for shard in range(len(spans)):
        own = tuple(number for number, shards in sorted(users.items()) if shards == {shard})
        if own:
            own = tuple(sorted(own, key=lambda number: dtypes[number] == chain.parameters[number].dtype))
            pieces.append(Piece(len(pieces), f"shard{shard}", own, (shard,)))
    rest = len(pieces) if chain.rest else None
    if chain.rest:
        numbers = sorted(chain.rest, key=lambda n: (dtypes[n] == chain.parameters[n].dtype, n))
        pieces.append(Piece(len(pieces), "rest", tuple(numbers), tuple(range(len(spans)))))
    for number, shards in sorted(users.items()):
        if len(shards) > 1:
            pieces.append(Piece(len(pieces), chain.parameter_name[number], (number,), tuple(sorted(shards))))
    of_shard = tuple(
        tuple(piece.index for piece in pieces if shard in piece.shards and piece.index != rest)
        for shard in range(len(spans))
    )
    return Layout(spans, tuple(pieces), of_shard, dtypes, () if chain.by_call else None, (), rest)


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where a tensor lies in a flat region."""

    offset_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor, in flat uint8 memory that begins where the region does."""
        flat = memory[self.offset_bytes : self.offset_bytes + self.num_bytes]
        return flat.view(self.dtype).view(self.shape)


@dataclass(slots=True)
class Packer:
    """Places handed out one after another."""

    end_bytes: int = 0

    def place(self, shape: Sequence[int], dtype: torch.dtype) -> Place:
        """The next place; every tensor starts on an aligned byte."""
        place = Place(self.end_bytes, tuple(shape), dtype)
        self.end_bytes = align_bytes(self.end_bytes + place.num_bytes)
        return place
