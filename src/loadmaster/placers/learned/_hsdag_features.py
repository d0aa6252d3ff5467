"""What HSDAG sees of a graph: merged chains, types, degrees, fractal dimension, place and output size.

Step 1 and 2 of Duan et al. (`hsdag.py`). The nodes are groups of ops that must share a device.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadmaster.core.arrays import Floats, Ints, sorted_unique
from loadmaster.core.graph import edges
from loadmaster.core.problem import Problem
from loadmaster.placers.learned._groups import Groups
from loadmaster.placers.learned._scene import longest_ways

_DEGREES, _RADIUS, _MANY, _WAVES = 8, 5, 2000, 4


@dataclass(frozen=True, slots=True, eq=False)
class HsdagGraph:
    """M merged nodes with undirected edges."""

    node_of_group: Ints  # [U]
    features: NDArray[np.float32]  # [M, F]
    source: Ints  # [E] each edge once
    target: Ints

    @property
    def num(self) -> int:
        """M."""
        return len(self.features)


def make_hsdag_graph(problem: Problem, groups: Groups, *, merge_chains: bool, as_coded: bool) -> HsdagGraph:
    """The graph of a problem; `as_coded` leaves out what the published code has commented out."""
    of_op, num = groups.cargo.of_op, groups.num
    source, target = edges(problem.graph)
    source, target = _distinct(of_op[source], of_op[target], num)
    node = np.arange(num, dtype=np.int32)
    if merge_chains:
        node = _merge_chains(num, source, target)
        num = int(node.max()) + 1
        source, target = _distinct(node[source], node[target], num)
    types = _type_shares(problem, node[of_op], num)
    place = _topological_places(num, source, target)
    if as_coded:
        features = np.concatenate([types, place[:, None] * num], axis=1)
    else:
        features = np.concatenate(
            [
                types,
                _one_hot(np.bincount(target, minlength=num)),
                _one_hot(np.bincount(source, minlength=num)),
                _fractal_dimension(num, source, target)[:, None],
                place[:, None],
                _waves(place),
                _output_sizes(problem, node[of_op], num)[:, None],
            ],
            axis=1,
        )
    one, other = _distinct(np.minimum(source, target), np.maximum(source, target), num)
    return HsdagGraph(node, features.astype(np.float32), one, other)


def _distinct(source: Ints, target: Ints, num: int) -> tuple[Ints, Ints]:
    pair = sorted_unique(source.astype(np.int64) * num + target)
    pair = pair[pair // num != pair % num]
    return (pair // num).astype(np.int32), (pair % num).astype(np.int32)


def _merge_chains(num: int, source: Ints, target: Ints) -> Ints:
    """[U] node of each group: v joins u where it is u's only child and u its only parent."""
    children, parents = np.bincount(source, minlength=num), np.bincount(target, minlength=num)
    joins = (children[source] == 1) & (parents[target] == 1)
    into = np.arange(num)
    into[target[joins]] = source[joins]
    for _ in range(num):
        further = into[into]
        if (further == into).all():
            break
        into = further
    _, node = np.unique(into, return_inverse=True)
    return node.reshape(-1).astype(np.int32)


def _type_shares(problem: Problem, node: Ints, num: int) -> Floats:
    """[M, kinds] the mean of the one-hot types of a node's ops."""
    names = sorted(set(problem.graph.op_kind))
    number = {name: at for at, name in enumerate(names)}
    kind = np.array([number[name] for name in problem.graph.op_kind])
    share = np.zeros((num, len(names)))
    np.add.at(share, (node, kind), 1.0)
    return np.asarray(share / np.maximum(share.sum(axis=1, keepdims=True), 1.0))


def _topological_places(num: int, source: Ints, target: Ints) -> Floats:
    """[M] from 0 to 1; where groups feed each other in a circle, as far as an order goes."""
    pair = source < target
    _, _, depth, height = longest_ways(
        num, source[pair], target[pair], np.ones(num), np.zeros(int(pair.sum()))
    )
    return np.asarray(depth / np.maximum(depth + height, 1.0))


def _one_hot(degree: "np.typing.NDArray[np.int64]") -> Floats:
    return np.asarray(np.minimum(degree, _DEGREES)[:, None] == np.arange(_DEGREES + 1), dtype=np.float64)


def _waves(place: Floats) -> Floats:
    """[M, 2 waves] sines and cosines of the place."""
    angle = np.pi * place[:, None] * 2.0 ** np.arange(_WAVES)
    return np.concatenate([np.sin(angle), np.cos(angle)], axis=1)


def _output_sizes(problem: Problem, node: Ints, num: int) -> Floats:
    """[M] logarithm of the bytes a node puts out, against the mean."""
    made = np.bincount(node[problem.graph.tensor_op], problem.graph.tensor_bytes, num)
    mean = max(float(made.mean()), 1.0)
    return np.asarray(np.log1p(made / mean))


def _fractal_dimension(num: int, source: Ints, target: Ints) -> Floats:
    """[M] slope of the logarithm of how many nodes lie within a distance against that of the distance."""
    from scipy.sparse import csr_array, identity  # slow to load

    ones = np.ones(len(source), dtype=np.float32)
    step = csr_array((ones, (source, target)), shape=(num, num))
    step = step + step.T + csr_array(identity(num, dtype=np.float32))
    radius = _RADIUS if num <= _MANY else 2
    reach, counts = step, []
    for _ in range(radius):
        counts.append(np.diff(reach.indptr).astype(np.float64))
        reach = (reach @ step).sign()
    x = np.log(np.arange(1, radius + 1) + 1.0)
    y = np.log(np.stack(counts, axis=1))
    x = x - x.mean()
    return np.asarray(((y - y.mean(axis=1, keepdims=True)) * x).sum(axis=1) / (x * x).sum())
