"""What does not change: frozen parameters parted from trained ones, held once for every trial that has them.

A shard's frozen parameters are a piece of their own, so that they can be streamed by themselves; two trials
share it if shapes, dtypes, cuts and every byte are the same.
"""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from loadmaster.shards.device.arena import align_bytes
from loadmaster.shards.model.blocks import Chain
from loadmaster.shards.model.built_model import BuiltModel
from loadmaster.shards.plan.host_store import HostPiece
from loadmaster.shards.plan.layout import Layout, Piece

_CHUNK_BYTES = 1 << 26
_MOST = 0.5  # of a model's bytes


def frozen_numbers(chain: Chain) -> list[int]:
    """Parameters that are used and never trained."""
    used = {slot.tensor for slots in chain.parameter_slots for slot in slots}
    return [n for n, parameter in enumerate(chain.parameters) if n in used and not parameter.requires_grad]


def frozen_share(chain: Chain) -> float:
    """The share of a model's bytes that is frozen."""
    total = sum(parameter.nbytes for parameter in chain.parameters)
    return sum(chain.parameters[n].nbytes for n in frozen_numbers(chain)) / total if total else 0.0


def has_backbone(chain: Chain) -> bool:
    """Whether most of a model is frozen."""
    if chain.by_call:  # its own forward runs, and a group runs units
        return False
    return frozen_share(chain) > _MOST


def split_frozen(layout: Layout, chain: Chain) -> Layout:
    """The same shards, with each piece parted into its frozen and its trained parameters."""
    pieces: list[Piece] = []
    for piece in layout.pieces:
        for frozen in (True, False):
            numbers = tuple(n for n in piece.parameters if chain.parameters[n].requires_grad != frozen)
            if numbers:
                name = piece.name if frozen else f"{piece.name} trained"
                pieces.append(Piece(len(pieces), name, numbers, piece.shards))
    of_shard = tuple(
        tuple(piece.index for piece in pieces if shard in piece.shards) for shard in range(layout.num_shards)
    )
    return replace(layout, pieces=tuple(pieces), pieces_of=of_shard)


def is_frozen(piece: Piece, chain: Chain) -> bool:
    """Whether a piece of a parted layout is never trained."""
    return not chain.parameters[piece.parameters[0]].requires_grad


def piece_bytes(piece: Piece, layout: Layout, chain: Chain) -> int:
    """Bytes of a piece as units read it."""
    return sum(
        align_bytes(chain.parameters[n].numel() * layout.compute_dtype[n].itemsize) for n in piece.parameters
    )


def match_frozen_pieces(
    ours: Sequence[HostPiece], built: BuiltModel, layout: Layout
) -> dict[int, HostPiece] | None:
    """Held pieces that can stand for the frozen ones of another trial, by its piece; None: they differ."""
    chain = built.chain
    theirs = [piece for piece in layout.pieces if is_frozen(piece, chain)]
    if len(theirs) != len(ours):
        return None
    for host, piece in zip(ours, theirs, strict=True):
        if host.piece.shards != piece.shards or len(host.piece.parameters) != len(piece.parameters):
            return None
        for view, place, number in zip(host.master, host.up_places, piece.parameters, strict=True):
            parameter = chain.parameters[number]
            if (view.shape, view.dtype) != (parameter.shape, parameter.dtype):
                return None
            if place.dtype != layout.compute_dtype[number] or not _has_same_bytes(view, parameter.detach()):
                return None
    return {
        piece.index: replace(host, piece=piece)  # the same slab and views, under this trial's own numbers
        for host, piece in zip(ours, theirs, strict=True)
    }


def hash_frozen(chain: Chain) -> str:
    """A hash of the frozen parameters: their shapes, dtypes and bytes, in order."""
    with ThreadPoolExecutor() as pool:
        parts = list(pool.map(_hash_tensor, (chain.parameters[n].detach() for n in frozen_numbers(chain))))
    return hashlib.blake2b("".join(parts).encode()).hexdigest()


def _hash_tensor(tensor: torch.Tensor) -> str:
    found = hashlib.blake2b(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    flat = _flatten_bytes(tensor)
    for start in range(0, flat.numel(), _CHUNK_BYTES):
        found.update(memoryview(flat[start : start + _CHUNK_BYTES].numpy()))
    return found.hexdigest()


def _has_same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.data_ptr() == right.data_ptr() and left.stride() == right.stride():
        return True
    return torch.equal(_flatten_bytes(left), _flatten_bytes(right))


def _flatten_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
