"""The reference simulator: a second, independent one in plain Python, the witness of the compiled one.

Written from the meaning in the architecture note alone; it shares nothing with the package but the
nouns. Event-driven, O((ops + uses + transfers) log), clear before fast.

At one instant, in this order: op ends (by op index; each frees, feeds its consumers on the device, books
its transfers), arrivals (by tensor; writes to host memory last), issues, starts of transfers, starts of
ops. What starts and takes no time ends in another such round at the same instant.
"""

import heapq
import math
from dataclasses import dataclass

from loadmaster.core.cluster import NO_LINK
from loadmaster.core.errors import PlanError, ProblemError
from loadmaster.core.graph import NO_STORAGE, Phase
from loadmaster.core.plan import Plan
from loadmaster.core.problem import Links, Load, Problem

NEVER = math.inf
END, ARRIVAL, ISSUE, SEND = range(4)  # what an event is, in the order of one instant


@dataclass
class Result:
    """When everything ran; an op that never ran starts and ends at infinity."""

    op_start: list[float]
    op_end: list[float]
    transfers: list[tuple[int, int, int, float, float]]  # tensor, source, target, start, end; as booked
    peak_bytes: list[int]  # per device
    step_s: float
    stuck: list[int]  # ops that never ran


@dataclass(slots=True)
class Memory:
    """A piece of a device's memory and how many ends must still come before it is given back."""

    device: int
    num_bytes: int
    needs: int = 0
    kept: bool = False


def simulate(problem: Problem, plan: Plan, *, dispatch: str, links: str) -> Result:
    """Run the plan on paper; `dispatch` is 'in_order' or 'ready', `links` one of `Links`."""
    if dispatch not in ("in_order", "ready"):
        raise PlanError(f"dispatch {dispatch!r} is neither 'in_order' nor 'ready'")
    return _Step(problem, plan, dispatch, Links(links)).run()


