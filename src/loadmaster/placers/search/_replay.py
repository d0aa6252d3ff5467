"""A plan run again after a small change, compiled: from the last snapshot that the change cannot touch.

The event loop of the simulator without memory and issue times. Transfers are booked when their producer
ends, so their arrivals are known at once and only ends of ops are events. The present plan's run leaves
*snapshots* of its state, evenly spread over its work; a changed plan resumes from the last one before the
first instant its change can matter, and is given up as soon as it cannot beat the limit (`tail`: the
longest way to an end), or has fallen behind the present plan at two snapshots in a row, or runs like it at
three. Giving up may miss a better plan; it never makes a worse one look better: what is not given up is
timed to the end.
"""

from typing import Any, NamedTuple

import numpy as np

from loadmaster.placers._copies import copy_into
from loadmaster.placers._heaps import heap_drop, heap_push
from loadmaster.simulator.events.kernel import HALF_DUPLEX, HOST, SHARED, ProblemArrays
from loadmaster.simulator.jit import kernel

NONE = -1
_BEHIND, _ALIKE = 1, 2  # more snapshots in a row than this end a run


class Tape(NamedTuple):
    """The present plan's run (N ops, E engines, L links or ports), K snapshots of it, and room to work in."""

    start_s: Any  # [N]
    end_s: Any  # [N]
    before: Any  # [N] the op that ran before it on its engine, or NONE
    missing: Any  # [N] inputs still to be made
    ready_s: Any  # [N] when the inputs made so far are all there
    wait_key: Any  # [E x N] heaps: ops whose inputs are on their way, by arrival
    wait_op: Any
    run_key: Any  # [E x N] heaps: ops that can start, by key
    run_op: Any
    length: Any  # [2, E] of those heaps
    running: Any  # [E] op or NONE
    until_s: Any  # [E] when its op ends or its first op arrives
    last: Any  # [E] last op started
    free_s: Any  # [L] when a link or port is free
    at_s: Any  # [K] instants of the snapshots, inf = not taken; row 0 is the start
    work_s: Any  # [K] work done by then
    kept_missing: Any  # [K, N]
    kept_ready_s: Any  # [K, N]
    kept_key: Any  # [K, 2, E, C]
    kept_op: Any  # [K, 2, E, C]
    kept_length: Any  # [K, 2, E]
    kept_running: Any  # [K, E]
    kept_until_s: Any  # [K, E]
    kept_last: Any  # [K, E]
    kept_free_s: Any  # [K, L]


def blank_tape(num_ops: int, num_engines: int, num_resources: int, *, snapshots: int, heap_room: int) -> Tape:
    """A tape with nothing on it."""
    n, e, k, c = num_ops, num_engines, snapshots, heap_room
    return Tape(
        start_s=np.zeros(n),
        end_s=np.zeros(n),
        before=np.full(n, NONE, dtype=np.int32),
        missing=np.zeros(n, dtype=np.int32),
        ready_s=np.zeros(n),
        wait_key=np.zeros(e * n),
        wait_op=np.zeros(e * n, dtype=np.int32),
        run_key=np.zeros(e * n),
        run_op=np.zeros(e * n, dtype=np.int32),
        length=np.zeros((2, e), dtype=np.int64),
        running=np.full(e, NONE, dtype=np.int32),
        until_s=np.zeros(e),
        last=np.full(e, NONE, dtype=np.int32),
        free_s=np.zeros(num_resources),
        at_s=np.full(k, np.inf),
        work_s=np.zeros(k),
        kept_missing=np.zeros((k, n), dtype=np.int32),
        kept_ready_s=np.zeros((k, n)),
        kept_key=np.zeros((k, 2, e, c)),
        kept_op=np.zeros((k, 2, e, c), dtype=np.int32),
        kept_length=np.zeros((k, 2, e), dtype=np.int64),
        kept_running=np.zeros((k, e), dtype=np.int32),
        kept_until_s=np.zeros((k, e)),
        kept_last=np.zeros((k, e), dtype=np.int32),
        kept_free_s=np.zeros((k, num_resources)),
    )


class Weights(NamedTuple):
    """What the ops of a problem weigh in a replay."""

    tail_s: Any  # [N] least time from an op's end to the end of the step
    work_s: Any  # [N] what an op adds to the work done; > 0
    total_s: float
    hop_s: Any  # [2, T, D] HOST: seconds to and from host memory; empty otherwise


