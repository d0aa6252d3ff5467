"""Lowering: a strategy as a flat graph and plan, which simulator, bounds, checks, traces and reports serve.

    replicas      every op once for each shard of its group, with the seconds and bytes of its rows
    pieces        between groups with other shards: slices on the source, one copy, a concat on the target
    sums          gradients in buckets as they are made, on channels beside the devices (`channels.py`)
    factors       inputs of a gradient that is made from all rows: gathered, then used whole on every replica
    server        sums pushed to one replica, which updates; weights pulled back

Shards run their ops in the graph's order; those of a pipeline in the order of its schedule. Inputs of the
step are at hand wherever they are read.
"""

from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Bools, Floats, Ints, Longs
from loadmaster.core.cluster import process_cluster
from loadmaster.core.errors import PlanError
from loadmaster.core.graph import Phase
from loadmaster.core.plan import Plan
from loadmaster.core.problem import BY_ROUTE, FREE, Costs, Links, Objective, Origin, Problem, Split
from loadmaster.core.strategy import Mode, Strategy, Sync
from loadmaster.core.strategy_check import check_strategy
from loadmaster.strategies.lowering.channels import Channels
from loadmaster.strategies.lowering.collectives import Schedule, Wires, cheapest_sum, gather, pull, push
from loadmaster.strategies.lowering.flat_graph import BACKWARD, FORWARD, UPDATE, FlatGraph
from loadmaster.strategies.lowering.layouts import Layout, find_pieces, layout_of
from loadmaster.strategies.lowering.pipeline_keys import stages_of
from loadmaster.strategies.lowering.replicas import ReplicaMaker
from loadmaster.strategies.lowering.row_costs import RowCosts, find_row_costs
from loadmaster.strategies.splitting.forms import Form, Splits
from loadmaster.strategies.splitting.splits import find_splits

BUCKET_BYTES = 25 * 2**20
_AFTER, _BEFORE = 0.2, -0.2  # keys of what is added after its source, and before its user


@dataclass(frozen=True, slots=True, eq=False)
class LoweredStrategy:
    """The flat problem and plan of a strategy, and what their ops stand for."""

    problem: Problem
    plan: Plan
    op: Ints  # [N'] op of the source graph, -1 = a piece, a concat or part of a collective
    shard: Ints  # [N'] of its group, -1 for the same
    num_devices: int  # D of the source; later devices are channels
    link_bytes: Longs  # [L] bytes over each link in a step
    collectives: tuple[Schedule, ...]


def lower(
    problem: Problem, strategy: Strategy, splits: Splits | None = None, costs: RowCosts | None = None
) -> LoweredStrategy:
    """The flat problem and plan; a strategy that breaks a rule is refused with that rule."""
    broken = check_strategy(problem, strategy)
    if broken:
        raise PlanError(broken[0].message)
    if problem.links not in (Links.SHARED, Links.PARALLEL):
        raise PlanError(
            f"strategies are timed with links 'shared' or 'parallel', not {problem.links.value!r};"
            " ask for one of them"
        )
    known = splits or find_splits(problem.graph, strategy.batch)
    if known.batch != strategy.batch:
        raise PlanError(f"rows are followed for a batch of {known.batch}, the strategy has {strategy.batch}")
    return _Lowering(problem, strategy, known, costs or find_row_costs(problem, known)).run()


