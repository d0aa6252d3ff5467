"""Moment: what every device holds when it holds most, replayed from a simulated run.

The simulator says how high a peak is, not what stands in it. Its run fixes every start and end; here the same
storages are taken and let go of in the same order (docs/simulator.md, "One instant"), and every change is
written down. Summed up to a device's highest point, the changes are what it holds then: to the byte the peak
that the simulator gave.
"""

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadmaster.core.arrays import Floats, Longs
from loadmaster.core.plan import Plan
from loadmaster.core.problem import Links
from loadmaster.simulator.events.engine import Outcome, Simulator, is_unordered
from loadmaster.simulator.events.kernel import LOCAL, NO_HOLD, list_holds, list_moves


@dataclass(frozen=True, slots=True, eq=False)
class HeldMemory:
    """What one device holds at its peak. An op's residents and workspace, tensors made here or sent here."""

    resident_op: Longs  # ops whose resident bytes are here
    workspace_op: Longs  # ops that run at that moment
    tensor: Longs  # tensors that take memory here
    tensor_bytes: Longs  # bytes each of them takes
    peak_bytes: int


def replay_to_peaks(simulator: Simulator, plan: Plan) -> tuple[Outcome, list[HeldMemory]]:
    """The run of a plan, and what each of its devices holds at the first of its highest points."""
    if is_unordered(plan):
        plan = simulator.order_by_start(plan)
    outcome = simulator.run(plan)
    replay = _Replay(simulator, plan, outcome)
    replay.run()
    num = simulator.problem.cluster.num_devices
    return outcome, [replay.at_peak(device) for device in range(num)]


@dataclass(frozen=True, slots=True, eq=False)
class MemoryChanges:
    """Every change of what stands on a device beside its residents, in the order in which it happened."""

    time_s: Floats  # [C]
    device: Longs  # [C]
    tensor: Longs  # [C] -1 = workspace
    op: Longs  # [C] whose workspace it is, -1 = a tensor's bytes
    num_bytes: Longs  # [C] negative where memory is let go of


def memory_changes(simulator: Simulator, plan: Plan) -> tuple[Outcome, MemoryChanges]:
    """The run of a plan, and every change of its memory."""
    if is_unordered(plan):
        plan = simulator.order_by_start(plan)
    outcome = simulator.run(plan)
    replay = _Replay(simulator, plan, outcome)
    replay.run()
    return outcome, replay.list_changes()


