"""Generators: the published fingerprints to the last microsecond, and the cluster they bring."""

import random

import networkx as nx
import numpy as np
import pytest

from loadmaster.core.errors import InputError
from loadmaster.core.graph import NO_GROUP, NO_MIRROR, NO_STORAGE, Dtype, Graph, Phase, edges, held_bytes
from loadmaster.core.problem import Links, Objective, Origin
from loadmaster.graph.build import GraphBuilder
from loadmaster.graph.generate import (
    FAMILIES,
    chain,
    diamond,
    fork_join,
    many_source,
    rnn_grid,
    with_benchmark_cluster,
)
from loadmaster.graph.measures import longest_path

MIB = 2**20
RANDOM = sorted(set(FAMILIES) - {"transformer"})

# name, size asked for, ops, edges, serial us, longest chain us
PUBLISHED = [
    ("fork_join", 100, 112, 132, 72051, 28097),
    ("fork_join", 1000, 1007, 1193, 582768, 265662),
    ("fork_join", 5000, 5003, 6017, 2949342, 1269640),
    ("fork_join", 10000, 10004, 12032, 5799257, 2510025),
    ("rnn_grid", 100, 96, 172, 29005, 6531),
    ("rnn_grid", 1000, 1000, 1867, 297496, 41738),
    ("rnn_grid", 5000, 5000, 9367, 1500684, 196329),
    ("rnn_grid", 10000, 10000, 18742, 2993990, 384933),
    ("layered", 100, 100, 172, 51519, 10274),
    ("layered", 1000, 1023, 1998, 545322, 38616),
    ("layered", 5000, 5040, 9981, 2689520, 90122),
    ("layered", 10000, 10000, 19870, 5347792, 125209),
    ("many_source", 100, 110, 122, 56241, 17058),
    ("many_source", 1000, 1005, 1145, 492640, 197086),
    ("many_source", 5000, 5013, 5725, 2467913, 991996),
    ("many_source", 10000, 10041, 11467, 4928194, 1991860),
    ("chain", 100, 100, 99, 99174, 99174),
    ("chain", 1000, 1000, 999, 1006520, 1006520),
    ("chain", 5000, 5000, 4999, 5051596, 5051596),
    ("chain", 10000, 10000, 9999, 10164001, 10164001),
]


@pytest.mark.parametrize(("family", "size", "num_ops", "num_edges", "serial_us", "longest_us"), PUBLISHED)
def test_family_has_its_published_fingerprint(
    family: str, size: int, num_ops: int, num_edges: int, serial_us: int, longest_us: int
) -> None:
    graph = FAMILIES[family](size, 0)
    us = graph.flops / 1e6
    found = graph.num_ops, len(edges(graph)[0]), us.sum(), longest_path(graph, us).max()
    assert found == (num_ops, num_edges, serial_us, longest_us)


@pytest.mark.parametrize("family", RANDOM)
def test_generated_op_has_one_output_that_is_never_freed_and_weight_and_gradient_resident(
    family: str,
) -> None:
    graph = FAMILIES[family](60, 3)
    assert graph.tensor_op.tolist() == graph.tensor_storage.tolist() == list(range(graph.num_ops))
    assert graph.keep.all()
    assert (graph.resident_bytes % (2 * MIB) == 0).all()
    assert set(graph.dtype.tolist()) == {Dtype.FLOAT32}
    assert set(graph.phase.tolist()) == {Phase.FORWARD}
    assert set(graph.mirror.tolist()) == {NO_MIRROR}
    assert set(graph.group.tolist()) == {NO_GROUP}
    assert not graph.bytes_moved.any()
    assert graph.capture == "generated"
    assert held_bytes(graph).tolist() == (graph.resident_bytes + graph.tensor_bytes).tolist()


@pytest.mark.parametrize("family", RANDOM)
def test_seed_alone_decides_the_graph(family: str) -> None:
    digest = FAMILIES[family](50, 7).digest
    assert digest == FAMILIES[family](50, 7).digest
    assert digest != FAMILIES[family](50, 8).digest


def test_draws_of_a_chain_are_compute_params_out_temp_op_after_op() -> None:
    draw = random.Random(5).randint
    graph = chain(3, 5)
    for op in range(3):
        compute_us, params, out, temp = draw(50, 2000), draw(1, 8), draw(1, 16), draw(0, 8)
        assert graph.flops[op] == compute_us * 1e6
        assert graph.resident_bytes[op] == 2 * params * MIB
        assert graph.tensor_bytes[op] == out * MIB
        assert graph.workspace_bytes[op] == temp * MIB


