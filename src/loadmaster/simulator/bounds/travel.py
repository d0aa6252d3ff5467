"""The earliest start and the least rest of every op on every device, transfers paid.

    head[v, d] = max over inputs t of v, made by u, of  min over d' of  head[u, d'] + p[u, d'] + c(t, d', d)
    tail[u, d] = max over uses (t, v) of u's tensors of  min over d' of  c(t, d, d') + p[v, d'] + tail[v, d']

where d' = d if both ops are of one unit. In any run with v on d, v starts no sooner than head[v, d], and
nothing ends sooner than tail[v, d] after it: by induction, since an input that was made on d' takes its
transfer at least, whatever the links, and every op is somewhere. Each input chooses its d' alone, which is a
relaxation. So no step is shorter than max over v of min over d of head + p + tail. O(uses x devices^2).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from loadmaster.core.arrays import Floats, Ints, offsets
from loadmaster.core.graph import units
from loadmaster.core.problem import Problem, allowed_devices
from loadmaster.simulator.bounds.favourite_children import pair_table
from loadmaster.simulator.jit import kernel


@dataclass(frozen=True, slots=True, eq=False)
class Travel:
    """Seconds of N ops on D devices."""

    op_s: Floats  # [N, D] inf = not allowed
    head_s: Floats  # [N, D] no start before
    tail_s: Floats  # [N, D] no end of the step sooner after the op's end

    @property
    def bound_s(self) -> float:
        """What no step is shorter than."""
        return float((self.head_s + self.op_s + self.tail_s).min(axis=1).max())


def compute_travel(problem: Problem) -> Travel:
    """Heads and tails of every op on every device."""
    graph = problem.graph
    unit, num_units = units(graph)
    op_s = np.where(allowed_devices(problem, unit, num_units)[unit], problem.device_compute_s, np.inf)
    by_tensor = np.argsort(graph.use_tensor, kind="stable")
    made: tuple[Ints, Ints] = (
        offsets(graph.tensor_op, graph.num_ops),
        np.argsort(graph.tensor_op, kind="stable").astype(np.int32),
    )
    used = offsets(graph.use_tensor, graph.num_tensors), graph.use_op[by_tensor]
    sizes = graph.tensor_bytes.astype(np.float64), problem.costs.transfer_s
    table = np.ascontiguousarray(pair_table(problem.cluster, problem.links))
    head = _compute_heads(*made, *used, *sizes, table, unit, op_s)
    return Travel(op_s, head, _compute_tails(*made, *used, *sizes, table, unit, op_s))


@kernel
def _transfer_s(num_bytes: float, given_s: float, table: Any, source: int, target: int) -> Any:
    """Seconds of a transfer when nothing else is under way."""
    if source == target:
        return 0.0
    if given_s >= 0:
        return given_s * table[source, target, 2]
    return table[source, target, 0] + num_bytes * table[source, target, 1]


@kernel
def _compute_heads(
    out_ptr: Any,
    out_tensor: Any,
    use_ptr: Any,
    use_op: Any,
    num_bytes: Any,
    given_s: Any,
    table: Any,
    unit: Any,
    op_s: Any,
) -> Any:
    """[N, D] ops are in topological order: what goes into an op is done before it."""
    head, num_devices = np.zeros(op_s.shape), op_s.shape[1]
    arrival = np.empty(num_devices)
    for u in range(len(op_s)):
        for at in range(out_ptr[u], out_ptr[u + 1]):
            t = out_tensor[at]
            for there in range(num_devices):
                arrival[there] = np.inf
                for here in range(num_devices):
                    end = head[u, here] + op_s[u, here]
                    end += _transfer_s(num_bytes[t], given_s[t], table, here, there)
                    arrival[there] = min(arrival[there], end)
            for use in range(use_ptr[t], use_ptr[t + 1]):
                v = use_op[use]
                for d in range(num_devices):
                    came = arrival[d]
                    if unit[u] == unit[v] and op_s[u, d] < np.inf:
                        came = head[u, d] + op_s[u, d]
                    head[v, d] = max(head[v, d], came)
    return head


@kernel
def _compute_tails(
    out_ptr: Any,
    out_tensor: Any,
    use_ptr: Any,
    use_op: Any,
    num_bytes: Any,
    given_s: Any,
    table: Any,
    unit: Any,
    op_s: Any,
) -> Any:
    """[N, D] as heads, from the end."""
    tail, num_devices = np.zeros(op_s.shape), op_s.shape[1]
    for u in range(len(op_s) - 1, -1, -1):
        for at in range(out_ptr[u], out_ptr[u + 1]):
            t = out_tensor[at]
            for use in range(use_ptr[t], use_ptr[t + 1]):
                v = use_op[use]
                for here in range(num_devices):
                    least = np.inf
                    for there in range(num_devices):
                        rest = _transfer_s(num_bytes[t], given_s[t], table, here, there)
                        rest += op_s[v, there] + tail[v, there]
                        least = min(least, rest)
                    if unit[u] == unit[v] and op_s[v, here] < np.inf:
                        least = op_s[v, here] + tail[v, here]
                    tail[u, here] = max(tail[u, here], least)
    return tail
