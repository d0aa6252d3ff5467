"""Time of one training step of a partitioned job on given servers (sections 2.2 and 2.5 of PAC-ML's rules).

Each server runs its sub-ops under preemptive fixed priority, shortest first. Transfers run in parallel.
The exchange of
a split op with its neighbours is one collective where the same servers send and receive. Cost O(edges +
ops log ops).
"""

# mypy: allow-untyped-defs, allow-untyped-calls
# Kernels are typed by numba.

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadmaster.advisor.environments.blocks import RACKS, SERVERS
from loadmaster.advisor.environments.profile import TRAINING_STEPS, JobGraph
from loadmaster.advisor.environments.rules import COMPAT, Rules
from loadmaster.simulator.jit import kernel

QUANTUM = 0.01  # an op is not split into parts shorter than this
_LATENCY_S = 50e-9 + 2 * 100e-9
_BYTES_PER_S = 4e11  # of a node towards one group
_X = 4.0  # groups, racks and servers are counted in fours


@dataclass(frozen=True, slots=True)
class StepTime:
    """What one simulated step came to."""

    step: float  # in the unit of the op times
    num_nodes: int
    num_edges: int  # data and sync edges


def split_counts(graph: JobGraph, degree: int) -> NDArray[np.int64]:
    """Into how many parts each op is split at a degree; both twins alike."""
    n = graph.num_forward
    parts = np.ceil(graph.compute_ms[:n] / QUANTUM)
    counts = np.maximum(1, np.minimum(2 * np.ceil(parts / 2), degree)).astype(np.int64)
    return np.concatenate([counts, counts[::-1]])


def time_step(
    graph: JobGraph, counts: NDArray[np.int64], servers: NDArray[np.int64], rules: Rules = COMPAT
) -> StepTime:
    """One step; `servers` [2N, k] names the server of every sub-op."""
    scale = 1.0 if rules.ms_read_as_s else 1e-3
    n2 = len(counts)
    flags = np.array(
        [
            rules.bandwidth_divided_twice,
            rules.no_rack_contention,
            rules.free_within_rack,
            rules.parameters_on_edges,
        ]
    )
    shortest_first = np.lexsort((-np.arange(n2), graph.compute_ms / counts))  # of equal ones the later op
    rank = np.argsort(shortest_first)
    step, edges = _simulate_step(
        graph.compute_ms * scale,
        graph.memory_bytes,
        graph.activation_bytes,
        graph.split_order,
        graph.edge,
        counts,
        servers,
        rank,
        n2 // 2,
        flags,
    )
    return StepTime(step / scale, int(counts.sum()), int(edges))


def completion_time(step: StepTime) -> float:
    """Time of all training steps."""
    return TRAINING_STEPS * step.step


