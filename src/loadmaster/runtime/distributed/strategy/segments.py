"""Segments: the model's graph cut where the ranks or their rows change, and what crosses the cuts.

    ops    a b c │ d e │ f g        segments in program order, each with its share of rows
    ranks  0 1   │ 2   │ 0 1

The graph is exported for the whole batch, and once more for every number of rows that some rank computes;
op by op they must be the same. A dimension of a tensor that differs between two of them is its batch: rows go
from rank to rank along it. A tensor without one is the same for all rows, unless it was made of rows: then
it is a sum or a mean of them, and only a segment on the same ranks may read it.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from loadmaster.core.errors import GraphError, PlanError
from loadmaster.core.graph import Graph
from loadmaster.core.plan import Plan
from loadmaster.runtime.distributed.pipeline.stage_cut import StageCut
from loadmaster.runtime.distributed.pipeline.stages import Stage, build_stage
from loadmaster.runtime.distributed.strategy.layout import RowShare
from loadmaster.runtime.graph_engine.assignment import assign_devices, index_plan, names_in_plan
from loadmaster.runtime.graph_engine.op_facts import Facts
from loadmaster.runtime.graph_engine.program import Program

NO_DIM, TANGLED = -1, -2  # no rows; rows along two dimensions


@dataclass(frozen=True, slots=True)
class Read:
    """A program and what is known of its ops."""

    program: Program
    facts: Facts


@dataclass(frozen=True, slots=True)
class Crossing:
    """A tensor that goes from its segment to ranks of another share."""

    number: int  # the same on all ranks
    node: int  # which op made it, by its place in the program
    source: int  # share
    target: int  # share
    dim: int  # along which its rows lie, or NO_DIM
    trained: bool
    first_reader: int  # segment

    @property
    def has_rows(self) -> bool:
        """Whether it has one part for each row."""
        return self.dim != NO_DIM


@dataclass(frozen=True, slots=True)
class Segment:
    """Ops of one share, one after the other. Tensors are named by the place of their op in the program."""

    share: int
    ops: tuple[int, ...]
    reads: tuple[int, ...]  # made by earlier segments
    gives: tuple[int, ...]  # read by later ones, or given by the model


@dataclass(frozen=True, slots=True)
class SegmentCut:
    """All segments of a model, the same on all ranks."""

    segments: tuple[Segment, ...]
    crossings: tuple[Crossing, ...]
    share: tuple[int, ...]  # of every op
    dim: Mapping[int, int]  # of tensors that cross or are given
    trained: frozenset[int]
    final_share: int  # where the loss is made
    outputs: tuple[Any, ...]  # op numbers of what the graph gives; what is no tensor stands as it is
    readers: Mapping[str, frozenset[int]]  # shares that read each weight and buffer

    def crossing(self, node: int, target: int) -> Crossing | None:
        """How a tensor comes to a share; None: it is made there."""
        return next((one for one in self.crossings if one.node == node and one.target == target), None)


@dataclass(frozen=True, slots=True)
class Output:
    """An op's value among the outputs of the model."""

    node: int


def cut_segments(
    whole: Read,
    other: Read | None,
    graph: Graph,
    shares: Sequence[RowShare],
    share_of_op: "np.ndarray[Any, np.dtype[np.int32]]",
    chosen: int | None,
) -> SegmentCut:
    """The segments of a strategy; `other` has fewer rows, `chosen` is the loss among the outputs."""
    program, facts = whole.program, whole.facts
    ops = program.ops
    number = {node: at for at, node in enumerate(ops)}
    share = _share_of_nodes(program, facts, graph, share_of_op)
    outputs = list(next(node for node in program.graph.nodes if node.op == "output").args[0])
    given = [outputs[chosen]] if chosen is not None else [one for one in outputs if one in number]
    final = max((number[one] for one in given if one in number), default=len(ops) - 1)
    final_share = share[final]
    runs = _find_runs(ops, share)
    run_of = {at: s for s, (_, members) in enumerate(runs) for at in members}
    dims = _batch_dims(whole, other)
    made_of_rows = _made_of_rows(program, dims)
    reads: list[set[int]] = [set() for _ in runs]
    gives: list[set[int]] = [set() for _ in runs]
    crossing: dict[tuple[int, int], int] = {}
    wanted = [(one, reader, run_of[number[reader]]) for reader in ops for one in reader.all_input_nodes]
    wanted += [(one, None, len(runs)) for one in given]
    for one, reader, segment in wanted:
        if one not in number or run_of[number[one]] == segment:
            continue
        at = number[one]
        target = final_share if reader is None else share[number[reader]]
        gives[run_of[at]].add(at)
        if reader is not None:
            reads[segment].add(at)
        if share[at] != target:
            _require_movable(one, facts, shares[share[at]], dims.get(one, NO_DIM), one in made_of_rows)
            key = at, target
            crossing[key] = min(crossing.get(key, segment), segment)
    _refuse_writes_across(ops, number, facts, run_of)
    trained = frozenset(number[node] for node in facts.trained if node in number)
    crossings = tuple(
        Crossing(n, at, share[at], target, dims.get(ops[at], NO_DIM), at in trained, first)
        for n, ((at, target), first) in enumerate(sorted(crossing.items()))
    )
    segments = tuple(
        Segment(owner, tuple(members), tuple(sorted(reads[s])), tuple(sorted(gives[s])))
        for s, (owner, members) in enumerate(runs)
    )
    readers: dict[str, set[int]] = {}
    for node in program.inputs:
        if node.meta["slot"].kind == "weight":
            found = {share[number[user]] for user in node.users if user in number}
            if found:
                readers[node.meta["slot"].name] = found
    return SegmentCut(
        segments,
        crossings,
        tuple(share),
        {number[node]: dim for node, dim in dims.items() if node in number},
        trained,
        final_share,
        tuple(Output(number[one]) if one in number else one for one in outputs),
        {name: frozenset(found) for name, found in readers.items()},
    )


