"""Ops whose number of outputs depends on values; without values, the largest possible number is used."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

_aten = torch.ops.aten
_MASKS = (torch.bool, torch.uint8)
Shapes = list[tuple[int, ...]] | None


def values_that_decide(func: Any, args: Any) -> list[Any]:
    """The operands of such an op whose values decide how many elements it gives."""
    packet = func.overloadpacket
    if packet is _aten.index:
        return [index for index in args[1] if index is not None and index.dtype in _MASKS]
    if packet is _aten.masked_select:
        return [args[1]]
    return [args[3]] if packet is _aten._ctc_loss else list(args[:1])


def count_values(func: Any, values: list[torch.Tensor]) -> list[int]:
    """What is counted of the values that decide: how many hold, or how long the longest is."""
    if func.overloadpacket is _aten._ctc_loss:
        return [int(one.max()) if one.numel() else 0 for one in values]
    return [int(one.count_nonzero()) for one in values]


def count_shapes(func: Any, args: Any, counts: list[int], values: list[torch.Tensor]) -> Shapes:
    """The shapes such an op gives, from counts of the values that decide; None where there is no rule."""
    packet = func.overloadpacket
    if packet is _aten.index:
        return [tuple(_index_all_rows(args[0], args[1], iter(counts)).shape)]
    if packet is _aten.masked_select:
        shape, own = torch.broadcast_shapes(args[0].shape, values[0].shape), values[0].numel()
        return [(counts[0] * (math.prod(shape) // own) if own else 0,)]
    if packet is _aten._ctc_loss:
        rows = args[2].shape[0]
        return [(rows,), (rows, args[0].shape[0], 2 * counts[0] + 1)]
    return None


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


def _index_all_rows(
    source: torch.Tensor, indices: list[torch.Tensor | None], counts: Iterator[int] | None = None
) -> torch.Tensor:
    """Rows picked by masks, all or as many as are counted: a mask over two axes is an index for each."""
    whole: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in _MASKS:
            rows = index.numel() if counts is None else next(counts)
            whole += [index.new_empty((rows,), dtype=torch.int64) for _ in range(index.dim())]
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
