"""Evaluator: one action for each group, scored at the level of groups in well under a millisecond.

Rows and factors are decided inside: shares even, in proportion and balanced are tried, then gradients of
the best are made from factors where a minimum cut says so (none, all of the cut, the cut with sums and
gathers counted only as far as they show). Every replay is counted, so that searches are compared by
equal numbers of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Bools, Floats, Ints
from loadmaster.core.cluster import process_cluster
from loadmaster.core.errors import UnknownNameError
from loadmaster.core.graph import Phase
from loadmaster.core.problem import Problem
from loadmaster.core.strategy import Mode, Strategy, Sync
from loadmaster.strategies.lowering.collectives import Schedule, Wires, cheapest_sum, gather, push
from loadmaster.strategies.lowering.row_costs import RowCosts
from loadmaster.strategies.scoring.actions import Action, strategy_of
from loadmaster.strategies.scoring.compat import COMPAT
from loadmaster.strategies.scoring.factors import CutProblem, choose
from loadmaster.strategies.scoring.group_facts import SHARES, GroupFacts
from loadmaster.strategies.scoring.group_kernel import ALLREDUCE, BUCKET, SERVER, replay
from loadmaster.strategies.scoring.shares import (
    BALANCED,
    EVEN,
    PROPORTIONAL,
    VARIANTS,
    fill_shares,
    round_rows,
)
from loadmaster.strategies.splitting.forms import Form, Splits

Rows = dict[tuple[int, ...], tuple[int, ...]]  # of each set of devices


@dataclass(frozen=True, slots=True, eq=False)
class Evaluated:
    """A state with what was decided inside, and what it takes."""

    choice: tuple[int, ...]
    rows: Rows
    factors: frozenset[int]
    time_s: float
    overflow: float  # bytes over memory, as a share of it; 0 = fits
    peak_bytes: Floats  # [D]
    busy_s: Floats  # [D]
    link_busy_s: Floats  # [L]

    @property
    def rank(self) -> tuple[float, float]:
        """Fitting first, then quick."""
        return (self.overflow, self.time_s)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A gradient that may be made from factors."""

    weight: int
    op: int
    group: int
    segment: int
    num_bytes: int  # of the gradient
    tensors: tuple[int, ...]  # rows it reads