class _Replay:
    """The same run once more, watching memory only."""

    def __init__(self, simulator: Simulator, plan: Plan, outcome: Outcome) -> None:
        fixed, problem = simulator.fixed, simulator.problem
        self.fixed, self.outcome, self.plan = fixed, outcome, plan
        self.links, self.host = problem.links, problem.links == Links.HOST
        ptr, target, tensor, of_use = list_moves(fixed, plan.device)
        hold_of, of_input, holders = list_holds(fixed, ptr, target, of_use, plan.device, self.host)
        self.num_tensors, self.num_moves, self.num_ops = len(fixed.tensor_op), len(target), len(plan.device)
        self.hold_of, self.of_input, self.holders = hold_of.tolist(), of_input.tolist(), holders.tolist()
        self.move_ptr, self.move_tensor, self.move_target = ptr.tolist(), tensor.tolist(), target.tolist()
        self.of_use, self.device = of_use.tolist(), plan.device.tolist()
        self.engine = fixed.engine[plan.device].tolist()
        self.waiting = np.diff(fixed.in_ptr).tolist()
        self.busy = [False] * fixed.num_engines
        sequence = np.argsort(plan.priority, kind="stable")
        self.turn = np.argsort(sequence, kind="stable").tolist()
        blocks = (
            fixed.on_host[plan.device[sequence]] & fixed.issue_s.any()
        )  # ops that the issuing thread runs
        self.blocking = sequence[blocks].tolist()[::-1]
        self.ended = [False] * self.num_ops
        self.lane_last: dict[int, int] = {}
        self.before: dict[int, list[int]] = {}  # the transfers that a transfer queues behind
        self.arrived = [False] * len(outcome.transfer_end)
        self.later: list[tuple[float, int]] = []  # transfers that were booked for a later time
        self.ends: list[tuple[float, int]] = []
        self.now = 0.0
        self.changes: list[tuple[int, int, int]] = []  # device, what, bytes
        self.times: list[float] = []  # of every change

    # ---- the run

    def run(self) -> None:
        """From the first start to the last end, instant by instant and round by round."""
        order = np.argsort(self.outcome.start_rank, kind="stable").tolist()
        start, next_op = self.outcome.op_start.tolist(), 0
        now, stuck = start[order[0]], False
        while True:
            self.now, begun = now, list[int]()
            ended = bool(self.ends) and self.ends[0][0] == now
            while self.ends and self.ends[0][0] == now:
                begun += self._end(heapq.heappop(self.ends)[1], now)
            begun += self._find_due_transfers(now, at_last=stuck)
            for transfer in begun:
                self._start_transfer(transfer)
            first = next_op
            while next_op < len(order) and start[order[next_op]] == now and self._may_start(order[next_op]):
                self._start_op(order[next_op])
                next_op += 1
            if stuck and next_op == first and not begun:  # only an issue at this very instant is left
                self._start_op(order[next_op])
                next_op += 1
            stuck = not (ended or begun or next_op > first)
            times = [heap[0][0] for heap in (self.ends, self.later) if heap]
            times += [start[op] for op in order[next_op : next_op + 1]]  # an op may wait to be issued
            if not times:
                break
            now = min(times)

    def _may_start(self, op: int) -> bool:
        while self.blocking and self.ended[self.blocking[-1]]:
            self.blocking.pop()
        issued = not self.blocking or self.turn[op] <= self.turn[self.blocking[-1]]
        return issued and self.waiting[op] == 0 and not self.busy[self.engine[op]]

    def _start_op(self, op: int) -> None:
        fixed, here = self.fixed, self.device[op]
        self.busy[self.engine[op]] = True
        self._change(here, self._workspace(op), int(fixed.workspace[op]))
        for tensor in fixed.out_tensor[fixed.out_ptr[op] : fixed.out_ptr[op + 1]].tolist():
            if self.hold_of[tensor] == tensor:
                self._change(here, tensor, int(fixed.home_bytes[tensor]))
        heapq.heappush(self.ends, (float(self.outcome.op_end[op]), op))

    def _end(self, code: int, now: float) -> list[int]:
        """An op or a transfer ends; gives the transfers that begin."""
        return self._end_op(code, now) if code < self.num_ops else self._arrive(code - self.num_ops, now)

    def _end_op(self, op: int, now: float) -> list[int]:
        fixed, here, begun = self.fixed, self.device[op], []
        self.busy[self.engine[op]], self.ended[op] = False, True
        self._change(here, self._workspace(op), -int(fixed.workspace[op]))
        for at in range(fixed.in_ptr[op], fixed.in_ptr[op + 1]):
            self._let_go(self.of_input[at], here)
        for tensor in fixed.out_tensor[fixed.out_ptr[op] : fixed.out_ptr[op + 1]].tolist():
            self._feed(tensor, LOCAL)
            if self.move_ptr[tensor + 1] > self.move_ptr[tensor]:
                if self.host and not fixed.on_host[here]:
                    begun += self._book(self.num_moves + tensor, (here,), now)
                else:
                    begun += self._book_moves(tensor, now)
            self._let_go(self.hold_of[tensor], here)
        return begun

    def _arrive(self, transfer: int, now: float) -> list[int]:
        self.arrived[transfer] = True
        written = transfer >= self.num_moves
        tensor = transfer - self.num_moves if written else self.move_tensor[transfer]
        source = self.device[self.fixed.tensor_op[tensor]]
        if written or not self.host or self.fixed.on_host[source]:
            self._let_go(self.hold_of[tensor], source)
        if written:
            return self._book_moves(tensor, now)
        self._feed(tensor, transfer)
        return []

    # ---- transfers

    def _book_moves(self, tensor: int, now: float) -> list[int]:
        found = []
        for move in range(self.move_ptr[tensor], self.move_ptr[tensor + 1]):
            found += self._book(move, self._lanes(tensor, self.move_target[move]), now)
        return found

    def _lanes(self, tensor: int, target: int) -> tuple[int, ...]:
        """What transfers queue for: the links of the route, both devices, or the port of the target."""
        if self.links == Links.PARALLEL or (self.host and self.fixed.on_host[target]):
            return ()
        source = self.device[self.fixed.tensor_op[tensor]]
        if self.links == Links.HALF_DUPLEX:
            return source, target
        if self.links != Links.SHARED:
            return (target,)
        route = self.fixed.route[source, target]
        return tuple(route[route >= 0].tolist())

    def _book(self, transfer: int, lanes: tuple[int, ...], now: float) -> list[int]:
        """The transfer itself if it begins now; else it is kept for later."""
        ahead = [self.lane_last[lane] for lane in lanes if lane in self.lane_last]
        self.lane_last.update(dict.fromkeys(lanes, transfer))
        if self.outcome.transfer_start[transfer] == now:
            return [transfer]
        self.before[transfer] = [each for each in ahead if not self.arrived[each]]
        heapq.heappush(self.later, (float(self.outcome.transfer_start[transfer]), transfer))
        return []

    def _find_due_transfers(self, now: float, *, at_last: bool) -> list[int]:
        """Transfers booked for now whose turn has come, also behind such as take no time; `at_last`: all."""
        due, found = [], dict[int, None]()
        while self.later and self.later[0][0] == now:
            due.append(heapq.heappop(self.later)[1])
        waiting = due
        while True:
            turn = [each for each in waiting if at_last or self._is_free(each, found, now)]
            if not turn:
                break
            found.update(dict.fromkeys(turn))
            waiting = [transfer for transfer in waiting if transfer not in found]
        for transfer in waiting:
            heapq.heappush(self.later, (now, transfer))
        return list(found)

    def _is_free(self, transfer: int, started: dict[int, None], now: float) -> bool:
        return all(
            self.arrived[ahead] or (ahead in started and self.outcome.transfer_end[ahead] <= now)
            for ahead in self.before.get(transfer, ())
        )

    def _start_transfer(self, transfer: int) -> None:
        heapq.heappush(self.ends, (float(self.outcome.transfer_end[transfer]), self.num_ops + transfer))
        if transfer >= self.num_moves:
            return  # a write to host memory takes none of a device
        tensor = self.move_tensor[transfer]
        if self.fixed.storage[tensor] >= 0:
            size = int(self.fixed.tensor_bytes[tensor])
            self._change(self.move_target[transfer], self.num_tensors + transfer, size)

    def _feed(self, tensor: int, move: int) -> None:
        for use in range(self.fixed.use_ptr[tensor], self.fixed.use_ptr[tensor + 1]):
            if self.of_use[use] == move:
                self.waiting[self.fixed.use_op[use]] -= 1

    # ---- what is written down

    def _let_go(self, hold: int, device: int) -> None:
        if hold == NO_HOLD:
            return
        self.holders[hold] -= 1
        if self.holders[hold] == 0:
            self._change(device, hold, -self._hold_bytes(hold))

    def _hold_bytes(self, hold: int) -> int:
        if hold < self.num_tensors:
            return int(self.fixed.home_bytes[hold])
        return int(self.fixed.tensor_bytes[self.move_tensor[hold - self.num_tensors]])

    def _workspace(self, op: int) -> int:
        return self.num_tensors + self.num_moves + op

    def _change(self, device: int, what: int, num_bytes: int) -> None:
        if num_bytes:
            self.changes.append((device, what, num_bytes))
            self.times.append(self.now)

    def list_changes(self) -> MemoryChanges:
        """All of them, as columns."""
        table: Any = np.array(self.changes, dtype=np.int64).reshape(-1, 3)
        device, what, size = table.T
        moved = np.concatenate([np.asarray(self.move_tensor, dtype=np.int64), [-1]])
        copied = np.clip(what - self.num_tensors, -1, self.num_moves)
        tensor = np.where(what < self.num_tensors, what, moved[copied])
        op = np.where(what < self._workspace(0), -1, what - self._workspace(0))
        return MemoryChanges(np.array(self.times), device, tensor, op, size)

    def at_peak(self, device: int) -> HeldMemory:
        """What stands on a device at its highest point."""
        fixed = self.fixed
        table: Any = np.array(self.changes, dtype=np.int64).reshape(-1, 3)
        _, what, size = table[table[:, 0] == device].T
        height = np.concatenate([[0], np.cumsum(size)])
        top = int(height.argmax())
        live = np.bincount(what[:top], size[:top].astype(np.float64), self._workspace(self.num_ops))
        standing = np.flatnonzero(live)
        holds, running = standing[standing < self._workspace(0)], standing[standing >= self._workspace(0)]
        moved = np.asarray(self.move_tensor, dtype=np.int64)
        home = holds < self.num_tensors
        tensor = holds.copy()
        tensor[~home] = moved[holds[~home] - self.num_tensors]
        resident = np.flatnonzero((self.plan.device == device) & (fixed.resident > 0))
        return HeldMemory(
            resident_op=resident.astype(np.int64),
            workspace_op=running - self._workspace(0),
            tensor=tensor,
            tensor_bytes=live[holds].astype(np.int64),
            peak_bytes=int(height[top]) + int(fixed.resident[resident].sum()),
        )
