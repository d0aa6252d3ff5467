"""Memory over time: what stands on every device, by kind, from the changes that the simulator's run makes.

The changes are replayed instant by instant (`capacity/peak_moment.py`), so that the highest point of a curve
is the simulator's peak, to the byte. Curves have at most `most` points; where changes are merged into one
point, the point is the highest state among them, so that no peak is lost.
"""

import numpy as np

from loadmaster.capacity.breakdown import PARTS, tensor_parts, weight_bytes
from loadmaster.capacity.peak_moment import MemoryChanges, memory_changes
from loadmaster.core.answers.review import MEMORY_KINDS, MemoryCurve
from loadmaster.core.arrays import Longs
from loadmaster.core.graph import Phase
from loadmaster.core.plan import Plan
from loadmaster.core.problem import Problem
from loadmaster.simulator.events.engine import Outcome, Simulator
from loadmaster.simulator.events.pipelines import pipeline_peak_bytes

_WEIGHTS, _GRADIENTS, _OPTIMIZER = (PARTS.index(name) for name in ("weights", "gradients", "optimizer"))
_WORKSPACE, _RESIDENT = PARTS.index("workspace"), PARTS.index("resident")
_IN_FLIGHT = MEMORY_KINDS.index("in flight")


def memory_curves(
    simulator: Simulator, plan: Plan, settled: Longs | None = None, *, most: int = 400
) -> tuple[MemoryCurve, ...]:
    """One curve for each device; `settled` says what is resident by kind where the graph does not."""
    problem = simulator.problem
    outcome, changes = memory_changes(simulator, plan)
    part = tensor_parts(problem.graph)[0]
    kind = np.append(part, _WORKSPACE)[changes.tensor]  # -1 is no tensor: workspace
    settled = _settled_bytes(simulator, plan) if settled is None else settled
    beside = pipeline_peak_bytes(problem, plan, outcome.peak_bytes) - outcome.peak_bytes
    settled[:, _IN_FLIGHT] = beside
    return tuple(
        _draw_curve(changes, kind, device, settled[device], outcome, most)
        for device in range(problem.cluster.num_devices)
    )


def _settled_bytes(simulator: Simulator, plan: Plan) -> Longs:
    """[D, MEMORY_KINDS] what is resident on every device from beginning to end."""
    problem: Problem = simulator.problem
    graph, resident = problem.graph, simulator.fixed.resident
    settled = np.zeros((problem.cluster.num_devices, len(MEMORY_KINDS)), dtype=np.int64)
    param = graph.phase == Phase.PARAM
    weight = np.minimum(weight_bytes(graph), graph.resident_bytes)
    at = plan.device.astype(np.int64)
    np.add.at(settled[:, _WEIGHTS], at, np.where(param, weight, 0))
    np.add.at(settled[:, _OPTIMIZER], at, np.where(param, graph.resident_bytes - weight, 0))
    np.add.at(settled[:, _RESIDENT], at, np.where(param, 0, graph.resident_bytes))
    np.add.at(settled[:, _GRADIENTS], at, resident - graph.resident_bytes)
    return settled


def _draw_curve(
    changes: MemoryChanges, kind: Longs, device: int, settled: Longs, outcome: Outcome, most: int
) -> MemoryCurve:
    here = changes.device == device
    time_s, part, size = changes.time_s[here], kind[here], changes.num_bytes[here]
    steps = np.zeros((len(size) + 1, len(MEMORY_KINDS)), dtype=np.int64)
    steps[np.arange(1, len(size) + 1), part] = size
    held = np.cumsum(steps, axis=0) + settled
    at = np.concatenate([[0.0], time_s])
    total = held.sum(axis=1)
    top = int(total.argmax())
    point, state = _merge_points(at, total, outcome.step_s, most)
    return MemoryCurve(point, held[state], float(at[top]), int(total[top]))


def _merge_points(
    time_s: np.ndarray[tuple[int], np.dtype[np.float64]], total: Longs, end_s: float, most: int
) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], Longs]:
    """Times of at most `most` points, and the state that each of them shows: the highest of its stretch."""
    last = np.flatnonzero(np.concatenate([time_s[1:] != time_s[:-1], [True]]))
    if len(last) <= most:  # one point an instant, the highest of those that last no time among them
        first = np.concatenate([[0], last[:-1] + 1])
        spikes = [int(lo + total[lo : hi + 1].argmax()) for lo, hi in zip(first, last, strict=True)]
        points, states = list[float](), list[int]()
        for high, low in zip(spikes, last.tolist(), strict=True):
            if total[high] > total[low]:  # a peak that lasts no time is drawn as a line
                points.append(float(time_s[high]))
                states.append(high)
            points.append(float(time_s[low]))
            states.append(int(low))
        return np.array(points), np.array(states, dtype=np.int64)
    edge = np.linspace(0.0, end_s, most + 1)[:-1]
    begin = np.searchsorted(time_s, edge, side="right") - 1
    begin[0] = 0
    finish = np.concatenate([begin[1:], [len(time_s) - 1]])
    state = [int(lo + total[lo : hi + 1].argmax()) for lo, hi in zip(begin, finish, strict=True)]
    return edge, np.array(state, dtype=np.int64)
