"""Accumulate: the memory of one of several passes whose gradients are added up before the weights change.

From the second pass on, every weight's gradient is there from the beginning: it counts as resident with its
weight. The gradient that a pass computes is added to it and let go of at once; the update waits for all of
them, which a token of no bytes says.
"""

from dataclasses import replace

import numpy as np

from loadmaster.capacity.breakdown import gradient_tensors
from loadmaster.core.arrays import Longs
from loadmaster.core.graph import Graph, Phase
from loadmaster.cost.memory import pair_weights_with_updates


def with_accumulated_gradients(graph: Graph) -> Graph:
    """The graph of the last of several passes."""
    gradient, reader = gradient_tensors(graph)
    updates = graph.phase[reader] == Phase.UPDATE
    gradient, reader = gradient[updates], reader[updates]
    if not len(gradient):
        return graph
    held: Longs = graph.resident_bytes.copy()
    param, update = pair_weights_with_updates(graph)
    weight_of = dict(zip(update.tolist(), param.tolist(), strict=True))
    size = np.where(graph.tensor_storage[gradient] >= 0, graph.tensor_bytes[gradient], 0)
    for op, num_bytes in zip(reader.tolist(), size.tolist(), strict=True):
        held[weight_of.get(op, op)] += num_bytes
    is_gradient = np.isin(graph.tensor_storage, gradient)  # views of it too
    dropped = is_gradient[graph.use_tensor] & (graph.phase[graph.use_op] == Phase.UPDATE)
    maker, user = graph.tensor_op[graph.use_tensor[dropped]], graph.use_op[dropped]
    token = graph.num_tensors + np.arange(len(maker), dtype=np.int32)
    none = np.zeros(len(maker), dtype=np.int64)
    return replace(
        graph,
        resident_bytes=held,
        keep=np.concatenate([graph.keep & ~is_gradient, none.astype(np.bool_)]),
        tensor_op=np.concatenate([graph.tensor_op, maker]),
        tensor_bytes=np.concatenate([graph.tensor_bytes, none]),
        tensor_storage=np.concatenate([graph.tensor_storage, token]),
        use_tensor=np.concatenate([graph.use_tensor[~dropped], token]).astype(np.int32),
        use_op=np.concatenate([graph.use_op[~dropped], user]).astype(np.int32),
    )
