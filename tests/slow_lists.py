"""List scheduling in plain Python: slow witnesses of the compiled passes, for links without contention.

Written from the words of the passes alone. Before every decision they look at everything anew, so that there
is no heap, no event and no stale entry to get wrong.
"""

import math
from collections.abc import Iterator

from loadmaster.placers.heuristic._list_kernel import NEVER, NOWHERE, WAITING, Rules
from loadmaster.placers.heuristic._lists import Lists


class SlowList:
    """The list scheduler as its words say, for parallel links: everything is looked at anew each time."""

    def __init__(self, lists: Lists, rules: Rules) -> None:
        graph, self.problem, self.rules = lists.problem.graph, lists.problem, rules
        self.num_ops, self.num_devices = graph.num_ops, lists.problem.cluster.num_devices
        self.maker: list[int] = graph.tensor_op.tolist()
        self.inputs: list[list[int]] = [[] for _ in range(self.num_ops)]
        for tensor, op in zip(graph.use_tensor.tolist(), graph.use_op.tolist(), strict=True):
            self.inputs[op].append(tensor)
        self.unit: list[int] = rules.unit.tolist()
        self.seconds: list[list[float]] = lists.problem.device_compute_s.tolist()
        self.engine: list[int] = lists.problem.cluster.engine.tolist()
        self.key: list[float] = rules.key.tolist()
        self.now = 0.0
        self.device: dict[int, int] = {}
        self.end: dict[int, float] = {}
        self.ended: set[int] = set()
        self.home: dict[int, int] = {}  # device of a unit
        self.used = [0.0] * self.num_devices
        self.copies: set[tuple[int, int]] = set()  # (tensor, device)
        self.shut: set[tuple[int, int]] = set()  # (op, device): no room there, for good
        self.last: dict[int, int] = {}  # last op of a device
        self.came: dict[int, int] = {}  # which op became ready as how manieth
        self.urgent: dict[int, float] = {}  # when an op that became ready can start anywhere
        self.left_alone = False  # a device waited for a transfer while no op ran

    def run(self) -> tuple[list[int], list[int]]:
        """Device, and position in the order of starts, of every op."""
        self._look()
        while len(self.device) < self.num_ops:
            found, wakes = self._choose()
            if found is not None:
                self.commit(*found)
            elif not self._advance(wakes):
                self._force()
        order = list(self.device)  # dictionaries keep the order of commitment
        return [self.device[op] for op in range(self.num_ops)], [
            order.index(op) for op in range(self.num_ops)
        ]

    def _ready(self) -> list[int]:
        return [op for op in range(self.num_ops) if op not in self.device and self._made(op)]

    def _made(self, op: int) -> bool:
        return all(self.maker[tensor] in self.ended for tensor in self.inputs[op])

    def _look(self) -> None:
        """Ops that have become ready."""
        for op in self._ready():
            if op not in self.came:
                self.came[op] = len(self.came)
                places = [d for d in range(self.num_devices) if self.may(op, d)]
                self.urgent[op] = max([self.now, *(self.there(op, d) for d in places)])
                if self.rules.first_come:
                    self.key[op] = self.came[op]

    def may(self, op: int, d: int) -> bool:
        """Whether an op may go to a device, memory apart."""
        unit = self.unit[op]
        return bool(self.rules.allowed[unit, d]) and self.home.get(unit, d) == d

    def there(self, op: int, d: int) -> float:
        """When all inputs are on a device."""
        return max([0.0, *(self._arrival(tensor, d) for tensor in self.inputs[op])])

    def _arrival(self, tensor: int, d: int) -> float:
        source = self.device[self.maker[tensor]]
        return self.end[self.maker[tensor]] + (0.0 if source == d else self._send_s(tensor, source, d))

    def _send_s(self, tensor: int, source: int, d: int) -> float:
        given = float(self.problem.costs.transfer_s[tensor])
        if given >= 0:
            return given
        cluster = self.problem.cluster
        links = [link for link in cluster.route[source, d].tolist() if link >= 0]
        rate = min(float(cluster.link_bytes_per_s[link]) for link in links)
        latency = sum(float(cluster.link_latency_s[link]) for link in links)
        return latency + int(self.problem.graph.tensor_bytes[tensor]) / rate

    def _idle(self) -> Iterator[int]:
        busy = {self.engine[self.device[op]] for op in self.device if op not in self.ended}
        return (d for d in range(self.num_devices) if self.engine[d] not in busy)

    def more(self, op: int, d: int) -> float:
        """Bytes of copies that stay on a device."""
        new = [t for t in self.inputs[op] if self.device[self.maker[t]] != d and (t, d) not in self.copies]
        return float(sum(int(self.problem.graph.tensor_bytes[t]) for t in new if self.rules.standing[t]))

    def _fits(self, op: int, d: int) -> bool:
        """Whether there is room; what fits nowhere may go where most is left."""
        unit, left = self.unit[op], [r - u for r, u in zip(self.rules.room.tolist(), self.used, strict=True)]
        need = float(self.rules.footprint[unit])
        if unit in self.home or need + self.more(op, d) <= left[d]:
            return True
        most = max(left[other] for other in range(self.num_devices) if self.rules.allowed[unit, other])
        return bool(left[d] == most < need)

    def _choose(self) -> tuple[tuple[int, int] | None, list[float]]:
        """The best op and its device, and when devices that wait look again."""
        offers, wakes = [], []
        for d in self._idle():
            first, wake = self._favourite(d)
            if wake is not None:
                wakes.append(wake)
                continue
            could = [op for op in self._ready() if self.may(op, d) and self.there(op, d) <= self.now]
            could = sorted(
                (op for op in could if (op, d) not in self.shut), key=lambda op: (self.key[op], op)
            )
            if first is not None and self._fits(first, d):
                could = [first]
            for op in could:
                if self._fits(op, d):
                    finish = self.now + self.seconds[op][d]
                    offers.append((self.key[op], op, finish, self.there(op, d), d))
                    break
                self.shut.add((op, d))
        best = min(offers, default=None)
        return (None if best is None else (best[1], best[4])), wakes

    def _favourite(self, d: int) -> tuple[int | None, float | None]:
        """The favourite that comes first on an idle device, or the time until which it is waited for."""
        child = int(self.rules.favourite[self.last[d]]) if d in self.last else NOWHERE
        if self.rules.awake == NEVER or child == NOWHERE or child in self.device or not self.may(child, d):
            return None, None
        unit = self.unit[child]
        if unit not in self.home and self.used[d] + self.rules.footprint[unit] > self.rules.room[d]:
            return None, None
        here = max(self.now, self.there(child, d)) if self._made(child) else math.inf
        if self.rules.awake == WAITING:
            return self._patient(d, child, here)
        return self._published(d, child, here)

    def _patient(self, d: int, child: int, here: float) -> tuple[int | None, float | None]:
        """Until the transfer that staying saves would be over, also while the child's other parents run."""
        until = self.end[self.last[d]] + float(self.rules.patience_s[self.last[d]])
        if here <= self.now:
            return child, None
        running = any(op not in self.ended for op in self.device)
        self.left_alone |= self.now < until and here < math.inf and not running
        return None, min(here, until) if self.now < until and (running or here < math.inf) else None

    def _published(self, d: int, child: int, here: float) -> tuple[int | None, float | None]:
        """Only for a child that is ready, and would start nowhere sooner; an urgent op goes first."""
        allowed = [e for e in range(self.num_devices) if self.rules.allowed[self.unit[child], e]]
        if here == math.inf or here > min(max(self.now, self.there(child, e)) for e in allowed):
            return None, None
        waiting = [(self.urgent[op], op) for op in self._ready()]
        when, urgent = min(waiting)
        if when <= self.now and urgent != child:
            return None, None
        if here <= self.now:
            return child, None
        return (None, min(here, when)) if min(here, when) > self.now else (None, None)

    def commit(self, op: int, d: int) -> None:
        """Start an op now."""
        self.used[d] += self.more(op, d)
        if self.unit[op] not in self.home:
            self.used[d] += float(self.rules.footprint[self.unit[op]])
            self.home[self.unit[op]] = d
        self.copies.update((tensor, d) for tensor in self.inputs[op])
        self.device[op], self.last[d] = d, op
        self.end[op] = self.now + self.seconds[op][d]

    def _advance(self, wakes: list[float]) -> bool:
        """On to the next end, arrival or awakening, if there is one."""
        running = [self.end[op] for op in self.device if op not in self.ended]
        coming = [self.there(op, d) for op in self._ready() for d in self._idle() if self.may(op, d)]
        times = [*running, *(at for at in (*coming, *wakes) if at > self.now)]
        if not times:
            return False
        self.now = min(times)
        self.ended.update(op for op in self.device if self.end[op] <= self.now)
        self._look()
        return True

    def _force(self) -> None:
        """Memory shut an op out of every device: its unit gets the roomiest."""
        op = self._ready()[0]
        unit = self.unit[op]
        if unit not in self.home:
            left = [r - u for r, u in zip(self.rules.room.tolist(), self.used, strict=True)]
            allowed = [d for d in range(self.num_devices) if self.rules.allowed[unit, d]]
            self.home[unit] = max(allowed, key=lambda d: left[d])
            self.used[self.home[unit]] += float(self.rules.footprint[unit])
        self.shut -= {(op, self.home[unit])}