class _Tables:
    """The nouns' columns as plain lists, seen from one plan."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        graph, cluster, costs = problem.graph, problem.cluster, problem.costs
        self.num_ops = graph.num_ops
        self.device: list[int] = plan.device.tolist()
        kind: list[int] = cluster.kind.tolist()
        engine: list[int] = cluster.engine.tolist()
        self.engine = [engine[d] for d in self.device]
        self.on_host: list[bool] = cluster.on_host[cluster.kind].tolist()
        compute_s: list[list[float]] = costs.compute_s.tolist()
        self.compute_s = [compute_s[op][kind[d]] for op, d in enumerate(self.device)]
        self.workspace: list[int] = graph.workspace_bytes.tolist()
        self.resident: list[int] = graph.resident_bytes.tolist()
        self.is_param: list[bool] = (graph.phase == Phase.PARAM).tolist()
        self.producer: list[int] = graph.tensor_op.tolist()
        self.tensor_bytes: list[int] = graph.tensor_bytes.tolist()
        self.storage: list[int] = graph.tensor_storage.tolist()
        self.keep: list[bool] = graph.keep.tolist()
        self.outputs: list[list[int]] = [[] for _ in range(graph.num_ops)]
        for tensor, op in enumerate(self.producer):
            self.outputs[op].append(tensor)
        self.inputs: list[list[int]] = [[] for _ in range(graph.num_ops)]
        # The users of a tensor by device; a dict keeps the order of the devices' first consumers.
        self.users: list[dict[int, list[int]]] = [{} for _ in self.producer]
        for op, tensor in sorted(zip(graph.use_op.tolist(), graph.use_tensor.tolist(), strict=True)):
            self.inputs[op].append(tensor)
            self.users[tensor].setdefault(self.device[op], []).append(op)
        self.home = [self.device[op] for op in self.producer]
        self.targets = [[d for d in self.users[t] if d != self.home[t]] for t in range(len(self.home))]


class _Network:
    """What a transfer occupies and how long; the free times of links, devices or ports."""

    def __init__(self, problem: Problem, tables: _Tables, links: Links) -> None:
        self.cluster, self.links, self.tables = problem.cluster, links, tables
        self.given_s: list[float] = problem.costs.transfer_s.tolist()
        self.free_s: dict[int, float] = {}  # by link (shared) or by device (half-duplex, host)
        self.routes: dict[tuple[int, int], tuple[list[int], float, float]] = {}
        self.host = tables.on_host.index(True) if True in tables.on_host else None

    def book(self, tensor: int, source: int, target: int, now: float) -> tuple[float, float]:
        """Start and end of a transfer booked now; source == target is a write to host memory."""
        occupied = self._occupied(source, target)
        start = max([now, *(self.free_s.get(resource, 0.0) for resource in occupied)])
        end = start + self.seconds(tensor, source, target)
        for resource in occupied:
            self.free_s[resource] = end
        return start, end

    def _occupied(self, source: int, target: int) -> list[int]:
        if self.links == Links.SHARED:
            return self._route(source, target)[0]
        if self.links == Links.HALF_DUPLEX:
            return [source, target]
        if self.links == Links.HOST and not self.tables.on_host[target]:
            return [target]  # the port of the reader, or of the writer (its own target)
        return []

    def seconds(self, tensor: int, source: int, target: int) -> float:
        if self.links == Links.HOST and self.tables.on_host[target]:
            return 0.0
        if self.given_s[tensor] >= 0:
            return self.given_s[tensor]
        if self.links == Links.HOST:
            source, target = self._through_host(source, target)
        _, latency_s, bytes_per_s = self._route(source, target)
        return latency_s + self.tables.tensor_bytes[tensor] / bytes_per_s

    def _through_host(self, source: int, target: int) -> tuple[int, int]:
        if self.host is None:
            raise ProblemError("links 'host' without a device on a host: give every transfer time")
        return (source, self.host) if source == target else (self.host, target)

    def _route(self, source: int, target: int) -> tuple[list[int], float, float]:
        """Links, summed latency and slowest rate from one device to another."""
        if (source, target) not in self.routes:
            route = [link for link in self.cluster.route[source, target].tolist() if link != NO_LINK]
            latency_s = 0.0
            for link in route:  # not sum(), which adds floats in another way from Python 3.12 on
                latency_s += float(self.cluster.link_latency_s[link])
            slowest = min(float(self.cluster.link_bytes_per_s[link]) for link in route)
            self.routes[source, target] = route, latency_s, slowest
        return self.routes[source, target]


class _Ledger:
    """Memory in use on every device, its peak, and where every tensor lives."""

    def __init__(self, tables: _Tables, num_devices: int, links: Links) -> None:
        self.tables = tables
        self.used = [0] * num_devices
        for op, num_bytes in enumerate(tables.resident):
            self.used[tables.device[op]] += num_bytes
        self.peak = list(self.used)
        self.lives_in: dict[tuple[int, int], Memory] = {}  # by tensor and device
        views_last = sorted(range(len(tables.producer)), key=lambda t: (tables.producer[t], self.is_view(t)))
        for tensor in views_last:  # by producer: what a view looks at is known before the view
            self._settle(tensor, through_host=links == Links.HOST)

    def is_view(self, tensor: int) -> bool:
        """Whether the tensor looks at the memory of another."""
        return self.tables.storage[tensor] not in (tensor, NO_STORAGE)

    def _settle(self, tensor: int, *, through_host: bool) -> None:
        """Say where a tensor lives on every device, and who needs it there."""
        tables, home = self.tables, self.tables.home[tensor]
        num_bytes = 0 if tables.storage[tensor] == NO_STORAGE else tables.tensor_bytes[tensor]
        self.lives_in[tensor, home] = self._at_home(tensor, num_bytes)
        for target in tables.targets[tensor]:
            self.lives_in[tensor, target] = Memory(target, num_bytes)
        written = through_host and not tables.on_host[home]
        outgoing = min(1, len(tables.targets[tensor])) if written else len(tables.targets[tensor])
        self.lives_in[tensor, home].needs += outgoing
        for device in {home, *tables.targets[tensor]}:
            memory = self.lives_in[tensor, device]
            memory.needs += len(tables.users[tensor].get(device, ()))
            memory.kept |= tables.keep[tensor]

    def _at_home(self, tensor: int, num_bytes: int) -> Memory:
        tables, producer, home = self.tables, self.tables.producer[tensor], self.tables.home[tensor]
        if not self.is_view(tensor):
            owned = tables.storage[tensor] == tensor and not tables.is_param[producer]
            return Memory(home, num_bytes if owned else 0, needs=1)
        base = tables.storage[tensor]
        for source in sorted(tables.inputs[producer]):
            if tables.storage[source] == base:
                return self.lives_in[source, home]
        return self.lives_in[base, home] if tables.producer[base] == producer else Memory(home, 0)

    def take(self, device: int, num_bytes: int) -> None:
        """Something starts."""
        self.used[device] += num_bytes
        self.peak[device] = max(self.peak[device], self.used[device])

    def release(self, tensor: int, device: int) -> None:
        """One of those who need the tensor's memory there is done."""
        memory = self.lives_in[tensor, device]
        memory.needs -= 1
        if memory.needs == 0 and not memory.kept:
            self.used[device] -= memory.num_bytes

    def op_starts(self, op: int) -> None:
        """Workspace and outputs are taken; a view's home is taken already."""
        self.take(self.tables.device[op], self.tables.workspace[op])
        for tensor in self.tables.outputs[op]:
            if not self.is_view(tensor):
                self.take(self.tables.device[op], self.lives_in[tensor, self.tables.device[op]].num_bytes)

    def op_ends(self, op: int) -> None:
        """Workspace is given back, and what was needed by this op alone."""
        device = self.tables.device[op]
        self.used[device] -= self.tables.workspace[op]
        own = [tensor for tensor in self.tables.outputs[op] if not self.is_view(tensor)]
        for tensor in self.tables.inputs[op] + own:
            self.release(tensor, device)