def _share_of_nodes(
    program: Program, facts: Facts, graph: Graph, share_of_op: "np.ndarray[Any, np.dtype[np.int32]]"
) -> list[int]:
    """The share of every op of a program, from that of the ops of the graph."""
    plan = Plan(
        device=share_of_op,
        priority=np.arange(graph.num_ops, dtype=np.int32),
        recompute=np.zeros(graph.num_ops, dtype=np.bool_),
        pipeline=None,
    )
    known = index_plan(graph, plan)
    asked, _ = assign_devices(program, facts, known, names_in_plan(program, facts, known), {})
    return [asked[node] for node in program.ops]


def _find_runs(ops: Sequence[fx.Node], share: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Ops one after the other with one share; what is taken out of an op's outputs stays with it."""
    runs: list[tuple[int, list[int]]] = []
    run_of: dict[fx.Node, int] = {}
    for at, node in enumerate(ops):
        source = node.args[0] if node.target is operator.getitem else None
        if source in run_of:
            runs[run_of[source]][1].append(at)
            run_of[node] = run_of[source]
            continue
        if not runs or runs[-1][0] != share[at]:
            runs.append((share[at], []))
        runs[-1][1].append(at)
        run_of[node] = len(runs) - 1
    return runs


def require_same_ops(whole: Program, other: Program, rows: int) -> None:
    """Refuse a model whose graph depends on the number of rows."""
    ours, theirs = whole.ops, other.ops
    if [str(one.target) for one in ours] != [str(one.target) for one in theirs]:
        raise GraphError(
            f"the model's graph for {rows} rows has other ops than that for the whole batch, so rows cannot"
            " be shared out; give every device several rows, or use a strategy with one group"
        )


def _batch_dims(whole: Read, other: Read | None) -> dict[fx.Node, int]:
    """The dimension along which the rows of an input or an op's tensor lie; those without are left out."""
    found: dict[fx.Node, int] = {}
    if other is None:
        return found
    ours, theirs = whole.program, other.program
    pairs = [*zip(ours.inputs, theirs.inputs, strict=True), *zip(ours.ops, theirs.ops, strict=True)]
    for one, two in pairs:
        large, small = whole.facts.forms.get(one), other.facts.forms.get(two)
        if large is None or small is None:
            continue
        differ = [d for d, (a, b) in enumerate(zip(large[0], small[0], strict=True)) if a != b]
        if differ:
            found[one] = differ[0] if len(differ) == 1 else TANGLED
    return found


def _made_of_rows(program: Program, dims: Mapping[fx.Node, int]) -> set[fx.Node]:
    """Ops whose value depends on rows, but has none: sums and means of the batch."""
    found: set[fx.Node] = set()
    for node in program.ops:
        if node not in dims and any(one in dims or one in found for one in node.all_input_nodes):
            found.add(node)
    return found


def _require_movable(node: fx.Node, facts: Facts, share: RowShare, dim: int, of_rows: bool) -> None:
    name = node.meta["op"]
    if len(facts.storages[node]) != 1:
        raise PlanError(
            f"op {name!r} gives no single tensor, and only tensors go from rank to rank; put it and its"
            " readers into one group"
        )
    if dim == TANGLED:
        raise PlanError(
            f"what op {name!r} gives has rows along two dimensions, so it cannot be cut by rows; put it and"
            " its readers into one group"
        )
    if of_rows and share.is_split:
        raise PlanError(
            f"op {name!r} makes one number of all rows, and each of {len(share.ranks)} ranks has some of"
            " them; put it and its readers into one group, or duplicate the group"
        )


def _refuse_writes_across(
    ops: Sequence[fx.Node], number: Mapping[fx.Node, int], facts: Facts, run_of: Mapping[int, int]
) -> None:
    """What is written in place stays in its segment: a tensor that crosses is a copy."""
    homes: dict[int, set[int]] = {}
    for node in ops:
        for storage in facts.storages[node]:
            homes.setdefault(storage, set()).add(run_of[number[node]])
    for node in ops:
        for storage in facts.written.get(node, ()):
            if homes.get(storage, set()) - {run_of[number[node]]}:
                raise PlanError(
                    f"op {node.meta['op']!r} writes into memory that another group looks at; put both into"
                    " one group"
                )


def build_segment(
    read: Read,
    segment: Segment,
    model: nn.Module,
    *,
    where: torch.device,
    instead: Callable[[fx.Node], Any] | None,
) -> Stage:
    """A segment of a program for this rank's rows, as a module with the model's own weights."""
    ops = read.program.ops
    own = set(segment.ops)
    pseudo = StageCut(
        3,
        {node: 1 if at in own else 0 for at, node in enumerate(ops)},
        (tuple(ops[at] for at in segment.reads), tuple(ops[at] for at in segment.gives)),
        (False, False, False),
        (),
    )
    return build_stage(read.program, read.facts, pseudo, 1, model, where=where, outputs=(), instead=instead)
