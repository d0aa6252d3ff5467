"""Scale: the graph of a model at a batch that was not captured, drawn through two that were.

Nearly every size in a step is a constant plus so many bytes a sample. Where two captures have the same ops,
tensors and uses, a third has them too, and its sizes lie on a line. A guess, to be confirmed by a capture.
"""

from dataclasses import replace

import numpy as np

from loadmaster.core.arrays import Longs
from loadmaster.core.errors import GraphError
from loadmaster.core.graph import Graph

_SAME = ("phase", "mirror", "group", "tensor_op", "tensor_storage", "keep", "use_tensor", "use_op", "dtype")
_SIZES = ("bytes_moved", "resident_bytes", "workspace_bytes", "tensor_bytes")
_MOST_BYTES = 2.0**60


def scale_graph(one: Graph, other: Graph, low: int, high: int, batch: int) -> Graph | None:
    """The graph at `batch`, from those at `low` and `high`; None where they are not alike."""
    if one.op_name != other.op_name or one.module != other.module:
        return None
    if not all(np.array_equal(getattr(one, name), getattr(other, name)) for name in _SAME):
        return None
    share = (batch - low) / (high - low)
    columns = {name: _interpolate(getattr(one, name), getattr(other, name), share) for name in _SIZES}
    if any(column is None for column in columns.values()):
        return None
    flops = np.maximum(one.flops + (other.flops - one.flops) * share, 0.0)
    try:
        return replace(one, flops=flops, **columns)  # type: ignore[arg-type]
    except GraphError:
        return None


def _interpolate(one: Longs, other: Longs, share: float) -> Longs | None:
    values = np.round(one + (other - one).astype(np.float64) * share)
    if len(values) and (values.min() < 0 or values.sum() > _MOST_BYTES):
        return None
    return values.astype(np.int64)
