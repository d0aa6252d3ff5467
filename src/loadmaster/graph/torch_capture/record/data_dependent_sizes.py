"""Choices: ops that give as many elements as their values say; without values, as many as there may be."""

from collections.abc import Callable
from typing import Any

import torch

_aten = torch.ops.aten
_MASKS = (torch.bool, torch.uint8)
Shapes = list[tuple[int, ...]] | None


def has_data_dependent_shape(func: Any, args: Any) -> bool:
    """Whether the shape of an op's result depends on values."""
    packet = getattr(func, "overloadpacket", None)
    if packet is _aten.index:
        return any(index is not None and index.dtype in _MASKS for index in args[1])
    if packet in (_aten.repeat_interleave, _aten._ctc_loss):
        return str(func).endswith(".Tensor")
    return packet in CHOICES


def make_fake_outputs(packet: Any, args: Any, shapes: Shapes) -> Any:
    """Fake outputs of such an op: of the shapes that were seen, else the largest there may be."""
    return CHOICES[packet](args, shapes)


def _index(args: Any, shapes: Shapes) -> torch.Tensor:
    source: torch.Tensor = args[0]
    return source.new_empty(shapes[0]) if shapes else _index_all_rows(source, args[1])


def _index_all_rows(source: torch.Tensor, indices: list[torch.Tensor | None]) -> torch.Tensor:
    """Rows picked by masks, all of them: a mask over two axes is an index for each."""
    whole: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in _MASKS:
            whole += [index.new_empty((index.numel(),), dtype=torch.int64) for _ in range(index.dim())]
        else:
            whole.append(index)
    return _aten.index.Tensor(source, whole)


def _nonzero(args: Any, shapes: Shapes) -> torch.Tensor:
    source: torch.Tensor = args[0]
    return source.new_empty(shapes[0] if shapes else (source.numel(), source.dim()), dtype=torch.int64)


def _masked_select(args: Any, shapes: Shapes) -> torch.Tensor:
    source: torch.Tensor = args[0]
    return source.new_empty(shapes[0] if shapes else (source.numel(),))


def _repeat_interleave(args: Any, shapes: Shapes) -> torch.Tensor:
    source: torch.Tensor = args[0]
    return source.new_empty(shapes[0] if shapes else (source.numel(),), dtype=torch.int64)


def _unique(args: Any, shapes: Shapes) -> tuple[torch.Tensor, ...]:
    source: torch.Tensor = args[0]
    rows = shapes[0] if shapes else (source.numel(),)
    index = source.new_empty(source.shape, dtype=torch.int64)
    return source.new_empty(rows), index, source.new_empty((rows[0],), dtype=torch.int64)


def _bincount(args: Any, shapes: Shapes) -> torch.Tensor:
    source: torch.Tensor = args[0]
    least = args[2] if len(args) > 2 else 0
    return source.new_empty(shapes[0] if shapes else (max(least, source.numel()),), dtype=torch.int64)


def _ctc_loss(args: Any, shapes: Shapes) -> tuple[torch.Tensor, ...]:
    """The loss of each row, and a table of steps by labels with blanks between."""
    scores, labels = args[0], args[1]
    rows = args[2].shape[0]
    longest = labels.shape[-1]
    loss, table = shapes or [(rows,), (rows, scores.shape[0], 2 * longest + 1)]
    return scores.new_empty(loss), scores.new_empty(table)


def _pack(args: Any, shapes: Shapes) -> Any:
    raise AssertionError("packed sequences are taken apart by `Reads` before they come here")


CHOICES: dict[Any, Callable[[Any, Shapes], Any]] = {
    _aten.index: _index,
    _aten.nonzero: _nonzero,
    _aten.masked_select: _masked_select,
    _aten.repeat_interleave: _repeat_interleave,
    _aten._unique2: _unique,
    _aten.unique_dim: _unique,
    _aten.bincount: _bincount,
    _aten._ctc_loss: _ctc_loss,
    _aten._pack_padded_sequence: _pack,
}