class SlowInsert:
    """Insertion as its words say: every gap of every device is tried."""

    def __init__(self, lists: Lists, rules: Rules) -> None:
        self.slow = SlowList(lists, rules)
        self.rules = rules
        self.busy: dict[int, list[tuple[float, float]]] = {}  # of an engine
        self.start: dict[int, float] = {}

    def run(self, order: list[int], wanted: list[int]) -> tuple[list[int], list[float]]:
        """Device and start of every op; `wanted` names devices to take, or NOWHERE."""
        for op in order:
            self._place(op, wanted[op])
        num = len(order)
        return [self.slow.device[op] for op in range(num)], [self.start[op] for op in range(num)]

    def _place(self, op: int, wanted: int) -> None:
        slow = self.slow
        unit = slow.unit[op]
        choices = [d for d in range(slow.num_devices) if slow.may(op, d)]
        begins = {d: self._first_gap(op, d) for d in choices}
        best = min(choices, key=lambda d: (self._over(op, d), begins[d] + slow.seconds[op][d], d))
        if wanted in choices and (self._over(op, wanted) == 0 or len(choices) == 1):
            best = wanted
        elif wanted in choices:  # asked for first, so that it wins a tie
            rating = {d: (self._over(op, d), begins[d] + slow.seconds[op][d]) for d in choices}
            best = wanted if rating[wanted] == rating[best] else best
        slow.now = self.start[op] = begins[best]
        if slow.seconds[op][best] > 0:
            span = (begins[best], begins[best] + slow.seconds[op][best])
            self.busy.setdefault(slow.engine[best], []).append(span)
        assert slow.home.get(unit, best) == best
        slow.commit(op, best)

    def _over(self, op: int, d: int) -> float:
        slow, unit = self.slow, self.slow.unit[op]
        if unit in slow.home:
            return 0.0
        need = slow.used[d] + float(self.rules.footprint[unit]) + slow.more(op, d)
        return float(max(0.0, need - self.rules.room[d]))

    def _first_gap(self, op: int, d: int) -> float:
        """The least time from which on nothing else runs for as long as the op takes."""
        ready, seconds = self.slow.there(op, d), self.slow.seconds[op][d]
        busy = self.busy.get(self.slow.engine[d], [])
        begins = [ready, *(end for _, end in busy if end >= ready)]
        return min(at for at in begins if all(at + seconds <= start or at >= end for start, end in busy))
