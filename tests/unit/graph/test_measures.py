"""Measures: by hand on small graphs, and against networkx on random ones."""

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadmaster.core.errors import GraphError
from loadmaster.core.graph import Graph, Phase, edges
from loadmaster.graph.build import GraphBuilder
from loadmaster.graph.generate import FAMILIES
from loadmaster.graph.measures import levels, longest_path, measure
from tests.strategies import graphs


def _networkx(graph: Graph) -> "nx.DiGraph[int]":
    result: nx.DiGraph[int] = nx.DiGraph()
    result.add_nodes_from(range(graph.num_ops))
    result.add_edges_from(zip(*(side.tolist() for side in edges(graph)), strict=True))
    return result


def test_measures_of_a_small_training_step_by_hand() -> None:
    #   w (4 bytes) --> mul (2 flops, 8 bytes) --> view of it --> grad (5 flops, 4 bytes) --> update (1 flop)
    builder = GraphBuilder("step")
    w = builder.op("w", phase=Phase.PARAM, resident_bytes=4)
    mul, view = builder.op("mul", flops=2.0), builder.op("view")
    grad = builder.op("grad", phase=Phase.BACKWARD, flops=5.0)
    update = builder.op("update", phase=Phase.UPDATE, flops=1.0)
    builder.op("alone", flops=3.0)
    weight = builder.tensor(w, 4, keep=True)
    builder.use(weight, mul, update)
    product = builder.tensor(mul, 8)
    builder.use(product, view)
    builder.use(builder.tensor(view, 8, storage=product), grad)
    builder.use(builder.tensor(grad, 4), update)
    measures = measure(builder.build())
    assert (measures.num_ops, measures.num_edges, measures.num_tensors) == (6, 5, 4)
    assert measures.num_ops_of_phase == {"forward": 3, "backward": 1, "update": 1, "param": 1}
    assert (measures.depth, measures.width) == (5, 2)
    assert (measures.flops, measures.critical_path_flops) == (11.0, 8.0)
    assert (measures.tensor_bytes, measures.parameter_bytes, measures.resident_bytes) == (16, 4, 4)


@settings(deadline=None)
@given(graphs(max_ops=14), st.data())
def test_longest_path_agrees_with_networkx(graph: Graph, data: st.DataObject) -> None:
    weight = data.draw(st.lists(st.integers(0, 9), min_size=graph.num_ops, max_size=graph.num_ops))
    found = longest_path(graph, np.array(weight, dtype=np.float64))
    known = _networkx(graph)
    for op in range(graph.num_ops):
        before = known.subgraph(nx.ancestors(known, op) | {op}).copy()
        before.add_edge(op, graph.num_ops)  # an end, so that the op itself counts
        for source, target in before.edges:
            before.edges[source, target]["weight"] = weight[source]
        assert found[op] == nx.dag_longest_path_length(before)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_levels_are_the_generations_of_networkx(family: str) -> None:
    graph = FAMILIES[family](150, 1)
    found = levels(graph)
    generations = list(nx.topological_generations(_networkx(graph)))
    for number, generation in enumerate(generations):
        assert set(found[generation].tolist()) == {number}
    measures = measure(graph)
    assert measures.depth == len(generations)
    assert measures.width == max(map(len, generations))


def test_a_deep_chain_needs_no_recursion() -> None:
    graph = FAMILIES["chain"](5000, 0)
    assert measure(graph).depth == 5000


def test_longest_path_wants_one_weight_per_op() -> None:
    with pytest.raises(GraphError, match="2 weights for 3 ops"):
        longest_path(FAMILIES["chain"](3, 0), np.zeros(2))