class Evaluator:
    """Scores states of one problem; remembers those it has seen."""

    def __init__(
        self,
        problem: Problem,
        splits: Splits,
        costs: RowCosts,
        facts: GroupFacts,
        actions: Sequence[Action],
        *,
        variants: Sequence[str] = VARIANTS,
        factors: bool = True,
        compat: frozenset[str] = frozenset(),
    ) -> None:
        """`compat` names published defects to play (`compat.py`), for ablations alone."""
        strange = compat - set(COMPAT)
        if strange:
            raise UnknownNameError("compat switch", min(strange), COMPAT)
        self.compat = compat
        self.problem, self.splits, self.costs, self.facts = problem, splits, costs, facts
        self.actions, self.variants, self.with_factors = tuple(actions), tuple(variants), factors
        self.wires = Wires.of(process_cluster(problem.cluster))
        self.replays = 0
        self.seen: dict[tuple[int, ...], Evaluated] = {}
        self._rows: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._sums: dict[tuple[object, ...], Schedule] = {}
        self._cuts: dict[tuple[object, ...], frozenset[int]] = {}
        self._replayed: dict[tuple[object, ...], Evaluated] = {}
        self.candidates = find_candidates(problem, splits, facts.group_of, facts.segment_of)
        self.allowed = self._allowed()

    def _allowed(self) -> Bools:
        """[G, A] whether a group may take an action: devices can run it, and it splits or is not split."""
        facts = self.facts
        found = np.zeros((facts.num_groups, len(self.actions)), dtype=np.bool_)
        for a, action in enumerate(self.actions):
            runs = facts.can_run[:, list(action.devices)].all(axis=1)
            apart = facts.splits & self.splits.scales.any()  # where nothing has rows, nothing is replicated
            found[:, a] = runs & (apart | (action.mode != Mode.REPLICATE))
        return found

    def evaluate(self, choice: Sequence[int]) -> Evaluated:
        """The best of its variants."""
        key = tuple(int(a) for a in choice)
        if key not in self.seen:
            self.seen[key] = self._evaluate(key)
        return self.seen[key]

    def _evaluate(self, choice: tuple[int, ...]) -> Evaluated:
        tried: dict[tuple[tuple[int, ...], ...], Evaluated] = {}
        for variant in self.variants:
            rows = self.rows_of(choice, variant)
            seen = tuple(rows.values())
            if seen not in tried:
                tried[seen] = self._once(choice, rows, frozenset())
        best = min(tried.values(), key=lambda e: e.rank)
        if not self.with_factors or not self.candidates:
            return best
        exposed = self._exposed(best)
        for scale in (1.0, exposed):
            chosen = self.factors_of(choice, best.rows, scale)
            if chosen and chosen != best.factors:
                other = self._once(choice, best.rows, chosen)
                best = min(best, other, key=lambda e: e.rank)
        return best

    def glance(self, choice: Sequence[int], *, factors: bool) -> Evaluated:
        """One variant for one replay: balanced rows, and factors by one cut; what is known, as it is."""
        key = tuple(int(a) for a in choice)
        if key in self.seen:
            return self.seen[key]
        rows = self.rows_of(key, BALANCED)
        chosen = frozenset[int]()
        if factors and self.with_factors and self.candidates:
            chosen = self.factors_of(key, rows, 1.0)
        return self._once(key, rows, chosen)

    def _once(self, choice: tuple[int, ...], rows: Rows, factors: frozenset[int]) -> Evaluated:
        """A replay that is remembered."""
        key = (choice, tuple(rows.values()), factors)
        if key not in self._replayed:
            self._replayed[key] = self.replay(choice, rows, factors)
        return self._replayed[key]

    def _exposed(self, found: Evaluated) -> float:
        """The share of the links' busiest time that shows in the step."""
        busiest = float(found.link_busy_s.max(initial=0.0))
        shown = found.time_s - float(found.busy_s.max())
        return 1.0 if busiest <= 0 else round(min(max(shown / busiest, 0.05), 1.0), 1)

    # -- rows

    def rows_of(self, choice: tuple[int, ...], variant: str) -> Rows:
        """Rows of each set of devices that replicates."""
        members: dict[tuple[int, ...], list[int]] = {}
        for g, a in enumerate(choice):
            if self.actions[a].mode == Mode.REPLICATE:
                members.setdefault(self.actions[a].devices, []).append(g)
        found = {}
        for devices, groups in members.items():
            key = (devices, tuple(groups), variant)
            if key not in self._rows:
                self._rows[key] = self._share(devices, groups, variant)
            found[devices] = self._rows[key]
        return found

    def _share(self, devices: tuple[int, ...], groups: list[int], variant: str) -> tuple[int, ...]:
        facts, count = self.facts, len(devices)
        if variant == EVEN and "drop_rows" in self.compat:
            return (facts.batch // count,) * count
        if variant == EVEN:
            return round_rows(facts.batch, np.full(count, 1.0 / count))
        kinds = facts.kind[list(devices)]
        inside = np.isin(facts.segment_group, groups)
        table = facts.seconds[inside].sum(axis=0)[kinds]  # [d, P]
        if variant == PROPORTIONAL:
            speed = 1.0 / np.maximum(table[:, -1], 1e-30)
            return round_rows(facts.batch, speed / speed.sum())
        assert variant == BALANCED
        near = table[:, np.searchsorted(SHARES, min(1.0 / count, 1.0)) - 1]
        at = SHARES[np.searchsorted(SHARES, min(1.0 / count, 1.0)) - 1]
        slope = (table[:, -1] - near) / (1.0 - at)
        room = facts.usable_bytes[list(devices)] - facts.resident_bytes[groups].sum()
        room -= facts.group_gradient_bytes[groups].sum()
        per = max(float((facts.saved_part[groups]).sum()), 1.0)
        shares = fill_shares(near - slope * at, slope, np.clip(room / per, 0.0, 1.0))
        return round_rows(facts.batch, shares)

    # -- factors

    def factors_of(self, choice: tuple[int, ...], rows: Rows, scale: float) -> frozenset[int]:
        """Weights whose gradients are made from factors; `scale` is how far sums and gathers show."""
        members: dict[tuple[int, ...], list[int]] = {}
        for g, a in enumerate(choice):
            if self.actions[a].sync == Sync.ALLREDUCE:
                members.setdefault(self.actions[a].devices, []).append(g)
        found: set[int] = set()
        for devices, groups in members.items():
            key = (devices, rows[devices], tuple(groups), scale)
            if key not in self._cuts:
                self._cuts[key] = self._cut(devices, rows[devices], set(groups), scale)
            found |= self._cuts[key]
        return frozenset(found)

    def _cut(
        self, devices: tuple[int, ...], rows: tuple[int, ...], groups: set[int], scale: float
    ) -> frozenset[int]:
        used = [(d, r) for d, r in zip(devices, rows, strict=True) if r > 0]
        mine = [c for c in self.candidates if c.group in groups]
        if len(used) < 2 or not mine:
            return frozenset()
        names, parts = [d for d, _ in used], [r for _, r in used]
        kinds, batch = self.facts.kind[names], self.facts.batch
        ops = np.array([c.op for c in mine], dtype=np.int32)
        whole = self.costs.seconds(ops, 1.0)[:, kinds]
        own = np.stack(
            [self.costs.seconds(ops, r / batch)[:, k] for r, k in zip(parts, kinds.tolist(), strict=True)],
            axis=1,
        )
        if "full_batch_time" in self.compat:
            own = np.zeros_like(whole)
        bucket = self.wires.seconds(cheapest_sum(self.wires, names, int(BUCKET)))
        saved = np.array([c.num_bytes for c in mine]) / BUCKET * bucket * scale
        tensors = sorted({t for c in mine for t in c.tensors})
        place = {t: i for i, t in enumerate(tensors)}
        size = self.problem.graph.tensor_bytes[tensors]
        none, one = (self._gather_s(names, parts, n) for n in (0, 2**24))  # a line: latency and bytes
        seconds = scale * (none + (one - none) * size / 2**24)
        reads = [(place[t], i) for i, c in enumerate(mine) for t in c.tensors]
        if "broadcast_per_consumer" in self.compat:  # each reader pays for a copy of its own
            seconds = seconds[[t for t, _ in reads]]
            reads = [(at, op) for at, (_, op) in enumerate(reads)]
        pairs = np.array(reads, dtype=np.int32)
        cut = CutProblem(
            extra_s=(whole - own).max(axis=1) - saved,
            forced=np.zeros(len(mine), dtype=np.bool_),
            gather_s=seconds,
            producer=np.full(len(seconds), -1, dtype=np.int32),
            read_tensor=pairs[:, 0],
            read_op=pairs[:, 1],
        )
        return frozenset(mine[i].weight for i in np.flatnonzero(choose(cut)).tolist())

    def _gather_s(self, names: list[int], parts: list[int], size: int) -> float:
        return self.wires.seconds(gather(self.wires, names, [size * r // self.facts.batch for r in parts]))

    # -- one replay

    def replay(self, choice: tuple[int, ...], rows: Rows, factors: frozenset[int]) -> Evaluated:
        """Seconds and memory of one state with its rows and factors."""
        self.replays += 1
        facts = self.facts
        groups, devices = facts.num_groups, facts.num_devices
        share, start = np.zeros((groups, devices)), np.zeros((groups, devices))
        whole = np.ones(groups, dtype=np.bool_)
        layout, sync = np.zeros(groups, dtype=np.int32), np.zeros(groups, dtype=np.int32)
        comm, server = np.full(groups, -1, dtype=np.int32), np.full(groups, -1, dtype=np.int32)
        layouts: dict[tuple[object, ...], int] = {}
        comms: dict[tuple[object, ...], int] = {}
        for g, a in enumerate(choice):
            action = self.actions[a]
            names = list(action.devices)
            if action.mode == Mode.REPLICATE:
                given = np.array(rows[action.devices]) / facts.batch
                share[g, names], start[g, names] = given, np.cumsum(given) - given
                several = bool((given > 0).sum() > 1)
                whole[g] = not several
                label: tuple[object, ...] = (action.devices, rows[action.devices])
                if several and action.sync != Sync.NONE:
                    used = tuple(d for d, r in zip(names, given.tolist(), strict=True) if r > 0)
                    sync[g] = ALLREDUCE if action.sync == Sync.ALLREDUCE else SERVER
                    server[g] = action.server if action.server in used else used[0]
                    comm[g] = comms.setdefault(
                        (used, int(sync[g]), int(server[g]) if sync[g] == SERVER else -1), len(comms)
                    )
            else:
                share[g, names] = 1.0
                label = (action.devices,)
            layout[g] = layouts.setdefault(label, len(layouts))
        sums = self._communicators(comms, comm)
        gradient, gathered, factor_s, tables = self._with_factors(factors, share, comm)
        time_s, busy, link_busy = replay(
            facts.segment_group, tables, SHARES, gradient, gathered, facts.edge_source, facts.edge_of,
            facts.edge_part, facts.edge_full, facts.update_s, facts.kind, facts.route, facts.latency_s,
            facts.bytes_per_s, share, start, whole, layout, sync, comm, server, factor_s, *sums,
            self.problem.cluster.num_links, "one_channel" in self.compat,
        )  # fmt: skip
        peak = self._peaks(share, whole, sync, server)
        over = np.maximum(peak - facts.usable_bytes, 0.0).sum() / facts.usable_bytes.sum()
        return Evaluated(choice, rows, factors, float(time_s), float(over), peak, busy, link_busy)

    def _communicators(
        self, comms: dict[tuple[object, ...], int], comm: Ints
    ) -> tuple[Ints, Ints, Ints, Floats, Ints, Floats]:
        total = np.zeros(len(comms))
        np.add.at(total, comm[comm >= 0], self.facts.group_gradient_bytes[comm >= 0])
        ends: list[int] = [0]
        edges: list[tuple[int, int, float, int, float]] = []
        for (used, sync, server), c in comms.items():
            size = int(min(max(total[c], 1.0), BUCKET))
            key = (used, sync, server, size)
            assert isinstance(used, tuple)
            assert isinstance(server, int)
            if key not in self._sums:
                made = (
                    cheapest_sum(self.wires, used, size)
                    if sync == ALLREDUCE
                    else push(self.wires, used, server, size)
                )
                self._sums[key] = made
            for turn, step in enumerate(self._sums[key].rounds):
                share = size * (len(used) if "divide_gradients" in self.compat else 1)
                edges += [(a, b, n / share, turn, step.latency_s) for a, b, n in step.edges]
            ends.append(len(edges))
        columns = list(zip(*edges, strict=True)) if edges else [()] * 5
        return (
            np.array(ends, dtype=np.int32),
            np.array(columns[0], dtype=np.int32),
            np.array(columns[1], dtype=np.int32),
            np.array(columns[2], dtype=np.float64),
            np.array(columns[3], dtype=np.int32),
            np.array(columns[4], dtype=np.float64),
        )

    def _with_factors(
        self, factors: frozenset[int], share: Floats, comm: Ints
    ) -> tuple[Floats, Floats, Floats, Floats]:
        """Gradients still summed, bytes gathered, seconds at the end, and the rest of the segments."""
        facts = self.facts
        gathered, extra = np.zeros(len(facts.gradient_bytes)), np.zeros(share.shape)
        if not factors:
            return facts.gradient_bytes, gathered, extra, facts.seconds
        gradient, tables = facts.gradient_bytes.copy(), facts.seconds.copy()
        told: set[int] = set()
        for c in self.candidates:
            if c.weight not in factors or comm[c.group] < 0:
                continue
            gradient[c.segment] -= c.num_bytes
            op = np.array([c.op], dtype=np.int32)
            for at, part in enumerate(SHARES.tolist()):
                tables[c.segment, :, at] -= self.costs.seconds(op, part)[0]
            whole = self.costs.seconds(op, 1.0)[0]
            extra[c.group] += np.where(share[c.group] > 0, whole[facts.kind], 0.0)
            for tensor in c.tensors:
                if tensor not in told:
                    told.add(tensor)
                    gathered[c.segment] += float(self.problem.graph.tensor_bytes[tensor])
        return np.maximum(gradient, 0.0), gathered, extra, np.maximum(tables, 0.0)

    def _peaks(self, share: Floats, whole: Bools, sync: Ints, server: Ints) -> Floats:
        """[D] bytes as the backward pass begins, with the largest op's own, or in the update."""
        facts = self.facts
        held = share > 0
        part = np.where(whole[:, None], held.astype(np.float64), share)
        served = (sync == SERVER)[:, None] & held & (server[:, None] != np.arange(share.shape[1]))
        weights = np.where(served, facts.weight_bytes[:, None], facts.resident_bytes[:, None])
        fixed = ((weights + facts.group_gradient_bytes[:, None]) * held).sum(axis=0)
        saved = (facts.saved_full[:, None] * held + facts.saved_part[:, None] * part).sum(axis=0)
        moment = (facts.transient[:, None] * part).max(axis=0)
        updates = np.where(served, 0.0, facts.update_bytes[:, None] * held).max(axis=0)
        found: Floats = fixed + np.maximum(saved + moment, updates)
        return found

    def strategy(self, found: Evaluated, name: str) -> Strategy:
        """The noun of an evaluated state."""
        chosen = [self.actions[a] for a in found.choice]
        return strategy_of(
            self.problem, self.splits, self.facts.group_of, chosen, found.rows, found.factors, name
        )


def find_candidates(problem: Problem, splits: Splits, group_of: Ints, segment: Ints) -> tuple[Candidate, ...]:
    """Gradients made by an op of their own from rows: products and sums that make nothing else."""
    graph = problem.graph
    maker = graph.tensor_op[graph.use_tensor]
    update = graph.phase[graph.use_op] == Phase.UPDATE
    weight_of = {
        int(u): int(m)
        for u, m in zip(graph.use_op[update], maker[update], strict=True)
        if graph.phase[m] == Phase.PARAM
    }
    found = []
    for use in np.flatnonzero(update & (splits.form[graph.use_tensor] == Form.SUM)).tolist():
        tensor = int(graph.use_tensor[use])
        op, weight = int(graph.tensor_op[tensor]), weight_of.get(int(graph.use_op[use]), -1)
        makes = np.flatnonzero(graph.tensor_op == op)
        reads = graph.use_tensor[graph.use_op == op]
        rows = tuple(int(t) for t in reads if splits.form[t] == Form.PART)
        if weight < 0 or len(makes) != 1 or not rows or graph.op_kind[op] not in ("mm", "sum", "addmm"):
            continue
        sized = int(graph.tensor_bytes[tensor])
        found.append(Candidate(weight, op, int(group_of[op]), int(segment[op]), sized, rows))
    return tuple(found)
