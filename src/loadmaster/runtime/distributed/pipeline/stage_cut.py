"""Stage cut: the stage of every op of a program, and the tensors that cross each cut.

        stage 0          stage 1          stage 2
    a ──► b ──┐
    │         └── b ──► c ── c ──┐
    └──────────── a ── (carried) ┴─ a, c ──► d

A tensor goes from a stage to the next one only; what a later stage needs is carried through those between.
Inputs of the model, its weights and its constants do not cross: a stage reads its own.

Where the plan's cut cannot be kept as it is, ops move to a later stage, never to an earlier one:
- an op runs no earlier than what it reads;
- all that looks at memory which some op writes in place runs on one stage (batch norm's running averages);
- an output of an op that gives several is taken where the op ran.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from loadmaster.core.errors import PlanError
from loadmaster.core.graph import Graph
from loadmaster.core.plan import Plan
from loadmaster.runtime.graph_engine.assignment import assign_devices, index_plan, names_in_plan
from loadmaster.runtime.graph_engine.op_facts import Facts, is_random
from loadmaster.runtime.graph_engine.program import Program

_FEW = 3


@dataclass(frozen=True, slots=True)
class StageCut:
    """The stage of every op, and what crosses from stage s to s + 1."""

    num_stages: int
    stage: Mapping[fx.Node, int]  # of ops
    crossing: tuple[tuple[fx.Node, ...], ...]  # [S - 1]
    random: tuple[bool, ...]  # [S] whether a stage draws random numbers
    moved: tuple[str, ...]  # ops that could not stay on the plan's stage

    @property
    def draws_later(self) -> tuple[bool, ...]:
        """[S] whether a later stage draws random numbers: then the generator's state goes along."""
        return tuple(any(self.random[s + 1 :]) for s in range(self.num_stages))


def cut_stages(
    program: Program, facts: Facts, graph: Graph, plan: Plan, outputs: Sequence[fx.Node]
) -> StageCut:
    """The cut of a plan, as near as the program allows; `outputs` are needed at the end."""
    pipeline = plan.pipeline
    if pipeline is None:
        raise PlanError("the plan has no pipeline, so there are no stages to cut")
    num_stages = len(pipeline.replicas)
    by_stage = index_plan(graph, replace(plan, device=pipeline.stage, pipeline=None))
    names = names_in_plan(program, facts, by_stage)
    asked, _ = assign_devices(program, facts, by_stage, names, {})
    planned = {node: asked[node] for node in names}
    stage = {node: asked[node] for node in program.ops}
    _raise_stages(program, facts, stage)
    moved = tuple(node.meta["op"] for node in planned if stage[node] != planned[node])
    random = [False] * num_stages
    for node in program.ops:
        random[stage[node]] |= is_random(node)
    crossing = _find_crossing(program, facts, stage, num_stages, outputs)
    return StageCut(num_stages, stage, crossing, tuple(random), moved)


def describe_moves(cut: StageCut) -> str:
    """What had to differ from the plan, in words; '' where nothing did."""
    if not cut.moved:
        return ""
    more = f" and {len(cut.moved) - _FEW} more" if len(cut.moved) > _FEW else ""
    names = ", ".join(cut.moved[:_FEW])
    return f"{names}{more} run on a later stage than planned: they read or share memory that is there"


def _raise_stages(program: Program, facts: Facts, stage: dict[fx.Node, int]) -> None:
    """Raise stages until every op runs no earlier than what it reads, and shared memory is on one stage."""
    together = _find_shared_memory(program, facts)
    changed = True
    while changed:
        changed = False
        for node in program.ops:
            least = max((stage[one] for one in node.all_input_nodes if one in stage), default=0)
            if node.target is operator.getitem and node.args[0] in stage:
                least = stage[node.args[0]]
            if stage[node] < least:
                stage[node] = least
                changed = True
        for group in together:
            last = max(stage[node] for node in group)
            for node in group:
                if stage[node] != last:
                    stage[node] = last
                    changed = True
        for node in program.ops:  # the op of an output that was raised
            if node.target is operator.getitem and stage[node.args[0]] < stage[node]:
                stage[node.args[0]] = stage[node]
                changed = True


def _find_shared_memory(program: Program, facts: Facts) -> list[list[fx.Node]]:
    """Ops that touch memory which some op writes, one list for each storage."""
    touching: dict[int, list[fx.Node]] = {storage: [] for storage in sorted(facts.changing)}
    kept = {
        storage
        for node in program.inputs
        if node.meta["slot"].kind != "input"
        for storage in facts.storages[node]
    }
    for node in program.ops:
        touched = {*facts.written.get(node, ()), *facts.storages[node]}
        for source in node.all_input_nodes:
            touched.update(kept.intersection(facts.storages.get(source, ())))
        for storage in touched & touching.keys():
            touching[storage].append(node)
    return [nodes for nodes in touching.values() if len(nodes) > 1]


def _find_crossing(
    program: Program,
    facts: Facts,
    stage: Mapping[fx.Node, int],
    num_stages: int,
    outputs: Sequence[fx.Node],
) -> tuple[tuple[fx.Node, ...], ...]:
    last_use = {node: max([stage[node], *(stage[u] for u in node.users if u in stage)]) for node in stage}
    for node in outputs:
        if node in last_use:
            last_use[node] = num_stages - 1
    ordered = [node for node in program.ops if facts.storages[node]]
    loose = [node for node in program.ops if not facts.storages[node] and last_use[node] > stage[node]]
    if loose:
        raise PlanError(
            f"op {loose[0].meta['op']!r} gives a plain number that stage {last_use[loose[0]]} reads, and only"
            " tensors go from stage to stage; put both on one stage"
        )
    return tuple(
        tuple(node for node in ordered if stage[node] <= cut < last_use[node])
        for cut in range(num_stages - 1)
    )
