"""The group-level replay, compiled: segments in order on every device, transfers and sums on shared links.

One pass over segments: each starts on a device when the device is free and what it reads has arrived.
Transfers are booked on the links of their route in the order of segments; gradients are summed in
buckets when enough of them are ready. It is the simulator's meaning at the size of groups;
`predict.op_level` confirms what it finds.
"""

import numpy as np

from loadmaster.core.arrays import Bools, Floats, Ints
from loadmaster.simulator.jit import kernel

BUCKET = 25.0 * 2**20
NONE, ALLREDUCE, SERVER = range(3)


@kernel
def book(
    source: int,
    target: int,
    size: float,
    ready: float,
    route: Ints,
    latency_s: Floats,
    bytes_per_s: Floats,
    link_free: Floats,
    link_busy: Floats,
) -> float:
    """Send bytes when all links of the route are free; when they arrive."""
    start = ready
    for hop in range(route.shape[2]):
        link = route[source, target, hop]
        if link >= 0 and link_free[link] > start:
            start = link_free[link]
    took = latency_s[source, target] + size / bytes_per_s[source, target]
    for hop in range(route.shape[2]):
        link = route[source, target, hop]
        if link >= 0:
            link_free[link] = start + took
            link_busy[link] += took
    arrived: float = start + took
    return arrived