class _Step:
    """One simulated step: the clock, the events, the engines and the issuing thread."""

    def __init__(self, problem: Problem, plan: Plan, dispatch: str, links: Links) -> None:
        self.tables = tables = _Tables(problem, plan)
        if NEVER in tables.compute_s:
            op = tables.compute_s.index(NEVER)
            raise PlanError(f"op {op} cannot run on device {tables.device[op]}; place it elsewhere")
        self.links = links
        self.network = _Network(problem, tables, links)
        self.ledger = _Ledger(tables, problem.cluster.num_devices, links)
        self.now = 0.0
        self.events: list[tuple[float, int, int]] = []  # time, what, op or booking
        self.starting: list[int] = []  # bookings that start in this round
        self.booked: list[tuple[int, int, int, float, float]] = []
        self.start = [NEVER] * tables.num_ops
        self.end = [NEVER] * tables.num_ops
        self.missing = [len(tensors) for tensors in tables.inputs]  # inputs not yet on the device
        self.priority: list[int] = plan.priority.tolist()
        self.order = sorted(range(tables.num_ops), key=lambda op: (self.priority[op], op))
        self.in_order = dispatch == "in_order"
        self.running: dict[int, int] = {}  # op by engine
        self.woken = set(tables.engine)  # engines that may have something to start
        # What an engine may start: all its ops in order (last first), or its ready ops as a heap.
        self.queue: dict[int, list[int]] = {engine: [] for engine in self.woken}
        self.ready: dict[int, list[tuple[int, float, int]]] = {engine: [] for engine in self.woken}
        for op in reversed(self.order):
            self.queue[tables.engine[op]].append(op)
        issue_s: list[float] = problem.costs.issue_s.tolist()
        self.issue_s = issue_s if self.in_order and any(issue_s) else None
        self.num_issued = 0
        self.issued = [self.issue_s is None] * tables.num_ops
        self.next_issue_s = self.issue_s[self.order[0]] if self.issue_s else NEVER

    def run(self) -> Result:
        """Go from event to event until none is left."""
        for op in range(self.tables.num_ops):
            if self.missing[op] == 0:
                self._becomes_ready(op)
        if self.issue_s:
            heapq.heappush(self.events, (self.next_issue_s, ISSUE, 0))
        self._round()  # of what needs no event: the ops without inputs
        while self.events:
            self.now = self.events[0][0]
            self._round()
        ends = [0.0, *self.end, *(transfer[4] for transfer in self.booked)]
        return Result(
            op_start=self.start,
            op_end=self.end,
            transfers=self.booked,
            peak_bytes=self.ledger.peak,
            step_s=max(end for end in ends if end != NEVER),
            stuck=[op for op, end in enumerate(self.end) if end == NEVER],
        )

    def _round(self) -> None:
        """Everything due now, in the order of one instant; what it makes due now waits for the next round."""
        ending, arriving = [], []
        while self.events and self.events[0][0] == self.now:
            _, what, item = heapq.heappop(self.events)
            if what == END:
                ending.append(item)
            elif what == ARRIVAL:
                arriving.append(item)
            elif what == SEND:
                self.starting.append(item)
        for op in ending:
            self._op_ends(op)
        for booking in sorted(arriving, key=self._arrival_order):
            self._arrives(booking)
        self._issue()
        for booking in self.starting:
            tensor, source, target, _, end = self.booked[booking]
            if source != target:
                self.ledger.take(target, self.ledger.lives_in[tensor, target].num_bytes)
            heapq.heappush(self.events, (end, ARRIVAL, booking))
        self.starting.clear()
        for engine in sorted(self.woken):
            self._start_next(engine)
        self.woken.clear()

    def _op_ends(self, op: int) -> None:
        tables, device = self.tables, self.tables.device[op]
        self.ledger.op_ends(op)
        for tensor in tables.outputs[op]:
            self._feed(tensor, device)
        written = self.links == Links.HOST and not tables.on_host[device]
        for tensor in tables.outputs[op]:
            targets = tables.targets[tensor]
            self._book(tensor, [device] if written and targets else targets)
        del self.running[tables.engine[op]]
        self.woken.add(tables.engine[op])
        if self.issue_s and self._is_threads_own(op):
            self._issue_next_after_now()

    def _book(self, tensor: int, targets: list[int]) -> None:
        """Book the tensor from its home to each target, or to its home: a write to host memory."""
        source = self.tables.home[tensor]
        for target in targets:
            start, end = self.network.book(tensor, source, target, self.now)
            if start == self.now:
                self.starting.append(len(self.booked))
            else:
                heapq.heappush(self.events, (start, SEND, len(self.booked)))
            self.booked.append((tensor, source, target, start, end))

    def _arrival_order(self, booking: int) -> tuple[bool, int, int]:
        tensor, source, target, _, _ = self.booked[booking]
        targets = self.tables.targets[tensor]
        return source == target, tensor, targets.index(target) if source != target else 0

    def _arrives(self, booking: int) -> None:
        tensor, source, target, _, _ = self.booked[booking]
        read = self.links == Links.HOST and source != target and not self.tables.on_host[source]
        if not read:  # a read is from host memory, the source was done with its write
            self.ledger.release(tensor, source)
        if source == target:
            self._book(tensor, self.tables.targets[tensor])
        else:
            self._feed(tensor, target)

    def _feed(self, tensor: int, device: int) -> None:
        for op in self.tables.users[tensor].get(device, ()):
            self.missing[op] -= 1
            if self.missing[op] == 0:
                self._becomes_ready(op)

    def _becomes_ready(self, op: int) -> None:
        engine = self.tables.engine[op]
        self.woken.add(engine)
        if not self.in_order:
            heapq.heappush(self.ready[engine], (self.priority[op], self.now, op))

    def _issue(self) -> None:
        """The thread hands out every op it has come to; after one of its own it waits for that op's end."""
        while self.next_issue_s <= self.now:
            op = self.order[self.num_issued]
            self.num_issued += 1
            self.issued[op] = True
            self.woken.add(self.tables.engine[op])
            self.next_issue_s = NEVER
            if not self._is_threads_own(op):
                self._issue_next_after_now()

    def _is_threads_own(self, op: int) -> bool:
        """Whether the issuing thread runs an op itself; what takes no time is only handed out."""
        return self.tables.on_host[self.tables.device[op]] and self.tables.compute_s[op] > 0

    def _issue_next_after_now(self) -> None:
        if self.issue_s and self.num_issued < self.tables.num_ops:
            self.next_issue_s = self.now + self.issue_s[self.order[self.num_issued]]
            if self.next_issue_s > self.now:
                heapq.heappush(self.events, (self.next_issue_s, ISSUE, 0))

    def _start_next(self, engine: int) -> None:
        if engine in self.running:
            return
        queue, ready = self.queue[engine], self.ready[engine]
        if self.in_order and queue and self.issued[queue[-1]] and self.missing[queue[-1]] == 0:
            op = queue.pop()
        elif ready:
            op = heapq.heappop(ready)[2]
        else:
            return
        self.running[engine] = op
        self.start[op] = self.now
        self.end[op] = self.now + self.tables.compute_s[op]
        self.ledger.op_starts(op)
        heapq.heappush(self.events, (self.end[op], END, op))


