"""Lowering: a step of micro-batches as a bigger flat graph with a plan; the event loop runs it unchanged.

Each action of `core/pipelines/order.py` becomes one op, on the device and in the order of its rank:

    weights -> F0 F1 ... B0 B1 ... (W0 ...) -> sum of gradients -> update        per stage and replica

An op runs when everything it needs has arrived. What a stage keeps of a micro-batch is a tensor from its
forward op to its last backward op, so memory follows the schedule. Sums of gradients are rings: 2 (n - 1)
turns in which each of n devices sends an n-th to the next (Patarasuk and Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", 2009). First stages that share a weight sum its gradient, then
replicas sum those of each stage.
"""

from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Floats, Ints
from loadmaster.core.cluster import process_cluster
from loadmaster.core.graph import Phase
from loadmaster.core.pipelines.order import NO_MICROBATCH, Action, Order, Work, make_order, needs, rank_of
from loadmaster.core.plan import Plan
from loadmaster.core.problem import BY_ROUTE, FREE, Costs, Links, Objective, Origin, Problem, Split
from loadmaster.graph.build import GraphBuilder
from loadmaster.simulator.pipelines.stage_facts import StageFacts, find_facts

_PHASE = {
    Work.FORWARD: (Phase.FORWARD, "forward"),
    Work.BACKWARD: (Phase.BACKWARD, "backward"),
    Work.BACKWARD_INPUT: (Phase.BACKWARD, "backward of inputs"),
    Work.BACKWARD_WEIGHT: (Phase.BACKWARD, "backward of weights"),
    Work.UPDATE: (Phase.UPDATE, "update"),
}


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where the stages of a step are, whatever ops they are made of."""

    schedule: str
    devices: Ints  # [R, S]
    microbatches: tuple[int, ...]  # [R]
    stages_per_rank: int

    @classmethod
    def of(cls, plan: Plan) -> "Layout":
        """That of a plan with a pipeline."""
        pipeline = plan.pipeline
        assert pipeline is not None
        return cls(
            schedule=pipeline.schedule,
            devices=pipeline.devices_of(plan.device),
            microbatches=pipeline.microbatches,
            stages_per_rank=pipeline.stages_per_rank,
        )

    @property
    def num_stages(self) -> int:
        """S."""
        return int(self.devices.shape[1])

    def order_of(self, replica: int) -> Order:
        """What the ranks of a replica do."""
        return make_order(self.schedule, self.num_stages, self.microbatches[replica], self.stages_per_rank)


@dataclass(frozen=True, slots=True, eq=False)
class Lowered:
    """The flat problem and plan of a step, and what its ops stand for."""

    problem: Problem
    plan: Plan
    stage: Ints  # [ops]
    replica: Ints  # [ops]
    microbatch: Ints  # [ops] of the whole step, NO_MICROBATCH where it is none's


def lower(problem: Problem, plan: Plan) -> Lowered:
    """The flat problem and plan of a step of micro-batches."""
    assert plan.pipeline is not None
    facts = find_facts(problem, plan.pipeline.stage, plan.recompute, plan.pipeline.num_stages)
    return lower_stages(problem, facts, Layout.of(plan))


def lower_stages(problem: Problem, facts: StageFacts, layout: Layout) -> Lowered:
    """The same from stages whose seconds and bytes are known."""
    return _Lowering(problem, facts, layout).run()


class _Lowering:
    """Adds ops in an order in which all ranks can run, so that the order of ops is that of every rank."""

    def __init__(self, problem: Problem, facts: StageFacts, layout: Layout) -> None:
        self.problem, self.facts, self.layout = problem, facts, layout
        self.builder = GraphBuilder(f"{problem.graph.name}, one step", capture="pipeline")
        self.seconds: list[Floats] = []
        self.transfer_s: list[float] = []
        self.at: list[tuple[int, int, int, int]] = []  # device, stage, replica, micro-batch of each op
        self.made: dict[tuple[int, Work, int, int], int] = {}  # replica, work, stage, micro-batch -> op
        self.sent: dict[tuple[int, Work, int, int], int] = {}  # ... -> tensor to the next stage
        hosted = problem.cluster.on_host[problem.cluster.kind].any()
        self.hostless = problem.links == Links.HOST and not hosted
        self.nothing: Floats = np.zeros(len(problem.cluster.kind_name))

    def run(self) -> Lowered:
        for replica in range(len(self.layout.devices)):
            for stage in range(self.layout.num_stages):
                self._add_weights(replica, stage)
            self._add_passes(replica)
        last = self._add_sums()
        for replica in range(len(self.layout.devices)):
            for stage in range(self.layout.num_stages):
                name = self._name(replica, f"update of stage {stage}")
                op = self._op(name, Work.UPDATE, replica, stage, NO_MICROBATCH, self.facts.update_s[stage])
                if (replica, stage) in last:
                    self.builder.use(self._tensor(last[replica, stage], 0), op)
        return self._finish()

    def _add_weights(self, replica: int, stage: int) -> None:
        name = self._name(replica, f"weights of stage {stage}")
        self.builder.op(
            name,
            kind="weights",
            module=f"stage {stage}",
            phase=Phase.PARAM,
            resident_bytes=int(self.facts.resident_bytes[stage]),
        )
        self.seconds.append(self.nothing)
        self.at.append((int(self.layout.devices[replica, stage]), stage, replica, NO_MICROBATCH))

    def _add_passes(self, replica: int) -> None:
        """Forward and backward ops; ranks take turns, each as far as it can go."""
        layout = self.layout
        order, at = layout.order_of(replica), [0] * (layout.num_stages // layout.stages_per_rank)
        passes = [[a for a in actions if a.microbatch != NO_MICROBATCH] for actions in order]
        while any(at[r] < len(passes[r]) for r in range(len(passes))):
            for rank, actions in enumerate(passes):
                while at[rank] < len(actions) and self._can_run(replica, actions[at[rank]]):
                    self._add_pass(replica, actions[at[rank]])
                    at[rank] += 1

    def _can_run(self, replica: int, action: Action) -> bool:
        return all((replica, *need) in self.made for need in needs(action, self.layout.num_stages))

    def _add_pass(self, replica: int, action: Action) -> None:
        facts, (work, stage, batch) = self.facts, (action.work, action.stage, action.microbatch)
        builder, last = self.builder, self.layout.num_stages - 1
        forward = work == Work.FORWARD
        whole = {
            Work.FORWARD: facts.forward_s[stage],
            Work.BACKWARD: facts.backward_s[stage],
            Work.BACKWARD_INPUT: facts.input_s[stage],
            Work.BACKWARD_WEIGHT: facts.weight_s[stage],
        }[work]
        temporary = facts.forward_temporary_bytes if forward else facts.backward_temporary_bytes
        if work == Work.BACKWARD_WEIGHT:
            temporary = np.zeros_like(temporary)
        number = self._global_batch(replica, batch)
        name = self._name(replica, f"{work.value}{number} of stage {stage}")
        op = self._op(name, work, replica, stage, number, whole, int(temporary[stage]))
        if forward:
            self.made[replica, work, stage, batch] = op
            if stage < last:
                size, given = facts.forward_bytes[stage], facts.forward_transfer_s[stage]
                self.sent[replica, work, stage, batch] = self._tensor(op, int(size), given)
            if stage > 0:
                builder.use(self.sent[replica, work, stage - 1, batch], op)
            kept = self._tensor(op, int(facts.stash_bytes[stage]))
            self.sent[replica, Work.UPDATE, stage, batch] = kept  # under a name of its own: what is kept
            return
        builder.use(self.sent[replica, Work.UPDATE, stage, batch], op)
        if work == Work.BACKWARD_WEIGHT:
            builder.use(self.sent[replica, work, stage, batch], op)
            return
        self.made[replica, Work.BACKWARD_INPUT, stage, batch] = op
        if stage > 0:
            size, given = facts.backward_bytes[stage], facts.backward_transfer_s[stage]
            sent = self._tensor(op, int(size), given)
            self.sent[replica, Work.BACKWARD_INPUT, stage, batch] = sent
        if stage < last:
            builder.use(self.sent[replica, Work.BACKWARD_INPUT, stage + 1, batch], op)
        if work == Work.BACKWARD_INPUT:
            left = self._tensor(op, int(facts.put_off_bytes[stage]))
            self.sent[replica, Work.BACKWARD_WEIGHT, stage, batch] = left

    def _add_sums(self) -> dict[tuple[int, int], int]:
        """Sums of gradients over stages that share weights, then over replicas; the last op of each."""
        layout, facts = self.layout, self.facts
        last: dict[tuple[int, int], int] = {}
        num = layout.num_stages // layout.stages_per_rank
        for replica in range(len(layout.devices)):
            for stages, size in facts.tied:
                ranks = list(dict.fromkeys(rank_of(stage, num) for stage in stages))
                ends = [next(s for s in stages if rank_of(s, num) == rank) for rank in ranks]
                self._add_ring([(replica, s) for s in ends], size, last, "tied gradients")
        for stage in range(layout.num_stages):
            members = [(replica, stage) for replica in range(len(layout.devices))]
            size = int(facts.gradient_bytes[stage])
            self._add_ring(members, size, last, f"gradients of stage {stage}")
        return last

    def _add_ring(
        self, members: list[tuple[int, int]], size: int, last: dict[tuple[int, int], int], what: str
    ) -> None:
        num = len(members)
        if num < 2 or size == 0:
            return
        before: list[int] = []
        for turn in range(2 * num - 1):
            ops = []
            for i, (replica, stage) in enumerate(members):
                name = self._name(replica, f"sum of {what}, stage {stage}, turn {turn}")
                op = self._op(name, Work.REDUCE, replica, stage, NO_MICROBATCH, self.nothing)
                if before:
                    self.builder.use(self._tensor(before[i - 1], -(-size // num)), op)
                ops.append(op)
            before = ops
        for member, op in zip(members, before, strict=True):
            last[member] = op

    def _global_batch(self, replica: int, batch: int) -> int:
        return sum(self.layout.microbatches[:replica]) + batch

    def _name(self, replica: int, text: str) -> str:
        return f"replica {replica}: {text}" if len(self.layout.devices) > 1 else text

    def _op(
        self,
        name: str,
        work: Work,
        replica: int,
        stage: int,
        microbatch: int,
        seconds: Floats,
        workspace: int = 0,
    ) -> int:
        phase, kind = _PHASE.get(work, (Phase.BACKWARD, "sum of gradients"))
        self.seconds.append(seconds)
        self.at.append((int(self.layout.devices[replica, stage]), stage, replica, microbatch))
        unique = f"{name} #{len(self.at)}" if work == Work.REDUCE else name
        return self.builder.op(
            unique, kind=kind, module=f"stage {stage}", phase=phase, workspace_bytes=workspace
        )

    def _tensor(self, op: int, num_bytes: int, given_s: float = BY_ROUTE) -> int:
        hidden = self.hostless and given_s == BY_ROUTE  # every transfer of the source has a time of its own
        self.transfer_s.append(0.0 if hidden else float(given_s))
        return self.builder.tensor(op, num_bytes)

    def _finish(self) -> Lowered:
        graph = self.builder.build()  # ops were added in topological order, so it keeps theirs
        num = graph.num_ops
        device, stage, replica, batch = (
            np.array(column, dtype=np.int32) for column in zip(*self.at, strict=True)
        )
        source = self.problem
        problem = Problem(
            graph=graph,
            cluster=process_cluster(source.cluster),
            costs=Costs(
                compute_s=np.array(self.seconds),
                issue_s=np.zeros(num),
                transfer_s=np.array(self.transfer_s),
                origin=np.full(num, Origin.ANALYTIC, dtype=np.int8),
                rel_error=np.zeros(num),
            ),
            objective=Objective.STEP,
            links=source.links,
            split=Split.FREE,
            load=source.load,
            pinned=np.full(num, FREE, dtype=np.int32),
        )
        order = np.arange(num, dtype=np.int32)
        plan = Plan(device=device, priority=order, recompute=np.zeros(num, dtype=np.bool_), pipeline=None)
        return Lowered(problem, plan, stage, replica, batch)
