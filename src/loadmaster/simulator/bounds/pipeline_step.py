"""What no step of M micro-batches can beat, however it is cut, ordered and replicated (`docs/bounds.md`).

* one micro-batch: its longest path forward, backward and to the update, each op where it is fastest;
* work of all micro-batches: M times every forward and backward op and once every update, spread at will;
* filling: without replicas and with one stage a rank, the device of a stage waits for one micro-batch to
  come through the stages before it, does its own work M times, and then (where its last pass is a whole
  backward pass) one micro-batch goes back through those. With w_t the seconds of stage t for one micro-batch

      T >= sum of w_t over stages t before s  +  M w_s          for every stage s

  A sum of these with factors >= 0 is a bound too, and stays one when each op takes the device where it counts
  least. Orders of devices are enumerated up to devices that are alike.

Replicas may avoid filling: where memory allows two of them, or a rank may have several stages, filling is
counted with what those allow (`_replicated`), or left out.
"""

from collections.abc import Iterator

import numpy as np

from loadmaster.core.arrays import Floats
from loadmaster.core.cluster import process_engines
from loadmaster.core.graph import NO_MIRROR, Phase, units
from loadmaster.core.pipelines.order import INTERLEAVED, ZERO_BUBBLE
from loadmaster.core.pipelines.schedule import AUTO, Schedule
from loadmaster.core.problem import Problem, allowed_devices
from loadmaster.core.run import Bound
from loadmaster.core.units import format_bytes
from loadmaster.graph.measures import longest_path
from loadmaster.simulator.bounds.relaxation import Classes, relaxed_bound_s

_BELOW = 1.0 - 1e-9  # rounding of long sums
_MOST_ORDERS = 800


def step_bound(problem: Problem) -> Bound:
    """The best of the arguments, or the proof that nothing fits."""
    schedule = problem.schedule
    assert schedule is not None
    reason = _prove_no_room(problem)
    if reason:
        return Bound(0.0, "none", reason)
    seconds = _allowed_seconds(problem)
    found = [
        ("one micro-batch", _one_pass_s(problem, seconds)),
        ("work of all micro-batches", _work_s(problem, seconds, schedule.num_microbatches)),
    ]
    filling = _filling_s(problem, seconds, schedule)
    if filling > 0:
        found.append(("filling the pipeline", filling))
    name, best = max(found, key=lambda one: one[1])
    return Bound(best * _BELOW, name)


def _allowed_seconds(problem: Problem) -> Floats:
    """[N, D] seconds of every op where its unit may be, else inf."""
    unit, num = units(problem.graph)
    allowed = allowed_devices(problem, unit, num)
    return np.where(allowed[unit], problem.device_compute_s, np.inf)


def _prove_no_room(problem: Problem) -> str:
    """Why no pipeline fits: weights and state are somewhere, whole."""
    held, room = _standing_bytes(problem), int(problem.cluster.usable_bytes.sum())
    if held <= room:
        return ""
    return (
        f"weights, gradients and optimizer state take {format_bytes(held)}, all devices have"
        f" {format_bytes(room)} ({format_bytes(held - room)} short): add a device, or use an optimizer with"
        " less state"
    )


def _standing_bytes(problem: Problem) -> int:
    """Weights, optimizer state and gradients, which add up over micro-batches."""
    graph = problem.graph
    read = np.zeros(graph.num_tensors, dtype=np.bool_)
    read[graph.use_tensor[graph.phase[graph.use_op] == Phase.UPDATE]] = True
    owns = graph.tensor_storage == np.arange(graph.num_tensors)
    gradient = read & owns & (graph.phase[graph.tensor_op] == Phase.BACKWARD)
    return int(graph.resident_bytes.sum() + graph.tensor_bytes[gradient].sum())


def _one_pass_s(problem: Problem, seconds: Floats) -> float:
    """The longest path of one micro-batch; adding up gradients takes no time there, as it may come early."""
    graph = problem.graph
    fastest = seconds.min(axis=1)
    fastest[(graph.phase == Phase.BACKWARD) & (graph.mirror == NO_MIRROR)] = 0.0
    return float(longest_path(graph, fastest).max())


def _work_s(problem: Problem, seconds: Floats, count: int) -> float:
    """All work spread over engines in fractions."""
    graph, cluster = problem.graph, problem.cluster
    times = np.where(graph.phase == Phase.UPDATE, 1.0, float(count))
    engines, engine = np.unique(process_engines(cluster), return_inverse=True)
    by_engine = np.stack([seconds[:, engine == e].min(axis=1) for e in range(len(engines))], axis=1)
    columns, of_engine = np.unique(by_engine, axis=1, return_inverse=True)
    of_engine = of_engine.reshape(-1)
    classes = Classes(
        count=np.bincount(of_engine, minlength=columns.shape[1]).astype(np.float64),
        memory_bytes=np.ones(columns.shape[1]),
        seconds=columns * times[:, None],
        held_bytes=np.zeros(graph.num_ops),
    )
    return relaxed_bound_s(classes, with_memory=False)