class _Lowering:
    def __init__(self, problem: Problem, strategy: Strategy, splits: Splits, costs: RowCosts) -> None:
        self.problem, self.strategy, self.splits, self.costs = problem, strategy, splits, costs
        self.graph, self.batch = problem.graph, strategy.batch
        self.group_of = strategy.group_of
        stage = stages_of(problem.graph, strategy)
        self.layouts: list[Layout] = []
        of_group = []
        for g, group in enumerate(strategy.groups):
            layout = layout_of(group, self.batch, stage[g])
            if layout not in self.layouts:
                self.layouts.append(layout)
            of_group.append(self.layouts.index(layout))
        self.layout_of_op = np.array(of_group, dtype=np.int32)[self.group_of]
        self.factors: Bools = np.zeros(self.graph.num_ops, dtype=np.bool_)  # run on all rows
        cluster = process_cluster(problem.cluster)
        self.wires = Wires.of(cluster)
        self.channels = Channels(cluster, self.wires)
        self.collectives: list[Schedule] = []
        self.nothing: Floats = np.zeros(len(problem.cluster.kind_name) + 1)
        self.resolved: dict[tuple[int, int], list[int]] = {}
        self.gathered: dict[tuple[int, int], list[int]] = {}
        self.inputs = self._find_inputs()

    def run(self) -> LoweredStrategy:
        self._check_forms()
        self._find_factors()
        made = ReplicaMaker(
            self.problem,
            self.strategy,
            self.splits,
            self.costs,
            self.layouts,
            self.layout_of_op,
            self.factors,
        )
        self.count, self.skip, self.first, self._shards = made.count, made.skip, made.first, made.shards
        self.tensor_first = made.tensor_first
        self.flat = FlatGraph(self.graph, made.make(), self.problem.cluster.device_name)
        self._add_uses()
        self._add_sums()
        return self._finish()

    # -- checks

    def _find_inputs(self) -> Bools:
        graph = self.graph
        reads = np.zeros(graph.num_ops, dtype=np.bool_)
        reads[graph.use_op] = True
        free = (graph.flops == 0) & (graph.bytes_moved == 0)
        found: Bools = (graph.phase == Phase.FORWARD) & ~reads & free
        return found

    def _check_forms(self) -> None:
        graph, names = self.graph, self.graph.op_name
        if any(layout.parts for layout in self.layouts) and not self.splits.scales.any():
            raise PlanError(
                f"nothing of graph {graph.name!r} is known to have {self.batch} rows, so that no group can be"
                " replicated; give the batch that was captured"
            )
        parts = np.array([layout.parts for layout in self.layouts])[self.layout_of_op]
        stuck = np.flatnonzero(parts & ~self.splits.splits)
        if len(stuck):
            op = int(stuck[0])
            raise PlanError(
                f"op {names[op]!r} cannot run on some of the rows: {self.splits.reason[op]}; duplicate or"
                " place its group"
            )
        maker, user = graph.tensor_op[graph.use_tensor], graph.use_op
        across = self.layout_of_op[maker] != self.layout_of_op[user]
        form = self.splits.form[graph.use_tensor]
        for bad, what in (
            (across & (graph.phase[maker] == Phase.PARAM), "weight"),
            (across & parts[maker] & np.isin(form, (Form.SUM, Form.WEIGHTED)), "partial sum"),
        ):
            if bad.any():
                use = int(np.flatnonzero(bad)[0])
                raise PlanError(
                    f"{what} of {names[maker[use]]!r} is read by {names[user[use]]!r} in a group with other"
                    " shards; put both into one group"
                )

    def _find_factors(self) -> None:
        """Ops whose gradients are made from gathered factors: all they make are sums for weights named."""
        graph, wanted = self.graph, {p for group in self.strategy.groups for p in group.sfb}
        if not wanted:
            return
        maker, user = graph.tensor_op[graph.use_tensor], graph.use_op
        update = graph.phase[user] == Phase.UPDATE
        weight_of = {
            int(u): int(m)
            for u, m in zip(user[update], maker[update], strict=True)
            if graph.phase[m] == Phase.PARAM
        }
        served = set()
        for tensor, op in zip(graph.use_tensor[update].tolist(), user[update].tolist(), strict=True):
            weight = weight_of.get(op, -1)
            if weight in wanted and self.splits.form[tensor] == Form.SUM:
                self.factors[graph.tensor_op[tensor]] = True
                served.add(weight)
        mixed = self.factors[graph.tensor_op] & (self.splits.form == Form.PART)
        missing = wanted - served
        if missing or mixed.any():
            op = min(missing) if missing else int(graph.tensor_op[np.flatnonzero(mixed)[0]])
            raise PlanError(
                f"the gradient of {graph.op_name[op]!r} is not made by an op of its own from rows;"
                " leave it out of sfb"
            )

    # -- uses

    def _add_uses(self) -> None:
        graph = self.graph
        maker, user = graph.tensor_op[graph.use_tensor], graph.use_op
        gathers = self.factors[user] & (self.splits.form[graph.use_tensor] == Form.PART)
        parts = np.array([layout.parts for layout in self.layouts])
        gathers &= parts[self.layout_of_op[user]]
        same = (self.layout_of_op[maker] == self.layout_of_op[user]) & ~gathers
        plain = same & (self.count[maker] == self.count[user])
        self._add_plain(graph.use_tensor[plain], user[plain])
        for use in np.flatnonzero(same & ~plain).tolist():
            self._add_uneven(int(graph.use_tensor[use]), int(user[use]))
        for use in np.flatnonzero(gathers).tolist():
            self._use_gathered(int(graph.use_tensor[use]), int(user[use]))
        first_user: dict[tuple[int, int], int] = {}
        across = np.flatnonzero(~same & ~gathers)
        for use in across.tolist():
            key = (int(graph.use_tensor[use]), int(self.layout_of_op[user[use]]))
            first_user.setdefault(key, int(user[use]))
        for use in across.tolist():
            tensor, op = int(graph.use_tensor[use]), int(user[use])
            at = int(self.layout_of_op[op])
            shards = self._resolve(tensor, at, first_user[tensor, at])
            for q in self._shards(op):
                self.flat.use(shards[q], int(self.first[op]) + q - int(self.skip[op]))

    def _add_plain(self, tensor: Ints, user: Ints) -> None:
        count = self.count[user]
        at = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
        self.flat.use_all(
            (np.repeat(self.tensor_first[tensor], count) + at).astype(np.int32),
            (np.repeat(self.first[user], count) + at).astype(np.int32),
        )

    def _add_uneven(self, tensor: int, op: int) -> None:
        """One side runs on fewer shards: a weight of a pipeline, an update on a server."""
        maker = int(self.graph.tensor_op[tensor])
        base, num = int(self.tensor_first[tensor]), int(self.count[maker])
        for q in self._shards(op):
            mine = int(self.first[op]) + q - int(self.skip[op])
            piped = self.layouts[self.layout_of_op[op]].stage >= 0
            if num == 1:
                self.flat.use(base, mine)
            elif piped and self.graph.phase[op] == Phase.UPDATE:
                for m in range(num):
                    self.flat.use(base + m, mine)
            else:
                self.flat.use(base + q - int(self.skip[maker]), mine)

    def _resolve(self, tensor: int, at: int, user: int) -> list[int]:
        """The tensor each shard of another layout reads, once cut, sent and joined."""
        if (tensor, at) not in self.resolved:
            self.resolved[tensor, at] = self._move(tensor, at, user)
        return self.resolved[tensor, at]

    def _move(self, tensor: int, at: int, user: int) -> list[int]:
        graph, flat = self.graph, self.flat
        maker, target = int(graph.tensor_op[tensor]), self.layouts[at]
        source = self.layouts[self.layout_of_op[maker]]
        part = bool(self.splits.form[tensor] == Form.PART)
        size, name, phase = int(graph.tensor_bytes[tensor]), graph.op_name[maker], int(graph.phase[maker])
        if self.inputs[maker]:
            return self._at_hand(tensor, target, part)
        pieces = find_pieces(source, target, self.batch, part)
        before = min(float(self._key(user, q)) for q in range(target.num_shards)) + _BEFORE
        found = []
        for q, device in enumerate(target.devices):
            ready = [self._piece(tensor, source, piece, part) for piece in pieces[q]]
            if len(ready) == 1:
                found.append(ready[0])
                continue
            rows = sum(last - first for _, first, last in pieces[q])
            seconds = self._copy_seconds(size * rows // self.batch)
            due = max(before, max(flat.key_of(self._maker(t)) for t in ready) + 0.01)
            label = f"concat {name}.{tensor} @ {self.problem.cluster.device_name[device]} for {at}.{q}"
            op = flat.op(label, "concat", phase, device, due, seconds)
            for piece_tensor in ready:
                flat.use(piece_tensor, op)
            found.append(flat.tensor(op, -(-size * rows // self.batch)))
        return found

    def _key(self, op: int, shard: int) -> float:
        at = int(self.first[op]) + min(max(shard - int(self.skip[op]), 0), int(self.count[op]) - 1)
        return float(self.flat.base.key[at])

    def _maker(self, tensor: int) -> int:
        own = len(self.flat.base.tensor)
        return int(self.flat.base.tensor_op[tensor]) if tensor < own else self.flat.tensor_ops[tensor - own]

    def _piece(self, tensor: int, source: Layout, piece: tuple[int, int, int], part: bool) -> int:
        """A shard's tensor, or a slice of it where fewer rows are asked for."""
        shard, low, high = piece
        maker = int(self.graph.tensor_op[tensor])
        whole = int(self.tensor_first[tensor]) + min(shard, int(self.count[maker]) - 1)
        held = source.rows[shard] if part and source.parts else self.batch
        if not part or high - low == held:
            return whole
        op = int(self.flat.base.tensor_op[whole])
        size = -(-int(self.graph.tensor_bytes[tensor]) * (high - low) // self.batch)
        label = f"slice {self.graph.op_name[maker]}.{tensor}.{shard}[{low}:{high}] {len(self.flat.names)}"
        device = self.flat.device_of(op)
        cut = self.flat.op(
            label,
            "slice",
            int(self.graph.phase[maker]),
            device,
            self.flat.key_of(op) + _AFTER,
            self._on_devices(0.0),
        )
        self.flat.use(whole, cut)
        base = int(self.flat.base.storage[whole])
        return self.flat.tensor(cut, size, base)

    def _at_hand(self, tensor: int, target: Layout, part: bool) -> list[int]:
        maker = int(self.graph.tensor_op[tensor])
        size = int(self.graph.tensor_bytes[tensor])
        found = []
        for q, device in enumerate(target.devices):
            rows = target.rows[q] if part and target.parts else self.batch
            label = f"{self.graph.op_name[maker]}.{tensor} at hand {len(self.flat.names)}"
            op = self.flat.op(label, "input", FORWARD, device, self._key(maker, 0), self._on_devices(0.0))
            found.append(self.flat.tensor(op, -(-size * rows // self.batch)))
        return found

    def _on_devices(self, seconds: float) -> Floats:
        """The same on every kind of device, and on no channel."""
        found = np.full(len(self.nothing), seconds)
        found[-1] = np.inf
        return found

    def _copy_seconds(self, num_bytes: int) -> Floats:
        cluster = self.problem.cluster
        return np.append(2 * num_bytes / cluster.memory_bytes_per_s + cluster.overhead_s, np.inf)

    # -- collectives

    def _use_gathered(self, tensor: int, op: int) -> None:
        key = (tensor, int(self.layout_of_op[op]))
        if key not in self.gathered:
            self.gathered[key] = self._gather(tensor, self.layouts[key[1]])
        for q, mine in enumerate(self.gathered[key]):
            self.flat.use(mine, int(self.first[op]) + q)
            if self.layout_of_op[self.graph.tensor_op[tensor]] == self.layout_of_op[op]:
                self.flat.use(int(self.tensor_first[tensor]) + q, int(self.first[op]) + q)

    def _gather(self, tensor: int, layout: Layout) -> list[int]:
        graph, flat = self.graph, self.flat
        maker, size = int(graph.tensor_op[tensor]), int(graph.tensor_bytes[tensor])
        at = self.layouts.index(layout)
        held = self.layout_of_op[maker] == at
        users = graph.use_op[graph.use_tensor == tensor]
        own = (
            [int(self.tensor_first[tensor]) + q for q in range(layout.num_shards)]
            if held
            else self._resolve(tensor, at, int(users[self.layout_of_op[users] == at].min()))
        )
        parts = [-(-size * rows // self.batch) for rows in layout.rows]
        schedule = gather(self.wires, layout.devices, parts)
        makers = [self._maker(t) for t in own]
        name = f"factors of {_names(self.problem, layout.devices)}"
        done = self._collective(schedule, makers, name, f"{graph.op_name[maker]}.{tensor} for {at}", BACKWARD)
        found = []
        for q, device in enumerate(layout.devices):
            label = f"gathered {graph.op_name[maker]}.{tensor} for {at}.{q}"
            first = min(self._key(int(u), q) for u in users if self.factors[u])
            due = max(flat.key_of(done) + 0.01, first + _BEFORE)
            op = flat.op(label, "gathered", BACKWARD, device, due, self._on_devices(0.0))
            flat.use(flat.signal(done), op)
            found.append(flat.tensor(op, size))
        return found

    def _add_sums(self) -> None:
        graph = self.graph
        update = np.flatnonzero(graph.phase[graph.use_op] == Phase.UPDATE)
        buckets: dict[tuple[tuple[int, ...], Sync, int], list[tuple[float, int, int]]] = {}
        for use in update.tolist():
            tensor, op = int(graph.use_tensor[use]), int(graph.use_op[use])
            group = self.strategy.groups[self.group_of[op]]
            several = group.mode == Mode.REPLICATE and len(group.devices) > 1
            maker = int(graph.tensor_op[tensor])
            if not several or self.splits.form[tensor] != Form.SUM or self.factors[maker]:
                continue
            home = (group.devices, group.sync, group.server)
            buckets.setdefault(home, []).append((self._key(maker, 0), tensor, op))
        for (devices, sync, server), members in sorted(buckets.items()):
            for number, bucket in enumerate(_fill(sorted(members), graph.tensor_bytes)):
                self._add_bucket(devices, sync, server, bucket, number)

    def _add_bucket(
        self,
        devices: tuple[int, ...],
        sync: Sync,
        server: int,
        bucket: list[tuple[float, int, int]],
        number: int,
    ) -> None:
        graph, flat = self.graph, self.flat
        size = sum(int(graph.tensor_bytes[tensor]) for _, tensor, _ in bucket)
        grads = [int(self.first[graph.tensor_op[t]]) + q for _, t, _ in bucket for q in range(len(devices))]
        names = _names(self.problem, devices)
        if sync == Sync.ALLREDUCE:
            schedule = cheapest_sum(self.wires, devices, size)
            done = self._collective(schedule, grads, f"sums of {names}", f"bucket {number}", BACKWARD)
        else:
            schedule = push(self.wires, devices, server, size)
            done = self._collective(
                schedule, grads, f"server {server} of {names}", f"push {number}", BACKWARD
            )
        for _, _, op in bucket:
            for q in range(int(self.count[op])):
                flat.use(flat.signal(done), int(self.first[op]) + q)
        if sync == Sync.PS:
            back = pull(self.wires, devices, server, size)
            updates = [int(self.first[op]) for _, _, op in bucket]
            self._collective(back, updates, f"server {server} of {names}, back", f"pull {number}", UPDATE)

    def _collective(self, schedule: Schedule, after: list[int], name: str, what: str, phase: int) -> int:
        """A schedule once some ops have ended; its last op."""
        flat, channel = self.flat, self.channels.channel(name)
        self.collectives.append(schedule)
        key = max(flat.key_of(op) for op in after) + _AFTER + 0.05
        label = f"{schedule.name} {what} of {name}"
        waits = [flat.signal(op) for op in after]
        for turn, step in enumerate(schedule.rounds):
            seconds = np.full(len(self.nothing), np.inf)
            seconds[-1] = step.latency_s
            start = flat.op(f"{label}, round {turn}", schedule.name, phase, channel, key, seconds)
            for tensor in waits:
                flat.use(tensor, start)
            waits = []
            for number, (source, target, size) in enumerate(step.edges):
                point = self.channels.point(name, source, target)
                arrive = flat.op(
                    f"{label}, round {turn}, edge {number}",
                    schedule.name,
                    phase,
                    point,
                    key,
                    self._instantly(),
                )
                flat.use(flat.tensor(start, size), arrive)
                waits.append(flat.signal(arrive))
        done = flat.op(f"{label}, done", schedule.name, phase, channel, key, self._instantly())
        for tensor in waits:
            flat.use(tensor, done)
        return done

    def _instantly(self) -> Floats:
        found = np.full(len(self.nothing), np.inf)
        found[-1] = 0.0
        return found

    # -- the nouns

    def _finish(self) -> LoweredStrategy:
        problem, base = self.problem, self.flat.base
        try:
            graph, device, seconds, replica = self.flat.finish(len(self.nothing))
        except Exception as trouble:
            if "topological" not in str(trouble):
                raise
            raise PlanError(f"the stages of the pipeline are not a chain: {trouble}") from None
        num = graph.num_ops
        cluster = self.channels.extended()
        flat = Problem(
            graph=graph,
            cluster=cluster,
            costs=Costs(
                compute_s=seconds,
                issue_s=np.zeros(num),
                transfer_s=np.full(graph.num_tensors, BY_ROUTE),
                origin=np.full(num, Origin.GIVEN, dtype=np.int8),
                rel_error=np.zeros(num),
            ),
            objective=Objective.STEP,
            links=problem.links,
            split=Split.FREE,
            load=problem.load,
            pinned=np.full(num, FREE, dtype=np.int32),
        )
        plan = Plan(
            device=device,
            priority=np.arange(num, dtype=np.int32),
            recompute=np.zeros(num, dtype=np.bool_),
            pipeline=None,
        )
        own = replica >= 0
        return LoweredStrategy(
            problem=flat,
            plan=plan,
            op=np.where(own, base.op[np.maximum(replica, 0)], -1).astype(np.int32),
            shard=np.where(own, base.shard[np.maximum(replica, 0)], -1).astype(np.int32),
            num_devices=problem.cluster.num_devices,
            link_bytes=_count_bytes(flat, device)[: problem.cluster.num_links],
            collectives=tuple(self.collectives),
        )


def _count_bytes(problem: Problem, device: Ints) -> Longs:
    """[L] bytes over each link: a tensor goes to every other device that reads it, once."""
    graph, cluster = problem.graph, problem.cluster
    home, target = device[graph.tensor_op[graph.use_tensor]], device[graph.use_op]
    away = np.flatnonzero(home != target)
    pair = np.unique(graph.use_tensor[away].astype(np.int64) * cluster.num_devices + target[away])
    tensor, to = pair // cluster.num_devices, pair % cluster.num_devices
    total = np.zeros(cluster.num_links + 1, dtype=np.int64)  # NO_LINK counts in the last entry
    for hop in range(cluster.route.shape[2]):
        link = cluster.route[device[graph.tensor_op[tensor]], to, hop]
        np.add.at(total, link, graph.tensor_bytes[tensor])
    return total[:-1]


def _fill(members: list[tuple[float, int, int]], size: Longs) -> list[list[tuple[float, int, int]]]:
    """Gradients in the order they are made, in buckets."""
    buckets: list[list[tuple[float, int, int]]] = []
    room = 0
    for member in members:
        if room <= 0:
            buckets.append([])
            room = BUCKET_BYTES
        buckets[-1].append(member)
        room -= int(size[member[1]])
    return buckets


def _names(problem: Problem, devices: tuple[int, ...]) -> str:
    return ", ".join(problem.cluster.device_name[d] for d in devices)
