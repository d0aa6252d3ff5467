"""Coarsening any graph by any labels keeps the work, the bytes and the way back."""

import networkx as nx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from loadmaster.core.arrays import Ints
from loadmaster.core.graph import NO_GROUP, Graph, Phase, edges, units
from loadmaster.graph.coarsen import coarsen_costs, expand
from tests.builders import costs_of, plan_on
from tests.coarsening import coarsen
from tests.strategies import graphs, picks


@st.composite
def labelled(draw: st.DrawFn) -> tuple[Graph, Ints]:
    graph = draw(graphs(max_ops=12))
    label = picks(draw, range(draw(st.integers(1, 6))), graph.num_ops)
    return graph, np.array(label, dtype=np.int32)


def _kept_bytes(graph: Graph) -> int:
    """Resident bytes, and storages with a kept tensor that are not weights (those are resident)."""
    total = int(graph.resident_bytes.sum())
    kept = {
        int(base) for base, keep in zip(graph.tensor_storage, graph.keep, strict=True) if keep and base >= 0
    }
    return total + sum(
        int(graph.tensor_bytes[base]) for base in kept if graph.phase[graph.tensor_op[base]] != Phase.PARAM
    )


@settings(deadline=None)
@given(labelled())
def test_work_and_held_bytes_are_kept(case: tuple[Graph, Ints]) -> None:
    graph, label = case
    coarse = coarsen(graph, label).graph
    assert coarse.flops.sum() == graph.flops.sum()
    assert coarse.bytes_moved.sum() == graph.bytes_moved.sum()
    assert _kept_bytes(coarse) == _kept_bytes(graph)
    assert coarse.workspace_bytes.max() == graph.workspace_bytes.max()


@settings(deadline=None)
@given(labelled())
def test_map_covers_and_equal_labels_of_a_phase_meet(case: tuple[Graph, Ints]) -> None:
    graph, label = case
    coarse = coarsen(graph, label)
    assert set(coarse.op_of.tolist()) == set(range(coarse.graph.num_ops))
    of_key: dict[tuple[int, int], int] = {}
    for op in range(graph.num_ops):
        key = int(label[op]), int(graph.phase[op])
        assert of_key.setdefault(key, int(coarse.op_of[op])) == coarse.op_of[op]


@settings(deadline=None)
@given(labelled())
def test_ops_merge_only_for_their_label_or_to_break_a_circle(case: tuple[Graph, Ints]) -> None:
    graph, label = case
    key = [(int(one), int(phase)) for one, phase in zip(label, graph.phase, strict=True)]
    quotient: nx.DiGraph[tuple[int, int]] = nx.DiGraph()
    quotient.add_nodes_from(key)
    quotient.add_edges_from(
        (key[a], key[b]) for a, b in zip(*(side.tolist() for side in edges(graph)), strict=True)
    )
    op_of = coarsen(graph, label).op_of
    for circle in nx.strongly_connected_components(quotient):
        assert len({int(op_of[op]) for op in range(graph.num_ops) if key[op] in circle}) == 1
    assert len(set(op_of.tolist())) == nx.number_strongly_connected_components(quotient)


@settings(deadline=None)
@given(labelled())
def test_edges_are_those_between_coarse_ops_and_bytes_of_tensors_stay(case: tuple[Graph, Ints]) -> None:
    graph, label = case
    coarse = coarsen(graph, label)
    pairs = zip(*(coarse.op_of[side].tolist() for side in edges(graph)), strict=True)
    found = zip(*(side.tolist() for side in edges(coarse.graph)), strict=True)
    assert set(found) == {(a, b) for a, b in pairs if a != b}
    assert coarse.graph.tensor_bytes.tolist() == graph.tensor_bytes[coarse.tensor_of].tolist()


@settings(deadline=None)
@given(labelled())
def test_ops_of_a_group_stay_together(case: tuple[Graph, Ints]) -> None:
    graph, label = case
    coarse = coarsen(graph, label)
    unit, _ = units(coarse.graph)
    for group in set(graph.group.tolist()) - {NO_GROUP}:
        assert len(set(unit[coarse.op_of[graph.group == group]].tolist())) == 1


@settings(deadline=None)
@given(labelled(), st.data())
def test_expanded_plan_puts_every_op_where_its_coarse_op_is(
    case: tuple[Graph, Ints], data: st.DataObject
) -> None:
    graph, label = case
    coarse = coarsen(graph, label)
    num = coarse.graph.num_ops
    device, priority = (data.draw(st.lists(st.integers(0, 3), min_size=num, max_size=num)) for _ in range(2))
    fine = expand(plan_on(device, priority), coarse)
    assert fine.device.tolist() == [device[op] for op in coarse.op_of]
    keys = [(priority[coarse.op_of[op]], op) for op in range(graph.num_ops)]
    assert fine.priority.tolist() == [sorted(keys).index(key) for key in keys]


@settings(deadline=None)
@given(labelled())
def test_costs_add_up(case: tuple[Graph, Ints]) -> None:
    graph, label = case
    coarse = coarsen(graph, label)
    costs = costs_of(graph, np.arange(graph.num_ops) * 0.5, kinds=2, issue_s=0.25)
    found = coarsen_costs(costs, coarse)
    assert found.compute_s.sum() == costs.compute_s.sum()
    assert found.issue_s.sum() == costs.issue_s.sum()


@settings(deadline=None)
@given(graphs(max_ops=12))
def test_every_op_its_own_label_changes_nothing_but_dead_tensors(graph: Graph) -> None:
    coarse = coarsen(graph, np.arange(graph.num_ops, dtype=np.int32))
    assert coarse.graph.op_name == graph.op_name
    assert coarse.op_of.tolist() == list(range(graph.num_ops))
    assert [side.tolist() for side in edges(coarse.graph)] == [side.tolist() for side in edges(graph)]
