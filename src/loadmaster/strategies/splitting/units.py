"""Units: ops that must stand in one group of a strategy, whatever the devices.

A backward op goes with its forward op, an update with its weight, ops that capture tied together stay
together, all users of one weight are with it (so no weight crosses groups), and a partial sum is made and
read in one group.
"""

import numpy as np

from loadmaster.core.arrays import Ints
from loadmaster.core.graph import NO_GROUP, NO_MIRROR, Graph, Phase
from loadmaster.strategies.splitting.forms import Form, Splits


def find_units(graph: Graph, splits: Splits | None = None) -> tuple[Ints, int]:
    """The unit of each op and their number; units are numbered by their first op that is no weight."""
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    pairs: list[tuple[Ints, Ints]] = []
    back = np.flatnonzero(graph.mirror != NO_MIRROR)
    pairs.append((back.astype(np.int32), graph.mirror[back]))
    maker, user = graph.tensor_op[graph.use_tensor], graph.use_op
    weight = graph.phase[maker] == Phase.PARAM
    pairs.append((maker[weight], user[weight]))
    tied = np.flatnonzero(graph.group != NO_GROUP)
    _, first, inverse = np.unique(graph.group[tied], return_index=True, return_inverse=True)
    pairs.append((tied.astype(np.int32), tied[first][inverse].astype(np.int32)))
    if splits is not None:
        summed = np.isin(splits.form[graph.use_tensor], (Form.SUM, Form.WEIGHTED))
        pairs.append((maker[summed], user[summed]))
    source = np.concatenate([a for a, _ in pairs])
    target = np.concatenate([b for _, b in pairs])
    ones = np.ones(len(source), dtype=np.int8)
    joined = coo_matrix((ones, (source, target)), shape=(graph.num_ops, graph.num_ops))
    num, label = connected_components(joined, directed=False)
    place = np.where(graph.phase == Phase.PARAM, graph.num_ops, np.arange(graph.num_ops))
    at = np.full(num, 2 * graph.num_ops, dtype=np.int64)
    np.minimum.at(at, label, place)
    rank = np.empty(num, dtype=np.int32)
    rank[np.argsort(at, kind="stable")] = np.arange(num, dtype=np.int32)
    return rank[label], int(num)
