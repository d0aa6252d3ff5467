"""Node-link JSON: nothing is lost, networkx reads it and is read, and bad files have clear errors."""

import json
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadmaster.core.errors import FormatError, GraphError, InputError, UnknownNameError
from loadmaster.core.graph import NO_GROUP, NO_MIRROR, NO_SIGNATURE, NO_STORAGE, Dtype, Graph, Phase, edges
from loadmaster.graph.formats import nodelink
from tests.unit.formats.format_samples import PIPEDREAM, changed, msr_tiny, tensors_of

TINY: dict[str, Any] = {
    "directed": True,
    "nodes": [
        {"id": 1, "name": "x", "kind": "matmul", "module": "a.b", "flops": 5, "bytes_moved": 7, "memory": 9.5,
         "workspace_bytes": 3, "dtype": "bfloat16", "group": 4, "signature": "mm f32",
         "outputs": [{"bytes": 8, "keep": True}, {"bytes": 2, "storage": 0}, {"bytes": 6, "storage": -1}]},
        {"id": "y", "time_us": 2, "phase": "backward", "mirror": 1, "colocation": 4, "signature": "mm f32"},
        {"id": [2, 3], "time_ms": 4, "resident_bytes": 5, "phase": "update", "signature": "add f32"},
        {"id": "z", "time_s": 1, "flops": 3.5},
    ],
    "links": [
        {"source": 1, "target": "y", "output": 1},
        {"source": 1, "target": "y", "bytes": 6},
        {"source": "y", "target": [2, 3], "weight": 3.5},
        {"source": "y", "target": "z", "size": 4},
        {"source": [2, 3], "target": "z"},
    ],
}  # fmt: skip


def read(document: Any) -> Graph:
    return nodelink.read(json.dumps(document).encode(), "tiny").graph


