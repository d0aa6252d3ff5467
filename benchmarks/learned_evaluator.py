"""Max-load of rows in closed form, compiled: the one evaluator of every method in the table of `learned`.

It is the simulator's own figure for links through host memory, which the suite checks on every best row.
"""

from typing import Any

import numba
import numpy as np

from loadmaster.core.problem import Load, Problem
from loadmaster.placers.exact._maxload.climb import kind_of_device
from loadmaster.placers.exact._maxload.model import make_model
from loadmaster.placers.learned._groups import Groups

_PER_OVERRUN = 10.0


class ClosedForm:
    """Evaluates rows [B, U], and counts them."""

    def __init__(self, problem: Problem, groups: Groups) -> None:
        model = make_model(problem, groups.cargo.of_op, groups.num)
        assert model.exact
        assert model.load == Load.SUM
        kind = kind_of_device(model)
        nets = model.nets
        self.arrays = (
            np.ascontiguousarray(model.seconds[:, kind]),
            groups.cargo.held_bytes,
            groups.room_bytes,
            nets.home,
            nets.ptr,
            nets.user,
            np.ascontiguousarray(nets.read_s[kind]),
            np.ascontiguousarray(nets.write_s[kind]),
        )
        self.count = 0
        self.best_s = np.inf
        self.best: Any = None

    def __call__(self, rows: Any) -> Any:
        """[B] seconds, stretched where a row does not fit."""
        self.count += len(rows)
        times, over = _loads(np.ascontiguousarray(rows), *self.arrays)
        times = times * (1.0 + _PER_OVERRUN * over)
        at = int(times.argmin())
        if over[at] == 0.0 and times[at] < self.best_s:
            self.best_s, self.best = float(times[at]), rows[at].copy()
        return times


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _loads(
    rows: Any, seconds: Any, held: Any, room: Any, home: Any, ptr: Any, user: Any, read_s: Any, write_s: Any
) -> Any:
    count, num, devices = rows.shape[0], rows.shape[1], seconds.shape[1]
    times, over = np.zeros(count), np.zeros(count)
    load, used = np.zeros(devices), np.zeros(devices)
    seen = np.full(devices, -1)
    for b in range(count):
        load[:] = 0.0
        used[:] = 0.0
        seen[:] = -1
        for u in range(num):
            d = rows[b, u]
            load[d] += seconds[u, d]
            used[d] += held[u]
        for e in range(len(home)):
            at = rows[b, home[e]]
            sent = False
            for k in range(ptr[e], ptr[e + 1]):
                d = rows[b, user[k]]
                if d != at and seen[d] != e:
                    seen[d] = e
                    load[d] += read_s[d, e]
                    sent = True
            if sent:
                load[at] += write_s[at, e]
        for d in range(devices):
            times[b] = max(times[b], load[d])
            over[b] = max(over[b], used[d] / max(room[d], 1.0) - 1.0)
    return times, np.maximum(over, 0.0)