@kernel
def replay(
    fixed: ProblemArrays,
    weights: Weights,
    links: int,
    device: Any,
    key: Any,
    tape: Tape,
    begin: int,
    limit_s: float,
) -> Any:
    """Run a plan by `key` from snapshot `begin` (0: from the start); its seconds, or inf where given up.

    With an infinite limit nothing is given up, and the run is recorded: spans, and snapshots after `begin`.
    """
    in_ptr, out_ptr, out_tensor = fixed.in_ptr, fixed.out_ptr, fixed.out_tensor
    use_ptr, use_op, route = fixed.use_ptr, fixed.use_op, fixed.route
    compute_s, kind, engine, tensor_bytes = fixed.compute_s, fixed.kind, fixed.engine, fixed.tensor_bytes
    transfer_s, latency_s, bytes_per_s = fixed.transfer_s, fixed.latency_s, fixed.bytes_per_s
    on_host, hop_s = fixed.on_host, weights.hop_s
    tail_s, work_s, total_s = weights.tail_s, weights.work_s, weights.total_s
    missing, ready_s, free_s = tape.missing, tape.ready_s, tape.free_s
    wait_key, wait_op, run_key, run_op = tape.wait_key, tape.wait_op, tape.run_key, tape.run_op
    length, running, until_s, last, at_s = tape.length, tape.running, tape.until_s, tape.last, tape.at_s
    num_ops, num_engines, hops, num_snapshots = len(device), len(running), route.shape[2], len(at_s)
    record = limit_s == np.inf
    stamp, arrival = np.full(len(kind), NONE, dtype=np.int32), np.zeros(len(kind))
    now, done_s, end_s, resumed = 0.0, 0.0, 0.0, begin > 0
    if resumed:
        now, done_s = at_s[begin], tape.work_s[begin]
        copy_into(missing, tape.kept_missing[begin])
        copy_into(ready_s, tape.kept_ready_s[begin])
        copy_into(running, tape.kept_running[begin])
        copy_into(until_s, tape.kept_until_s[begin])
        copy_into(last, tape.kept_last[begin])
        copy_into(free_s, tape.kept_free_s[begin])
        for e in range(num_engines):
            length[0, e], length[1, e] = tape.kept_length[begin, 0, e], tape.kept_length[begin, 1, e]
            for j in range(length[0, e]):
                wait_key[e * num_ops + j] = tape.kept_key[begin, 0, e, j]
                wait_op[e * num_ops + j] = tape.kept_op[begin, 0, e, j]
            for j in range(length[1, e]):
                run_key[e * num_ops + j] = tape.kept_key[begin, 1, e, j]
                run_op[e * num_ops + j] = tape.kept_op[begin, 1, e, j]
    else:
        ready_s[:] = 0.0
        running[:] = NONE
        until_s[:] = np.inf
        last[:] = NONE
        free_s[:] = 0.0
        length[:] = 0
        for i in range(num_ops):
            missing[i] = in_ptr[i + 1] - in_ptr[i]
            if missing[i] == 0:
                e = engine[device[i]]
                heap_push(run_key, run_op, e * num_ops, length[1, e], key[i], i)
                length[1, e] += 1
    following, behind, alike = begin + 1, 0, 0
    if record:
        for k in range(following, num_snapshots):
            at_s[k] = np.inf

    while True:
        if not resumed:  # idle engines start their next op
            for e in range(num_engines):
                if running[e] != NONE:
                    continue
                base = e * num_ops
                while length[0, e] > 0 and wait_key[base] <= now:
                    o = wait_op[base]
                    heap_drop(wait_key, wait_op, base, length[0, e])
                    length[0, e] -= 1
                    heap_push(run_key, run_op, base, length[1, e], key[o], o)
                    length[1, e] += 1
                if length[1, e] > 0:
                    o = run_op[base]
                    heap_drop(run_key, run_op, base, length[1, e])
                    length[1, e] -= 1
                    running[e] = o
                    until_s[e] = now + compute_s[o, kind[device[o]]]
                    if until_s[e] + tail_s[o] >= limit_s:
                        return np.inf
                    if record:
                        tape.start_s[o], tape.end_s[o], tape.before[o] = now, until_s[e], last[e]
                    last[e] = o
                else:
                    until_s[e] = wait_key[base] if length[0, e] > 0 else np.inf
            now = np.inf
            for e in range(num_engines):
                now = min(now, until_s[e])
            if now == np.inf:
                return end_s
            if following < num_snapshots and done_s * num_snapshots >= total_s * following:
                if record:
                    at_s[following], tape.work_s[following] = now, done_s
                    copy_into(tape.kept_missing[following], missing)
                    copy_into(tape.kept_ready_s[following], ready_s)
                    copy_into(tape.kept_running[following], running)
                    copy_into(tape.kept_until_s[following], until_s)
                    copy_into(tape.kept_last[following], last)
                    copy_into(tape.kept_free_s[following], free_s)
                    for e in range(num_engines):
                        tape.kept_length[following, 0, e] = length[0, e]
                        tape.kept_length[following, 1, e] = length[1, e]
                    for e in range(num_engines):
                        if max(length[0, e], length[1, e]) > tape.kept_op.shape[3]:
                            at_s[following] = np.inf  # too much to keep: this one cannot be resumed from
                            break
                        for j in range(length[0, e]):
                            tape.kept_key[following, 0, e, j] = wait_key[e * num_ops + j]
                            tape.kept_op[following, 0, e, j] = wait_op[e * num_ops + j]
                        for j in range(length[1, e]):
                            tape.kept_key[following, 1, e, j] = run_key[e * num_ops + j]
                            tape.kept_op[following, 1, e, j] = run_op[e * num_ops + j]
                elif now > at_s[following]:
                    behind, alike = behind + 1, 0
                elif now == at_s[following]:
                    alike += 1
                else:
                    behind, alike = 0, 0
                if behind > _BEHIND or alike > _ALIKE:
                    return np.inf
                following += 1
        resumed = False
        while True:  # ends of one instant, by op
            e, o = NONE, num_ops
            for f in range(num_engines):
                if until_s[f] == now and running[f] != NONE and running[f] < o:
                    e, o = f, running[f]
            if e == NONE:
                break
            running[e], until_s[e] = NONE, np.inf
            done_s += work_s[o]
            end_s = now
            here = device[o]
            for out in range(out_ptr[o], out_ptr[o + 1]):
                t = out_tensor[out]
                written = -1.0
                for use in range(use_ptr[t], use_ptr[t + 1]):
                    c = use_op[use]
                    to = device[c]
                    at = now
                    if to != here:
                        if stamp[to] != t:
                            stamp[to] = t
                            at = now
                            if links == SHARED:
                                for hop in range(hops):
                                    link = route[here, to, hop]
                                    if link >= 0:
                                        at = max(at, free_s[link])
                            elif links == HALF_DUPLEX:
                                at = max(at, free_s[here], free_s[to])
                            if links == HOST:
                                if written < 0.0:
                                    written = now
                                    if not on_host[here]:
                                        written = max(now, free_s[here]) + hop_s[0, t, here]
                                        free_s[here] = written
                                at = written
                                if not on_host[to]:
                                    at = max(at, free_s[to]) + hop_s[1, t, to]
                                    free_s[to] = at
                            elif transfer_s[t] >= 0:
                                at += transfer_s[t]
                            else:
                                at += latency_s[here, to] + tensor_bytes[t] / bytes_per_s[here, to]
                            if links == SHARED:
                                for hop in range(hops):
                                    link = route[here, to, hop]
                                    if link >= 0:
                                        free_s[link] = at
                            elif links == HALF_DUPLEX:
                                free_s[here] = at
                                free_s[to] = at
                            arrival[to] = at
                        at = arrival[to]
                    ready_s[c] = max(ready_s[c], at)
                    missing[c] -= 1
                    if missing[c] == 0:
                        f = engine[to]
                        if ready_s[c] <= now:
                            heap_push(run_key, run_op, f * num_ops, length[1, f], key[c], c)
                            length[1, f] += 1
                        else:
                            heap_push(wait_key, wait_op, f * num_ops, length[0, f], ready_s[c], c)
                            length[0, f] += 1
                            if running[f] == NONE:
                                until_s[f] = min(until_s[f], ready_s[c])