def rows(num: int, values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(values, min_size=num, max_size=num)


@st.composite
def any_graph(draw: st.DrawFn) -> Graph:
    """Every column free within the invariants: odd names, tensors and uses in any order, spare signatures."""
    num = draw(st.integers(1, 6))
    table = draw(st.lists(st.text(max_size=2), max_size=3))
    phase = draw(rows(num, st.sampled_from(Phase)))
    mirror = draw(rows(num, st.integers(NO_MIRROR, num - 1)))
    makers = draw(st.lists(st.integers(0, num - 1), max_size=6))
    pairs = [(t, op) for t, maker in enumerate(makers) for op in range(maker + 1, num)]
    uses = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    own = [draw(st.sampled_from((t, NO_STORAGE))) for t in range(len(makers))]
    bases = [[b for b in range(len(makers)) if own[b] == b and makers[b] <= maker] for maker in makers]
    storage = [
        draw(st.sampled_from([kept, *base])) if kept == NO_STORAGE else kept
        for kept, base in zip(own, bases, strict=True)
    ]
    sizes = st.integers(0, 2**57)
    floats = st.floats(0, allow_infinity=False, allow_nan=False)
    return Graph(
        name=draw(st.text()),
        op_name=tuple(draw(st.lists(st.text(), min_size=num, max_size=num, unique=True))),
        op_kind=tuple(draw(rows(num, st.text(max_size=3)))),
        module=tuple(draw(rows(num, st.text(max_size=3)))),
        phase=np.array(phase, dtype=np.int8),
        mirror=np.where(np.array(phase) == Phase.BACKWARD, mirror, NO_MIRROR).astype(np.int32),
        group=np.array(draw(rows(num, st.integers(NO_GROUP, 2**31 - 2))), dtype=np.int32),
        signature=np.array(draw(rows(num, st.integers(NO_SIGNATURE, len(table) - 1))), dtype=np.int32),
        signature_table=tuple(table),
        dtype=np.array(draw(rows(num, st.sampled_from(Dtype))), dtype=np.int8),
        flops=np.array(draw(rows(num, floats))),
        bytes_moved=np.array(draw(rows(num, sizes)), dtype=np.int64),
        resident_bytes=np.array(draw(rows(num, sizes)), dtype=np.int64),
        workspace_bytes=np.array(draw(rows(num, sizes)), dtype=np.int64),
        tensor_op=np.array(makers, dtype=np.int32),
        tensor_bytes=np.array(draw(rows(len(makers), sizes)), dtype=np.int64),
        tensor_storage=np.array(storage, dtype=np.int32),
        keep=np.array(draw(rows(len(makers), st.booleans())), dtype=np.bool_),
        use_tensor=np.array([t for t, _ in uses], dtype=np.int32),
        use_op=np.array([op for _, op in uses], dtype=np.int32),
        capture=draw(st.text(max_size=3)),
    )


@settings(max_examples=150, deadline=None)
@given(any_graph())
def test_any_graph_comes_back_with_the_same_digest(graph: Graph) -> None:
    again = nodelink.read(nodelink.write(graph), graph.name).graph
    assert (again.digest, again.name) == (graph.digest, graph.name)


@settings(max_examples=60, deadline=None)
@given(any_graph())
def test_networkx_reads_what_is_written_and_is_read_back(graph: Graph) -> None:
    loaded = nx.node_link_graph(json.loads(nodelink.write(graph)), edges="links")
    assert loaded.is_directed()
    assert list(loaded.nodes) == list(graph.op_name)
    source, target = edges(graph)
    pairs = {(graph.op_name[u], graph.op_name[v]) for u, v in zip(source, target, strict=True)}
    assert set(loaded.edges()) == pairs
    assert loaded.number_of_edges() == graph.num_uses
    assert nx.is_directed_acyclic_graph(loaded)
    again = nodelink.read(json.dumps(nx.node_link_data(loaded, edges="edges")).encode(), "").graph
    assert again.op_name == graph.op_name
    assert np.array_equal(again.tensor_storage, graph.tensor_storage)
    use = set(zip(graph.use_tensor.tolist(), graph.use_op.tolist(), strict=True))
    assert set(zip(again.use_tensor.tolist(), again.use_op.tolist(), strict=True)) == use


def test_a_graph_made_in_networkx_is_read() -> None:
    made = nx.DiGraph(name="mine")
    made.add_node("a", flops=2e9, resident_bytes=64, kind="conv")
    made.add_node("b", time_us=3.0, phase="backward", mirror="a")
    made.add_edge("a", "b", bytes=1024)
    made.add_edge("a", "c", bytes=1024)
    made.add_edge("a", "d", bytes=16)
    for key in ("links", "edges"):
        graph = nodelink.read(json.dumps(nx.node_link_data(made, edges=key)).encode(), "file").graph
        assert (graph.name, graph.op_name) == ("mine", ("a", "b", "c", "d"))
        assert graph.flops.tolist() == [2e9, pytest.approx(3e6), 0, 0]
        assert tensors_of(graph, "a") == [(1024, {"b", "c"}), (16, {"d"})]
        assert graph.mirror.tolist() == [NO_MIRROR, 0, NO_MIRROR, NO_MIRROR]


def test_a_networkx_grid_with_tuple_ids_is_read() -> None:
    grid = nx.DiGraph(nx.grid_2d_graph(3, 2).edges)  # every edge once, away from (0, 0)
    graph = nodelink.read(json.dumps(nx.node_link_data(grid, edges="links")).encode(), "grid").graph
    assert (graph.num_ops, graph.num_uses, graph.op_name[0]) == (6, 7, "[0, 0]")


def test_every_attribute_is_read() -> None:
    graph = read(TINY)
    assert graph.op_name == ("x", "y", "[2, 3]", "z")
    assert graph.op_kind == ("matmul", "op", "op", "op")
    assert graph.module == ("a.b", "", "", "")
    assert graph.flops.tolist() == [5, 2e6, 4e9, 3.5]
    assert (graph.bytes_moved[0], graph.workspace_bytes[0]) == (7, 3)
    assert graph.resident_bytes.tolist() == [10, 0, 5, 0]
    assert graph.dtype.tolist() == [Dtype.BFLOAT16, 0, 0, 0]
    assert graph.group.tolist() == [4, 4, NO_GROUP, NO_GROUP]
    assert graph.phase.tolist() == [Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE, Phase.FORWARD]
    assert graph.mirror.tolist() == [NO_MIRROR, 0, NO_MIRROR, NO_MIRROR]
    assert graph.signature.tolist() == [0, 0, 1, NO_SIGNATURE]
    assert graph.signature_table == ("mm f32", "add f32")


def test_tensors_follow_outputs_and_links() -> None:
    graph = read(TINY)
    assert tensors_of(graph, "x") == [(8, set()), (2, {"y"}), (6, {"y"})]
    assert tensors_of(graph, "y") == [(4, {"[2, 3]", "z"})]  # 3.5 bytes round up to 4: one tensor
    assert tensors_of(graph, "[2, 3]") == [(0, {"z"})]
    assert graph.tensor_storage.tolist() == [0, 0, NO_STORAGE, 3, 4]
    assert graph.keep.tolist() == [True, False, False, False, False]


def test_ids_of_two_types_are_two_ops_and_a_repeated_name_gets_its_id() -> None:
    nodes = [{"id": 1}, {"id": "1"}, {"id": 2, "name": "relu"}, {"id": 3, "name": "relu"}]
    graph = read({"nodes": nodes, "links": [{"source": "1", "target": 1}]})
    assert graph.op_name == ("1#1", "1", "relu", "relu#3")
    assert [side.tolist() for side in edges(graph)] == [[0], [1]]


def test_groups_named_by_text_are_numbered() -> None:
    nodes = [{"id": at, "group": group} for at, group in enumerate(["enc", "dec", "enc", None, -1, 7])]
    assert read({"nodes": nodes, "edges": []}).group.tolist() == [0, 1, 0, NO_GROUP, NO_GROUP, 2]


def test_a_written_file_is_plain_where_nothing_needs_more() -> None:
    document = json.loads(nodelink.write(msr_tiny().graph))
    assert document["directed"] is True
    assert document["multigraph"] is False
    assert document["nodes"][2]["id"] == "join"
    assert document["nodes"][2]["resident_bytes"] == 7
    assert document["links"][0]["bytes"] == 12


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (changed(TINY, "nodes", 3, "id", to="y"), GraphError, r"duplicate id 'y': nodes\[1\] and nodes\[3\]"),
        (changed(TINY, "links", 4, "target", to="w"), GraphError, r"links\[4\] .*-> 'w'\) names 'w'"),
        (changed(TINY, "links", 4, "source", to=9), GraphError, "names 9, which does not exist"),
        (changed(TINY, "links", 4, to={"source": "z", "target": "y"}), GraphError, "cycle: .*'z'"),
        (changed(TINY, "links", 4, to={"source": "z", "target": "z"}), GraphError, "cycle"),
        (changed(TINY, "nodes", to=[]), GraphError, "does not exist"),
        (b'{"nodes": [], "links": []}', GraphError, "0 ops"),
        (b'{"nodes": [{"id": 1}]}', FormatError, "neither 'links' nor 'edges'"),
        (changed(TINY, "directed", to=False), FormatError, "undirected"),
        (changed(TINY, "nodes", 0, "flops", to=-1), GraphError, r"nodes\[0\]: flops or time come to -1.0"),
        (changed(TINY, "nodes", 1, "time_us", to=-2), GraphError, r"nodes\[1\]: flops or time"),
        (changed(TINY, "nodes", 0, "flops", to=float("nan")), FormatError, "malformed.*NaN"),
        (changed(TINY, "nodes", 0, "flops", to=float("inf")), FormatError, "malformed.*Infinity"),
        (changed(TINY, "nodes", 1, "time_us", to=1e308), GraphError, "inf flops"),
        (changed(TINY, "nodes", 0, "memory", to=-5), GraphError, r"nodes\[0\].resident_bytes is -5"),
        (changed(TINY, "nodes", 0, "bytes_moved", to=2**63), GraphError, r"nodes\[0\].bytes_moved"),
        (changed(TINY, "nodes", 0, "dtype", to="float31"), UnknownNameError, "did you mean 'float32'"),
        (changed(TINY, "nodes", 0, "phase", to="forwards"), UnknownNameError, r"nodes\[0\].phase.*'forward'"),
        (changed(TINY, "nodes", 1, "mirror", to="w"), GraphError, "mirrors 'w'"),
        (changed(TINY, "nodes", 3, "mirror", to=1), GraphError, "only a backward op"),
        (changed(TINY, "nodes", 0, "signature", to=2), GraphError, "signature is 2.*has [01] rows"),
        (changed(TINY, "nodes", 0, "outputs", 1, "storage", to=3), GraphError, "storage is 3; needs .* 0..2"),
        (changed(TINY, "nodes", 0, "outputs", 1, "bytes", to=-1), GraphError, r"outputs\[1\].bytes is -1"),
        (changed(TINY, "nodes", 0, "outputs", 1, "tensor", to=1), GraphError, "tensor 0 is missing"),
        (changed(TINY, "links", 0, "output", to=3), GraphError, "output is 3, its source has 3 outputs"),
        (changed(TINY, "links", 0, "bytes", to=5), GraphError, "carries 5 bytes, its source's outputs 2;"),
        (changed(TINY, "links", 1, "bytes", to=None), GraphError, "carries None bytes.* 8, 2, 6"),
        (changed(TINY, "links", 2, "weight", to=-1), GraphError, "bytes is -1"),
        (changed(TINY, "nodes", 0, "id", to=None), FormatError, r"\$.nodes\[0\].id"),
        (changed(TINY, "nodes", 0, "kind", to=3), FormatError, r"\$.nodes\[0\].kind"),
        (changed(TINY, "links", 0, to={"source": 1}), FormatError, r"target` - at `\$.links\[0\]"),
        (changed(TINY, "nodes", 0, "id", to=json.loads("[" * 50 + "]" * 50)), FormatError, "nodes"),
    ],
)  # fmt: skip
def test_bad_file_is_refused(data: bytes, error: type[InputError], message: str) -> None:
    with pytest.raises(error, match=message):
        nodelink.read(data, "bad")


def test_text_that_is_not_unicode_cannot_be_written() -> None:
    document = json.dumps({"nodes": [{"id": 1}], "links": []}).encode()
    graph = nodelink.read(document, "\ud800").graph
    with pytest.raises(GraphError, match="not Unicode"):
        nodelink.write(graph)


def test_a_profile_is_not_node_link() -> None:
    assert not nodelink.recognises(PIPEDREAM.encode())
