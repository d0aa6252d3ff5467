"""Packed: sequences of unequal length without their padding, whose steps depend on values.

PyTorch walks over such a sequence by the number of rows at each step, which fake tensors do not have. The
same work is written with padded tensors instead: as many elements, a padded recurrent layer.
"""

from typing import Any

import torch
from torch.nn import functional
from torch.utils._pytree import tree_map

RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
PACK = "_pack_padded_sequence"
UNPACK = "_pad_packed_sequence"
READ = "aten._pack_padded_sequence.default"  # what a real run is seen to do


def is_packed(name: str, args: Any) -> bool:
    """Whether a function of torch works on a packed sequence."""
    if name not in RECURRENT:
        return name in (PACK, UNPACK)
    return len(args) > 1 and isinstance(args[1], torch.Tensor) and args[1].dtype == torch.int64


def pack(shapes: Any, source: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
    """Rows without padding, and how many there are at each step; `shapes` of both, where known."""
    whole = source.transpose(0, 1) if batch_first else source
    rows = whole.shape[1]
    steps = shapes[1][0] if shapes else whole.shape[0]
    total = shapes[0][0] if shapes else steps * rows
    data = whole[:steps].reshape(steps * rows, *whole.shape[2:])[:total].clone()
    sizes = torch.full((steps,), rows)
    sizes.num_rows = rows
    return data, sizes


def unpack(
    data: torch.Tensor, sizes: torch.Tensor, batch_first: bool, padding: Any, total_length: int = 0
) -> Any:
    """The padded sequence, and the length of each row."""
    steps, rows = max(int(total_length), sizes.shape[0]), _num_rows(data, sizes)
    whole = _pad_rows(data, steps, rows)
    return (whole.transpose(0, 1) if batch_first else whole), torch.full((rows,), steps)


def run_recurrent(func: Any, data: torch.Tensor, sizes: torch.Tensor, hidden: Any, *rest: Any) -> Any:
    """A recurrent layer on the padded sequence."""
    rows = _num_rows(data, sizes)
    hidden = tree_map(lambda state: state[:, :1].expand(-1, rows, -1).contiguous(), hidden)
    out, *states = func(_pad_rows(data, sizes.shape[0], rows), hidden, *rest, False)
    return (out.reshape(-1, out.shape[-1])[: data.shape[0]], *states)


def _num_rows(data: torch.Tensor, sizes: torch.Tensor) -> int:
    known = getattr(sizes, "num_rows", None)
    return known if known is not None else max(1, -(-data.shape[0] // sizes.shape[0]))


def _pad_rows(data: torch.Tensor, steps: int, rows: int) -> torch.Tensor:
    missing = max(0, steps * rows - data.shape[0])
    sides = [0, 0] * (data.dim() - 1) + [0, missing]
    return functional.pad(data, sides).view(steps, rows, *data.shape[1:])