@kernel
def replay(
    segment_group: Ints,
    seconds: Floats,  # [S, K, P]
    grid: Floats,  # [P]
    gradient: Floats,  # [S]
    gathered: Floats,  # [S] bytes of factors, whole
    edge_source: Ints,
    edge_of: Ints,
    edge_part: Floats,
    edge_full: Floats,
    update_s: Floats,  # [G, K]
    kind: Ints,
    route: Ints,
    latency_s: Floats,
    bytes_per_s: Floats,
    share: Floats,  # [G, D] 0 = not in the group
    start: Floats,  # [G, D] first row, as a share
    whole: Bools,  # [G] every device has all rows
    layout: Ints,  # [G]
    sync: Ints,  # [G]
    comm: Ints,  # [G] communicator, -1 = none
    server: Ints,  # [G]
    factor_s: Floats,  # [G, D] gradients made from all rows, at the end
    comm_of: Ints,  # [C + 1] edges of each communicator
    comm_source: Ints,
    comm_target: Ints,
    comm_part: Floats,  # share of the bytes on the edge
    comm_round: Ints,
    comm_latency: Floats,  # of the edge's round, for a bucket
    num_links: int,
    one_channel: bool,  # all sums wait for one another, and for no link (a published defect)
) -> tuple[float, Floats, Floats]:
    """Seconds of a step, seconds each device computes, seconds each link is busy."""
    num, devices = len(segment_group), share.shape[1]
    groups, comms = share.shape[0], len(comm_of) - 1
    end = np.zeros((num, devices))
    free, busy = np.zeros(devices), np.zeros(devices)
    link_free, link_busy = np.zeros(num_links), np.zeros(num_links)
    sum_free = link_free
    pending, pending_at = np.zeros(max(comms, 1)), np.zeros(max(comms, 1))
    channel, gather_free = np.zeros(max(comms, 1)), np.zeros(max(comms, 1))
    ready = np.zeros(devices)
    for s in range(num):
        g = segment_group[s]
        ready[:] = 0.0
        for e in range(edge_of[s], edge_of[s + 1]):
            a = edge_source[e]
            h = segment_group[a]
            part, full = edge_part[e], edge_full[e]
            if layout[h] == layout[g]:
                for d in range(devices):
                    if end[a, d] > ready[d]:
                        ready[d] = end[a, d]
                continue
            lead = 0
            while share[h, lead] <= 0.0:
                lead += 1
            for d in range(devices):
                if share[g, d] <= 0.0:
                    continue
                low, high = (0.0, 1.0) if whole[g] else (start[g, d], start[g, d] + share[g, d])
                home = d if share[h, d] > 0.0 else lead
                if whole[h] or part <= 0.0:
                    size = full + part * (high - low)
                    at = end[a, home]
                    if home != d and size > 0.0:
                        at = book(home, d, size, at, route, latency_s, bytes_per_s, link_free, link_busy)
                    if at > ready[d]:
                        ready[d] = at
                    continue
                for b in range(devices):
                    if share[h, b] <= 0.0:
                        continue
                    over = min(high, start[h, b] + share[h, b]) - max(low, start[h, b])
                    size = part * over if over > 1e-12 else 0.0
                    if b == home:
                        size += full
                    if size <= 0.0:
                        continue
                    at = end[a, b]
                    if b != d:
                        at = book(b, d, size, at, route, latency_s, bytes_per_s, link_free, link_busy)
                    if at > ready[d]:
                        ready[d] = at
        latest = 0.0
        for d in range(devices):
            if share[g, d] <= 0.0:
                continue
            x = 1.0 if whole[g] else share[g, d]
            p = 1
            while p < len(grid) - 1 and grid[p] < x:
                p += 1
            low_s, high_s = seconds[s, kind[d], p - 1], seconds[s, kind[d], p]
            took = low_s + (high_s - low_s) * (x - grid[p - 1]) / (grid[p] - grid[p - 1])
            begin = max(free[d], ready[d])
            end[s, d] = begin + took
            free[d] = begin + took
            busy[d] += took
            latest = max(latest, end[s, d])
        c = comm[g]
        if c < 0:
            continue
        if gathered[s] > 0.0:  # a ring beside the sums: every edge carries all rows but its target's
            begin, last = max(latest, gather_free[c]), -1
            finish = begin
            first = -1
            for d in range(devices):
                if share[g, d] <= 0.0:
                    continue
                if last >= 0:
                    size = gathered[s] * (1.0 - share[g, d])
                    at = book(last, d, size, begin, route, latency_s, bytes_per_s, link_free, link_busy)
                    finish = max(finish, at)
                else:
                    first = d
                last = d
            size = gathered[s] * (1.0 - share[g, first])
            at = book(last, first, size, begin, route, latency_s, bytes_per_s, link_free, link_busy)
            gather_free[c] = max(finish, at)
        if gradient[s] > 0.0:
            pending[c] += gradient[s]
            pending_at[c] = max(pending_at[c], latest)
            if pending[c] >= BUCKET:
                if one_channel:
                    sum_free = np.zeros(num_links)
                channel[c] = flush(
                    c,
                    pending[c],
                    max(pending_at[c], channel.max() if one_channel else channel[c]),
                    comm_of,
                    comm_source,
                    comm_target,
                    comm_part,
                    comm_round,
                    comm_latency,
                    route,
                    latency_s,
                    bytes_per_s,
                    sum_free,
                    link_busy,
                )
                pending[c], pending_at[c] = 0.0, 0.0
    for c in range(comms):
        if pending[c] > 0.0:
            if one_channel:
                sum_free = np.zeros(num_links)
            channel[c] = flush(
                c,
                pending[c],
                max(pending_at[c], channel.max() if one_channel else channel[c]),
                comm_of,
                comm_source,
                comm_target,
                comm_part,
                comm_round,
                comm_latency,
                route,
                latency_s,
                bytes_per_s,
                sum_free,
                link_busy,
            )
    total = 0.0
    for d in range(devices):
        at = free[d]
        more = 0.0
        for g in range(groups):
            if share[g, d] > 0.0:
                if comm[g] >= 0 and (sync[g] != SERVER or server[g] == d):
                    at = max(at, channel[comm[g]])
                if factor_s[g, d] > 0.0:
                    at = max(at, gather_free[comm[g]])
                    more += factor_s[g, d]
                if sync[g] != SERVER or server[g] == d:
                    more += update_s[g, kind[d]]
        free[d] = at + more
        busy[d] += more
        total = max(total, free[d])
    for c in range(comms):  # new weights come back from servers
        for g in range(groups):
            if comm[g] == c and sync[g] == SERVER:
                size = 0.0
                for s in range(num):
                    if comm[segment_group[s]] == c:
                        size += gradient[s]
                for e in range(comm_of[c], comm_of[c + 1]):
                    at = book(
                        comm_target[e],
                        comm_source[e],
                        size,
                        free[server[g]],
                        route,
                        latency_s,
                        bytes_per_s,
                        link_free,
                        link_busy,
                    )
                    total = max(total, at)
                break
    return total, busy, link_busy


@kernel
def flush(
    c: int,
    size: float,
    ready: float,
    comm_of: Ints,
    comm_source: Ints,
    comm_target: Ints,
    comm_part: Floats,
    comm_round: Ints,
    comm_latency: Floats,
    route: Ints,
    latency_s: Floats,
    bytes_per_s: Floats,
    link_free: Floats,
    link_busy: Floats,
) -> float:
    """Sum a bucket, round by round; when it is done."""
    begin, finish, turn = ready, ready, -1
    for e in range(comm_of[c], comm_of[c + 1]):
        if comm_round[e] != turn:
            turn = comm_round[e]
            begin = finish + comm_latency[e]
        at = book(
            comm_source[e],
            comm_target[e],
            size * comm_part[e],
            begin,
            route,
            latency_s,
            bytes_per_s,
            link_free,
            link_busy,
        )
        finish = max(finish, at)
    return finish