def test_rnn_grid_cell_reads_the_layer_below_and_the_step_before() -> None:
    graph = rnn_grid(24)
    expected = nx.grid_2d_graph(3, 8, create_using=nx.DiGraph)  # (step, layer); keeps edges both ways
    wanted = {(8 * s + la, 8 * t + lb) for (s, la), (t, lb) in expected.edges if (s, la) < (t, lb)}
    assert set(zip(*(side.tolist() for side in edges(graph)), strict=True)) == wanted
    assert graph.workspace_bytes.tolist() == [262144] * 24
    assert graph.tensor_bytes.tolist() == [MIB] * 24
    assert graph.resident_bytes.tolist() == [4 * MIB] * 24


def test_many_source_gives_every_op_a_source_of_its_own() -> None:
    graph = many_source(200)
    source, target = edges(graph)
    for op in np.flatnonzero(np.array(graph.op_kind) == "source"):
        assert graph.flops[op] == 1e6
        assert op not in target
        assert target[source == op].tolist() == [op + 1]


def test_diamond_is_an_op_two_branches_and_a_join_again_and_again() -> None:
    graph = diamond(7)
    pairs = list(zip(*(side.tolist() for side in edges(graph)), strict=True))
    assert pairs == [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (3, 5), (4, 6), (5, 6)]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_smallest_graph_of_every_family_has_an_op(family: str) -> None:
    graph = FAMILIES[family](1, 0)
    assert graph.num_ops >= 1
    assert with_benchmark_cluster(graph).cluster is not None


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("num_ops", [0, -5, 10**12])
def test_impossible_sizes_are_refused(family: str, num_ops: int) -> None:
    with pytest.raises(InputError, match=str(num_ops)):
        FAMILIES[family](num_ops, 0)


def test_brought_cluster_is_four_ports_with_half_of_all_bytes_each() -> None:
    graph = fork_join(1000)
    workload = with_benchmark_cluster(graph)
    cluster = workload.cluster
    assert cluster is not None
    total = sum(2 * (r // 2) + out for r, out in zip(graph.resident_bytes, graph.tensor_bytes, strict=True))
    assert cluster.memory_bytes.tolist() == [int(2.0 * total / 4)] * 4
    assert cluster.kind_name == ("ref",)
    assert cluster.num_links == 8
    up, down = cluster.route[1, 3]
    assert cluster.link_latency_s[up] + cluster.link_latency_s[down] == pytest.approx(134e-6)
    assert MIB / cluster.link_bytes_per_s[up] == pytest.approx(0.0001754e-6 * MIB)
    assert (workload.objective, workload.links, workload.optimizer) == (Objective.STEP, Links.SHARED, None)


def test_brought_times_are_whole_microseconds() -> None:
    graph = fork_join(100)
    costs = with_benchmark_cluster(graph).costs
    assert costs is not None
    assert costs.compute_s[:, 0].tolist() == [int(flops / 1e6) / 1e6 for flops in graph.flops]
    expected = [round(0.0001754 * int(size) + 134) / 1e6 for size in graph.tensor_bytes]
    assert costs.transfer_s.tolist() == expected
    assert set(costs.origin.tolist()) == {Origin.GIVEN}
    assert not costs.rel_error.any()
    assert not costs.issue_s.any()


def _mixed_graph() -> Graph:
    """A weight (60 bytes), an op with a freed output (40), a view of it, a reader of view and weight."""
    builder = GraphBuilder("mixed")
    param = builder.op("w", phase=Phase.PARAM, resident_bytes=60)
    make = builder.op("make", resident_bytes=10)
    view = builder.op("view")
    read = builder.op("read", workspace_bytes=500)
    weight = builder.tensor(param, 60, keep=True)
    base = builder.tensor(make, 40)
    builder.use(base, view, read)
    builder.use(builder.tensor(view, 40, storage=base), read)
    builder.use(weight, read)
    builder.tensor(read, 8, storage=NO_STORAGE)
    return builder.build()


def test_brought_memory_lets_the_largest_op_run_and_counts_views_once() -> None:
    # all: 60 + 10 + 40 = 110, half of it 55; but `read` needs 500 + 40 + 60
    cluster = with_benchmark_cluster(_mixed_graph()).cluster
    assert cluster is not None
    assert cluster.memory_bytes.tolist() == [600] * 4
