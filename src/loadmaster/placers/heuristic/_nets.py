"""What the blocks of a cut order read and write through host memory.

A net is a tensor between units: its home unit and the units that use it. Under `Links.HOST` a block of
the order pays for a net once if the net is made outside it and used inside (a read), or made inside and
used outside (a write).
"""

from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Bools, Floats, Ints, Longs, sorted_unique
from loadmaster.core.problem import Links, Load, Objective, Problem
from loadmaster.simulator.events.throughput import combine_loads, hop_s


@dataclass(frozen=True, slots=True, eq=False)
class Nets:
    """M nets over U units in order, and what each costs every device."""

    num_units: int
    load: Load
    free: Bools  # [D] pays for no transfers
    home: Ints  # [M]
    first: Ints  # [M] first unit that uses it
    last: Ints  # [M]
    uses: Longs  # net * (U + 1) + using unit, sorted
    read_s: Floats  # [D, M]
    write_s: Floats  # [D, M]

    def loads_s(self, device: int, begin: int, compute_s: Floats) -> Floats:
        """[len(compute_s)] load of the blocks begin..begin, begin..begin+1, ... that compute so long."""
        if self.free[device]:
            return compute_s
        reads, writes = self._steps(begin, self.read_s[device], self.write_s[device])
        size = len(compute_s)
        return combine_loads(self.load, compute_s, reads[:size], writes[:size])

    def _steps(self, begin: int, read_s: Floats, write_s: Floats) -> tuple[Floats, Floats]:
        """Seconds read and written by begin..end for every end: sums of what starts and stops to be paid."""
        num = self.num_units
        net = np.arange(len(self.home), dtype=np.int64) * (num + 1)
        at = np.minimum(np.searchsorted(self.uses, net + begin), len(self.uses) - 1)
        user = self.uses[at] - net  # the first user from `begin` on, out of range where there is none
        used = (user >= begin) & (user <= num)
        behind = self.home < begin
        ahead = ~behind & used & (user < self.home)  # read only until the home joins the block
        starts = np.where(used & (behind | ahead), user + 1, num + 1)
        stops = np.where(ahead, self.home + 1, num + 1)
        reads = _running_sum(starts, stops, read_s, begin, num)
        written = ~behind & ((self.last > self.home) | (self.first < begin))
        starts = np.where(written, self.home + 1, num + 1)
        stops = np.where(written & (self.first >= begin), self.last + 1, num + 1)
        return reads, _running_sum(starts, stops, write_s, begin, num)


def _running_sum(starts: Longs, stops: Longs, seconds: Floats, begin: int, num: int) -> Floats:
    """[num + 1 - begin] sum of what has started and not stopped at each end."""
    change = np.bincount(starts, seconds, num + 2) - np.bincount(stops, seconds, num + 2)
    return np.maximum(np.cumsum(change)[begin : num + 1], 0.0)


def nets_of(problem: Problem, of_op: Ints) -> Nets | None:
    """The nets between units, or None where transfers are not part of a device's load."""
    graph, cluster = problem.graph, problem.cluster
    if problem.objective != Objective.THROUGHPUT or problem.links != Links.HOST:
        return None
    num = int(of_op.max()) + 1
    home, user = of_op[graph.tensor_op[graph.use_tensor]], of_op[graph.use_op]
    away = home != user
    pair = sorted_unique(graph.use_tensor[away].astype(np.int64) * (num + 1) + user[away])
    if len(pair) == 0:
        return None
    index, begin = np.unique(pair // (num + 1), return_index=True)
    tensor, user = index.astype(np.int32), (pair % (num + 1)).astype(np.int32)
    end = np.append(begin[1:], len(pair))
    on_host = cluster.on_host[cluster.kind]
    devices = range(cluster.num_devices)
    return Nets(
        num_units=num,
        load=problem.load,
        free=on_host,
        home=of_op[graph.tensor_op[tensor]],
        first=user[begin],
        last=user[end - 1],
        uses=np.repeat(np.arange(len(tensor)), end - begin) * (num + 1) + user,
        read_s=np.stack([hop_s(problem, tensor, d, to_host=False) for d in devices]),
        write_s=np.stack([hop_s(problem, tensor, d, to_host=True) for d in devices]),
    )
