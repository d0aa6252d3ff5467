"""A second simulator of recorded arrivals, slow and plain: dicts and lists, one kind of device.

Written from the rules apart from the compiled loops: `plain_rigid` for rules that promise nothing,
`plain_elasticflow` for minimum satisfactory shares with resizing.
"""

import numpy as np

from loadmaster.advisor.environments.trace import LEVELS, TraceStream


def plain_rigid(stream: TraceStream, hosts: list[int], order: str) -> dict[int, tuple[float, float]]:
    """Rules that promise nothing, written with dicts and lists; start and end of each job that ran."""
    free = dict(enumerate(hosts))
    waiting: list[int] = []
    running: list[tuple[float, dict[int, int]]] = []
    told: dict[int, tuple[float, float]] = {}
    events = sorted(set(stream.arrival_s.tolist()))
    arrived = 0
    while events:
        now = events.pop(0)
        for end, taken in [r for r in running if r[0] <= now]:
            running.remove((end, taken))
            for h, n in taken.items():
                free[h] += n
        while arrived < len(stream.arrival_s) and stream.arrival_s[arrived] <= now:
            waiting.append(arrived)
            arrived += 1
        by_arrival = order in ("fifo", "always-max")
        for j in sorted(waiting, key=lambda i: i if by_arrival else stream.due_s[i]):
            counts = [int(stream.reference[j])] if order in ("fifo", "edf") else list(range(len(LEVELS)))
            if now + min(stream.duration_s[j, 0, :, q].min() for q in counts) > stream.due_s[j]:
                continue  # can no longer be in time
            found = [(q, *_place(free, LEVELS[q])) for q in counts]
            starts = [
                (q, taken, now + float(stream.duration_s[j, 0, form, q]))
                for q, taken, form in found
                if taken and now + stream.duration_s[j, 0, form, q] <= stream.due_s[j]
            ]
            if not starts:
                if order == "fifo":
                    break
                continue
            _, taken, end = max(starts) if order == "always-max" else min(starts)
            for h, count in taken.items():
                free[h] -= count
            waiting.remove(j)
            running.append((end, taken))
            told[j] = (now, end)
            events = sorted({*events, end})
    return told


def _place(free: dict[int, int], n: int) -> tuple[dict[int, int], int]:
    """Devices by host, and whether they are spread: the tightest host with room, else the fullest."""
    inside = [h for h in free if free[h] >= n]
    if inside:
        return {min(inside, key=lambda h: (free[h], h)): n}, 0
    taken: dict[int, int] = {}
    if sum(free.values()) >= n:
        for h in sorted(free, key=lambda h: (-free[h], h)):
            if sum(taken.values()) < n and free[h]:
                taken[h] = min(n - sum(taken.values()), free[h])
    return taken, 1


def _shares(
    stream: TraceStream, now: float, jobs: dict[int, float], capacity: int, *, newcomer: bool
) -> tuple[dict[int, int], list[tuple[float, int]]] | None:
    """Minimum satisfactory shares by deadline: the level of each job now (-1: later) and (time, free) slots.

    None if a newcomer's deadline or one already promised cannot be kept.
    """
    slots = [(now, capacity)]
    level_now: dict[int, int] = {}
    for j in sorted(jobs, key=lambda i: stream.due_s[i]):
        due, time = float(stream.due_s[j]), stream.duration_s[j, 0, 0]
        tops = [q for q in range(len(LEVELS)) if np.isfinite(time[q])]
        for top in [*tops, None]:
            if top is None and newcomer:
                return None
            most = LEVELS[-1] if top is None else LEVELS[top]
            left, used = jobs[j], []
            for (begin, free), (end, _) in zip(slots, [*slots[1:], (np.inf, 0)], strict=True):
                some = [q for q in tops if LEVELS[q] <= min(free, most)]
                if begin >= due or left <= 1e-12 or not some:
                    continue
                fast = min(some, key=lambda q: time[q])
                finish = min(end, due, begin + left * time[fast])
                left -= (finish - begin) / time[fast]
                used.append((begin, finish, fast))
            if left <= 1e-9:
                break
        level_now[j] = next((q for begin, _, q in used if begin == now), -1)
        for begin, finish, q in used:
            borders = sorted({t for t, _ in slots} | {finish})
            room = [next(free for t, free in reversed(slots) if t <= border) for border in borders]
            slots = [
                (t, free - LEVELS[q] if begin <= t < finish else free)
                for t, free in zip(borders, room, strict=True)
            ]
    return level_now, slots


def _spend_spare(stream: TraceStream, running: dict[int, int], left: dict[int, float], capacity: int) -> None:
    """Spare devices, one level at a time, to the job that saves most device time for each of them."""
    while True:
        spare = capacity - sum(LEVELS[q] for q in running.values() if q >= 0)
        offers = []
        for j, q0 in running.items():
            time, have = stream.duration_s[j, 0, 0], LEVELS[q0] if q0 >= 0 else 0
            for q in range(q0 + 1, len(LEVELS)):
                faster = np.isfinite(time[q]) and (q0 < 0 or time[q] < time[q0])
                if faster and LEVELS[q] - have <= spare:
                    before = left[j] * time[q0] * have if q0 >= 0 else 1e200
                    offers.append(((before - left[j] * time[q] * LEVELS[q]) / (LEVELS[q] - have), j, q))
                    break
        if not offers:
            return
        _, j, q = max(offers, key=lambda offer: offer[0])
        running[j] = q


def plain_elasticflow(stream: TraceStream, capacity: int) -> dict[int, float]:
    """The end of each admitted job under ElasticFlow's rule, as the paper says it."""
    left: dict[int, float] = {}
    running: dict[int, int] = {}
    ends: dict[int, float] = {}
    arrivals = [(float(t), j) for j, t in enumerate(stream.arrival_s)]
    now, borders = 0.0, []
    while arrivals or left:
        time = stream.duration_s[:, 0, 0]
        done = [now + left[j] * time[j, q] for j, q in running.items() if q >= 0]
        then = min([*done, *(t for t, _ in arrivals[:1]), *borders])
        for j, q in running.items():
            left[j] -= (then - now) / time[j, q] if q >= 0 else 0.0
        now = then
        for j in [j for j in left if left[j] <= 1e-9]:
            ends[j] = now
            del left[j]
        while arrivals and arrivals[0][0] <= now:
            j = arrivals.pop(0)[1]
            if now + time[j].min() <= stream.due_s[j] and _shares(
                stream, now, left | {j: 1.0}, capacity, newcomer=True
            ):
                left[j] = 1.0
        running, slots = _shares(stream, now, left, capacity, newcomer=False) or ({}, [])
        running = {j: running[j] for j in left}
        _spend_spare(stream, running, left, capacity)
        borders = [t for t, _ in slots if t > now + 1e-6][:1]
    return ends