def throughput(problem: Problem, plan: Plan) -> float:
    """Steady-state seconds per sample through host memory: the busiest device. Memory is not judged.

    An accelerator computes, reads once every tensor made elsewhere that it uses, and writes once every
    tensor of its own that is used elsewhere; a CPU pays for no transfers.
    """
    if problem.links != Links.HOST:
        raise ProblemError(f"throughput is defined for links 'host', not {problem.links.value!r}")
    tables = _Tables(problem, plan)
    network = _Network(problem, tables, Links.HOST)
    compute = [0.0] * problem.cluster.num_devices
    reads, writes = list(compute), list(compute)
    for op, device in enumerate(tables.device):
        compute[device] += tables.compute_s[op]
    for tensor, home in enumerate(tables.home):
        for target in tables.targets[tensor]:
            reads[target] += network.seconds(tensor, home, target)
        if tables.targets[tensor]:
            writes[home] += network.seconds(tensor, home, home)
    shared: dict[int, float] = {}  # devices of one engine compute one after the other
    for device, engine in enumerate(problem.cluster.engine.tolist()):
        shared[engine] = shared.get(engine, 0.0) + compute[device]
    if problem.load == Load.SUM:
        return max(*map(sum, zip(compute, reads, writes, strict=True)), *shared.values())
    if problem.load == Load.MAX2:
        reads = [into + out for into, out in zip(reads, writes, strict=True)]
    return max(*compute, *reads, *writes, *shared.values())
