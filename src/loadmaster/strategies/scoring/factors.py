"""Factors: which gradients are made from gathered factors instead of being summed, by a minimum cut.

A weight's gradient is a product of factors with a row for each sample: gathering X and dY and forming
the whole product on every replica may move fewer bytes than summing matrices (Xie et al., "Distributed
machine learning via sufficient factor broadcasting", 2015). With x = 1 for ops run on all rows, c their
extra seconds less those of the sum they save, and w the seconds of gathering a tensor once for all that
read it,

    minimise  sum_i c_i x_i + sum_u w_u max(0, max_{j reads u} x_j - x_producer(u))

is a minimum cut, so it is solved exactly: source -> i capacity -c_i (c_i < 0); i -> sink c_i (c_i > 0);
j -> y_u without limit for readers j; y_u -> producer(u) capacity w_u; x_i = 1 iff i stays with the source.
"""

from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from loadmaster.core.arrays import Bools, Floats, Ints
from loadmaster.core.errors import InputError

NO_PRODUCER = -1
_MOST = 2**30  # the total capacity: scipy's flow is silently 0 beyond 32 bits


@dataclass(frozen=True, slots=True, eq=False)
class CutProblem:
    """N ops with extra seconds, U tensors with seconds to gather."""

    extra_s: Floats  # [N] c
    forced: Bools  # [N] may not be chosen
    gather_s: Floats  # [U] w
    producer: Ints  # [U] op, or NO_PRODUCER: made by something that is never chosen
    read_tensor: Ints  # [R]
    read_op: Ints  # [R]


def choose(problem: CutProblem) -> Bools:
    """[N] the cheapest choice."""
    num, tensors = len(problem.extra_s), len(problem.gather_s)
    if (problem.gather_s < 0).any() or not np.isfinite(problem.extra_s).all():
        raise InputError("seconds to gather must be >= 0, and extra seconds finite")
    gains = float(np.abs(problem.extra_s).sum() + problem.gather_s.sum())
    if gains <= 0 or (problem.extra_s >= 0).all():
        return np.zeros(num, dtype=np.bool_)
    scale = (_MOST // 4) / gains
    source, sink = num + tensors, num + tensors + 1
    extra = np.rint(problem.extra_s * scale).astype(np.int64)
    gather = np.rint(problem.gather_s * scale).astype(np.int64)
    total = int(np.abs(extra).sum() + gather.sum())
    infinite = total + 1
    helped = np.flatnonzero((extra < 0) & ~problem.forced)
    costly = np.flatnonzero((extra > 0) & ~problem.forced)
    never = np.flatnonzero(problem.forced)
    produced = np.flatnonzero(problem.producer != NO_PRODUCER)
    outside = np.flatnonzero(problem.producer == NO_PRODUCER)
    arcs = (
        (np.full(len(helped), source), helped, -extra[helped]),
        (costly, np.full(len(costly), sink), extra[costly]),
        (never, np.full(len(never), sink), np.full(len(never), infinite)),
        (problem.read_op, num + problem.read_tensor, np.full(len(problem.read_op), infinite)),
        (num + produced, problem.producer[produced], gather[produced]),
        (num + outside, np.full(len(outside), sink), gather[outside]),
    )
    tail, head, room = (np.concatenate(column).astype(np.int64) for column in zip(*arcs, strict=True))
    net = coo_matrix((room, (tail, head)), shape=(sink + 1, sink + 1)).tocsr().astype(np.int32)
    flow = maximum_flow(net, source, sink).flow
    left = net - flow
    left.data = np.where(left.data > 0, left.data, 0)
    left.eliminate_zeros()
    reached = breadth_first_order(left, source, return_predecessors=False)
    found = np.zeros(sink + 1, dtype=np.bool_)
    found[reached] = True
    chosen: Bools = found[:num]
    return chosen