def _filling_s(problem: Problem, seconds: Floats, schedule: Schedule) -> float:
    """The bound of filling and draining, 0 where interleaved stages or shared engines may avoid it."""
    cluster = problem.cluster
    several = schedule.name in (AUTO, INTERLEAVED) or schedule.stages_per_rank > 1
    if several or len(np.unique(process_engines(cluster))) < cluster.num_devices:
        return 0.0
    most = _most_replicas(problem, schedule.num_microbatches)
    alone = _single_s(problem, seconds, schedule)
    if most == 1 or alone == 0.0:
        return alone
    if schedule.name == ZERO_BUBBLE:
        return 0.0
    passes = np.isin(problem.graph.phase, (Phase.FORWARD, Phase.BACKWARD))
    return min(alone, _replicated_s(seconds[passes], schedule.num_microbatches, most))


def _most_replicas(problem: Problem, count: int) -> int:
    """How many replicas there may be at most: each has its own devices, which hold all weights."""
    if problem.pinned.max(initial=-1) >= 0:
        return 1
    held, need, room = _standing_bytes(problem), 0, 0
    for size in sorted(problem.cluster.usable_bytes.tolist(), reverse=True):
        need, room = need + 1, room + size
        if room >= held:
            break
    return max(1, min(count, problem.cluster.num_devices // need))


def _single_s(problem: Problem, seconds: Floats, schedule: Schedule) -> float:
    """Without replicas: the least over orders of devices of a sum of the inequalities above."""
    graph, count = problem.graph, schedule.num_microbatches
    forward, backward = (np.flatnonzero(graph.phase == p) for p in (Phase.FORWARD, Phase.BACKWARD))
    drained = schedule.name != ZERO_BUBBLE  # else gradients of weights may come after the way back
    columns, alike = np.unique(seconds, axis=1, return_inverse=True)
    alike = alike.reshape(-1)
    numbers = np.bincount(alike, minlength=columns.shape[1])
    total = np.array([columns[np.isfinite(columns[:, c]), c].sum() for c in range(columns.shape[1])])
    pace = 1.0 / np.maximum(total, 1e-300)
    rows_forward, times_forward = _distinct(columns[forward])
    rows_backward, times_backward = _distinct(columns[backward])
    worst = np.inf
    for at, order in enumerate(_orders(tuple(numbers.tolist()))):
        if at >= _MOST_ORDERS:
            return 0.0
        factor = _factors(pace[list(order)], count)
        after = np.concatenate([np.cumsum(factor[::-1])[::-1][1:], [0.0]])
        passing = np.full((2, len(numbers)), np.inf)
        np.minimum.at(passing[0], list(order), count * factor + after)
        np.minimum.at(passing[1], list(order), count * factor + (after if drained else 0.0))
        value = _least(rows_forward, times_forward, passing[0])
        value += _least(rows_backward, times_backward, passing[1])
        worst = min(worst, value / float(factor.sum()))
    return float(worst)


def _distinct(rows: Floats) -> tuple[Floats, Floats]:
    """Distinct rows that take time, and how often each occurs."""
    kept, times = np.unique(rows[(rows > 0).any(axis=1)], axis=0, return_counts=True)
    return kept, times.astype(np.float64)


def _least(rows: Floats, times: Floats, price: Floats) -> float:
    """Every op where it counts least."""
    if not len(rows):
        return 0.0
    with np.errstate(invalid="ignore"):
        paid = np.where(np.isfinite(rows), rows * price, np.inf).min(axis=1)
    return float(times @ paid)


def _factors(pace: Floats, count: int) -> Floats:
    """A factor >= 0 for each place: those that would be best if all ops ran at a device's own pace."""
    factor = np.zeros(len(pace))
    after = 0.0
    for at in range(len(pace) - 1, -1, -1):
        factor[at] = max((pace[at] - after) / count, 0.0)
        after += factor[at]
    return factor / max(float(factor.sum()), 1e-300)


def _orders(numbers: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every order of classes of devices, of which there are so many each."""
    if not any(numbers):
        yield ()
        return
    for c, number in enumerate(numbers):
        if number:
            rest = (*numbers[:c], number - 1, *numbers[c + 1 :])
            for order in _orders(rest):
                yield (c, *order)


def _replicated_s(seconds: Floats, count: int, most: int) -> float:
    """With up to `most` replicas: places in a pipeline are shared out as well as may be.

    With r_d the least factor by which device d is slower than the fastest, over all ops, and X the seconds of
    a micro-batch on the fastest: the i-th fastest device is at best in place i div R of one of R replicas,
    where it does (1 - 1/m)^place as much as in the first, m <= M - R + 1 being the replica's micro-batches.
    """
    best = seconds.min(axis=1)
    works = best > 0
    whole = float(best.sum())
    if whole == 0.0:
        return 0.0
    slower = np.array([np.min(seconds[works, d] / best[works]) for d in range(seconds.shape[1])])
    pace = np.sort(1.0 / slower)[::-1]
    place = np.arange(len(pace))
    most_pace = max(
        float((pace * (1.0 - 1.0 / (count - number + 1)) ** (place // number)).sum())
        for number in range(1, most + 1)
    )
    return count * whole / most_pace