@kernel
def _collective_s(m, used, flags):
    """A collective of m bytes over the servers in `used`."""
    c_seen = np.zeros(64, np.int64)
    r_seen = np.zeros(64, np.int64)
    s_seen = np.zeros(64, np.int64)
    rack_load = np.zeros(64, np.int64)
    total = 0
    for i in range(len(used)):
        if used[i]:
            total += 1
            c_seen[i // (RACKS * SERVERS)] = 1
            r_seen[(i // SERVERS) % RACKS] = 1
            s_seen[i % SERVERS] = 1
            rack_load[i // SERVERS] += 1
    if total <= 1:
        return 0.0
    c, r, s = c_seen.sum(), r_seen.sum(), s_seen.sum()
    groups = np.array([float(c), float(min(c, s)), float(r), np.ceil(s / _X)])
    if not flags[2]:  # what the published groups leave out
        groups[3] = np.ceil(total / (groups[0] * groups[1] * groups[2]))
    rate = _BYTES_PER_S / _X if flags[0] else _BYTES_PER_S
    if not flags[1]:
        rate /= rack_load.max()
    comm = 0.0
    comp = 0.0
    for i in range(4):
        d = groups[i]
        m = np.ceil(m / d)
        if d > 1:
            log = np.ceil(np.log2(d))
            comm += _LATENCY_S + m / (max(1.0, min(_X, np.floor(_X / (d - 1)))) * rate)
            comp += log * (m / 2) / min(2e12 * log / (2 * (d + 1)), 130e12)
    return 2 * comm + comp


@kernel
def _edge_total(u, v, counts, order, memory, activation, flags):
    """Bytes over all sub-edges of an edge."""
    if not flags[3]:
        return activation[u]
    if counts[u] > 1 and (counts[v] == 1 or order[u] > order[v]):
        return memory[v]
    return memory[u]


@kernel
def _heap_push(heap, size, time, item, times):
    times[item] = time
    i = size
    heap[i] = item
    while i > 0:
        up = (i - 1) // 2
        if times[heap[up]] <= times[heap[i]]:
            break
        heap[up], heap[i] = heap[i], heap[up]
        i = up
    return size + 1


@kernel
def _heap_pop(heap, size, keys):
    size -= 1
    heap[0] = heap[size]
    i = 0
    while True:
        low = 2 * i + 1
        if low >= size:
            break
        if low + 1 < size and keys[heap[low + 1]] < keys[heap[low]]:
            low += 1
        if keys[heap[i]] <= keys[heap[low]]:
            break
        heap[low], heap[i] = heap[i], heap[low]
        i = low
    return size


@kernel
def _simulate_step(compute, memory, activation, order, edges, counts, servers, rank, n, flags):
    """The end of the last op or edge, and the number of edges."""
    num_ops = len(counts)
    num_servers = servers.max() + 1
    base = np.zeros(num_ops + 1, np.int64)
    for op in range(num_ops):
        base[op + 1] = base[op] + counts[op]
    total = base[num_ops]
    # bundles: out-edges of a split forward op, in-edges of a split backward op
    bundle = np.full(len(edges), -1.0)
    for op in range(num_ops):
        if counts[op] == 1:
            continue
        side = 0 if op < n else 1
        sent = np.zeros(num_servers, np.int64)
        got = np.zeros(num_servers, np.int64)
        m = 0.0
        any_edge = False
        for e in range(len(edges)):
            if edges[e, side] != op:
                continue
            u, v = edges[e, 0], edges[e, 1]
            any_edge = True
            m += _edge_total(u, v, counts, order, memory, activation, flags)
            for i in range(counts[u]):
                sent[servers[u, i]] += counts[v]
            for j in range(counts[v]):
                got[servers[v, j]] += counts[u]
        if any_edge and np.all(sent == got):
            time = _collective_s(m, sent > 0, flags)
            for e in range(len(edges)):
                if edges[e, side] == op:
                    bundle[e] = time
    # adjacency by op
    out_first = np.zeros(num_ops + 1, np.int64)
    for e in range(len(edges)):
        out_first[edges[e, 0] + 1] += 1
    for op in range(num_ops):
        out_first[op + 1] += out_first[op]
    out_edge = np.empty(len(edges), np.int64)
    fill = out_first.copy()
    missing = np.zeros(total, np.int64)
    num_edges = 0
    for e in range(len(edges)):
        u, v = edges[e, 0], edges[e, 1]
        out_edge[fill[u]] = e
        fill[u] += 1
        num_edges += counts[u] * counts[v]
        for j in range(counts[v]):
            missing[base[v] + j] += counts[u]
    for op in range(n, num_ops):
        num_edges += counts[op] * (counts[op] - 1)
    op_of = np.empty(total, np.int64)
    where = np.empty(total, np.int64)
    left = np.empty(total)
    key = np.empty(total)
    for op in range(num_ops):
        for j in range(counts[op]):
            item = base[op] + j
            op_of[item] = op
            where[item] = servers[op, j]
            left[item] = compute[op] / counts[op]
            key[item] = rank[op] * 1024.0 + j
    ready_at = np.zeros(total)
    heap = np.empty(total + 1, np.int64)
    heap_time = np.empty(total)
    size = 0
    for item in range(total):
        if missing[item] == 0:
            size = _heap_push(heap, size, 0.0, item, heap_time)
    waiting = np.empty((num_servers, total), np.int64)
    num_waiting = np.zeros(num_servers, np.int64)
    running = np.full(num_servers, -1)
    began = np.zeros(num_servers)
    ends = np.full(num_servers, np.inf)
    now = 0.0
    last = 0.0
    while True:
        next_time = heap_time[heap[0]] if size > 0 else np.inf
        first = -1
        for s in range(num_servers):
            if ends[s] < next_time or (ends[s] == next_time and first < 0 and ends[s] < np.inf):
                next_time = ends[s]
                first = s
        if next_time == np.inf:
            break
        now = next_time
        if first >= 0:  # an op ends
            item = running[first]
            running[first] = -1
            ends[first] = np.inf
            last = max(last, now)
            op = op_of[item]
            if op >= n and counts[op] > 1:  # sync edges only delay the end
                both = np.zeros(num_servers, np.bool_)
                for j in range(counts[op]):
                    other = servers[op, j]
                    if other != first and memory[op] > 0:
                        both[first] = True
                        both[other] = True
                        m = 2 * memory[op] / counts[op]
                        last = max(last, now + _collective_s(m, both, flags))
                        both[other] = False
            for a in range(out_first[op], out_first[op + 1]):
                e = out_edge[a]
                v = edges[e, 1]
                whole = _edge_total(op, v, counts, order, memory, activation, flags)
                size_bytes = whole / (counts[op] * counts[v])
                for j in range(counts[v]):
                    after = base[v] + j
                    arrival = now
                    if where[after] != first and size_bytes > 0:
                        if bundle[e] >= 0:
                            arrival = now + bundle[e]
                        else:
                            arrival = now + _LATENCY_S + size_bytes / _BYTES_PER_S
                    ready_at[after] = max(ready_at[after], arrival)
                    last = max(last, arrival)
                    missing[after] -= 1
                    if missing[after] == 0:
                        size = _heap_push(heap, size, ready_at[after], after, heap_time)
            s = first
        else:  # an op becomes ready
            item = heap[0]
            size = _heap_pop(heap, size, heap_time)
            s = where[item]
            row = waiting[s]
            num_waiting[s] = _push_key(row, num_waiting[s], item, key)
            if running[s] >= 0 and key[item] < key[running[s]]:
                left[running[s]] -= now - began[s]
                num_waiting[s] = _push_key(row, num_waiting[s], running[s], key)
                running[s] = -1
        if running[s] < 0 and num_waiting[s] > 0:
            row = waiting[s]
            running[s] = row[0]
            num_waiting[s] = _heap_pop(row, num_waiting[s], key)
            began[s] = now
            ends[s] = now + left[running[s]]
    return last, num_edges


@kernel
def _push_key(heap, size, item, keys):
    i = size
    heap[i] = item
    while i > 0:
        up = (i - 1) // 2
        if keys[heap[up]] <= keys[heap[i]]:
            break
        heap[up], heap[i] = heap[i], heap[up]
        i = up
    return size + 1
