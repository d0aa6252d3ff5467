"""Pipedream profiles, our own JSON, and what holds for every format: bad files have clear errors."""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from loadmaster.core import io
from loadmaster.core.errors import FormatError, GraphError, InputError
from loadmaster.core.graph import Graph, Phase, edges
from loadmaster.core.plan import Plan
from loadmaster.core.problem import Links, Objective
from loadmaster.graph.formats import msr, nodelink, own, pipedream, piper
from tests.unit.formats.format_samples import (
    MSR,
    PIPEDREAM,
    PIPER,
    by_name,
    changed,
    msr_tiny,
    tensors_of,
    tiny_problem,
)

# --- pipedream ---------------------------------------------------------------------------------


def test_pipedream_layers_become_four_ops_of_one_group() -> None:
    graph = pipedream.read(PIPEDREAM.encode(), "tiny").graph
    assert graph.op_name == (
        "1:Input0", "2:Linear weight", "2:Linear", "3:LSTM", "4:Add",
        "4:Add backward", "3:LSTM backward", "2:Linear backward", "2:Linear update", "1:Input0 backward",
    )  # fmt: skip
    assert graph.op_kind[by_name(graph, "3:LSTM backward")] == "lstm"
    assert graph.flops.tolist() == [1e9, 0, 2e9, 0.5e9, 0, 0, 1e9, 3.5e9, 0, 0]
    linear = [by_name(graph, f"2:Linear{suffix}") for suffix in ("", " weight", " backward", " update")]
    assert graph.phase[linear].tolist() == [Phase.FORWARD, Phase.PARAM, Phase.BACKWARD, Phase.UPDATE]
    assert len(set(graph.group[linear].tolist())) == 1
    assert len(set(graph.group.tolist())) == 4
    mirrored = {
        graph.op_name[op]: graph.op_name[graph.mirror[op]] for op in np.flatnonzero(graph.mirror >= 0)
    }
    assert mirrored == {f"{name} backward": name for name in ("1:Input0", "2:Linear", "3:LSTM", "4:Add")}


def test_pipedream_tensors_go_where_training_needs_them() -> None:
    graph = pipedream.read(PIPEDREAM.encode(), "tiny").graph
    add, lstm, linear = "4:Add", "3:LSTM", "2:Linear"
    saved = {linear, lstm, f"{linear} backward", f"{lstm} backward"}
    assert tensors_of(graph, "1:Input0") == [(8, saved)]
    assert tensors_of(graph, linear) == [(64, {add, f"{add} backward"})]
    assert tensors_of(graph, lstm) == [(16, {add, f"{add} backward"})]
    assert tensors_of(graph, add) == [(5, {f"{add} backward"})]
    assert sorted(tensors_of(graph, f"{add} backward")) == [
        (16, {f"{lstm} backward"}),
        (64, {f"{linear} backward"}),
    ]
    assert tensors_of(graph, f"{lstm} backward") == [(8, {"1:Input0 backward"})]
    gradients = [(8, {"1:Input0 backward"}), (72, {f"{linear} update"})]
    assert sorted(tensors_of(graph, f"{linear} backward")) == gradients
    assert tensors_of(graph, f"{linear} weight") == [(72, {linear, f"{linear} backward", f"{linear} update"})]
    assert not graph.keep.any()
    assert (graph.resident_bytes > 0).tolist() == (graph.phase == Phase.PARAM).tolist()


def test_pipedream_brings_four_reference_devices_and_sgd() -> None:
    work = pipedream.read(PIPEDREAM.encode(), "tiny")
    assert work.cluster is not None
    assert work.cluster.num_devices == 4
    assert work.costs is not None
    assert work.costs.compute_s.sum() == pytest.approx(8e-3)  # milliseconds of the file
    assert (work.optimizer, work.objective) == ("sgd", Objective.STEP)


NODE5 = (
    "node5 -- ReLU -- forward_compute_time={}, backward_compute_time={},"
    " activation_size={}, parameter_size={}"
)


@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        ("\tnode4 -- node1", GraphError, "cycle.*'2:Linear'"),
        ("\tnode4 -- node4", GraphError, "cycle"),
        ("\tnode4 -- node9", GraphError, "line 9: edge node4 -> node9 names node9"),
        (
            NODE5.replace("5", "3").format(1, 1, 1, 1),
            GraphError,
            "line 9: duplicate id node3, first on line 5",
        ),
        (NODE5.format(-1, 1, 1, 1), FormatError, "line 9: forward_compute_time is '-1'"),
        (NODE5.format("nan", 1, 1, 1), FormatError, "line 9: forward_compute_time is 'nan'"),
        (NODE5.format(1, "inf", 1, 1), FormatError, "line 9: backward_compute_time is 'inf'"),
        (NODE5.format(1, "1e999", 1, 1), FormatError, "line 9: backward_compute_time is '1e999'"),
        (NODE5.format(1, 1, "[1; two]", 1), FormatError, "line 9: activation_size is ' two'"),
        (NODE5.format(1, 1, "[]", 1), FormatError, "line 9: activation_size is ''"),
        (NODE5.format(1, 1, 1, "1_0"), FormatError, "line 9: parameter_size is '1_0'"),
        (NODE5.format(1, 1, 1, "1.2.3"), FormatError, "line 9: parameter_size is '1.2.3'"),
        (NODE5.format(1, 1, 1, 1e30), FormatError, "line 9: parameter_size is 1e"),
        (NODE5.format(1, 1, 1, 2.0**60), GraphError, "the limit is"),
        (NODE5.format(1, 1, 1, 1)[:60], FormatError, "line 9: 'node5 -- ReLU.* is neither"),
        ("node5", FormatError, "line 9: 'node5' is neither"),
        ("\tnode4 --", FormatError, "line 9"),
    ],
)
def test_pipedream_bad_line_is_refused_by_its_number(
    line: str, error: type[InputError], message: str
) -> None:
    with pytest.raises(error, match=message):
        pipedream.read(f"{PIPEDREAM}\n{line}".encode(), "bad")


def test_pipedream_file_of_other_bytes_or_without_nodes_is_refused() -> None:
    with pytest.raises(FormatError, match="utf-8"):
        pipedream.read(b"node1 -- \xff", "bad")
    with pytest.raises(GraphError, match="0 nodes"):
        pipedream.read(b"\n\n", "bad")


def test_pipedream_line_ends_and_stage_ids_do_not_matter() -> None:
    windows = PIPEDREAM.replace("\n", "\r\n").replace("=72.000", "=72.000 -- stage_id=1") + "\r\n"
    wanted = pipedream.read(PIPEDREAM.encode(), "a").graph
    assert pipedream.read(windows.encode(), "b").graph.digest == wanted.digest


# --- our own -----------------------------------------------------------------------------------


def test_own_problem_brings_cluster_costs_and_question() -> None:
    problem = tiny_problem()
    work = own.read(io.encode(problem), "p")
    assert work.cluster is not None
    assert work.costs is not None
    assert work.graph.digest == problem.graph.digest
    assert (work.cluster.digest, work.costs.digest) == (problem.cluster.digest, problem.costs.digest)
    assert (work.objective, work.links) == (Objective.THROUGHPUT, Links.HOST)


def test_own_graph_brings_only_itself() -> None:
    graph = msr_tiny().graph
    work = own.read(io.encode(graph), "g")
    assert work.graph.digest == graph.digest
    assert (work.cluster, work.costs, work.objective) == (None, None, Objective.STEP)


def test_own_file_without_a_graph_says_what_it_holds() -> None:
    plan = Plan(np.zeros(2, np.int32), np.arange(2, dtype=np.int32), np.zeros(2, np.bool_), None)
    with pytest.raises(FormatError, match="p holds a plan, not a graph"):
        own.read(io.encode(plan), "p")


# --- all of them -------------------------------------------------------------------------------

Module = Any
DEEP = b"[" * 100_000


@pytest.mark.parametrize("module", [msr, nodelink, own, pipedream, piper], ids=lambda module: module.__name__)
@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b"null", b"3", b'"x"', DEEP, b'{"nodes": ' + DEEP, b'{"loadmaster": ' + DEEP,
        b'{"x": ' + DEEP, b"\xff\xfe", b"\0\0", b'{"nodes": [], "links": []', b'{"nodes": 1, "links": {}}',
    ],
    ids=lambda data: repr(data[:24]),
)  # fmt: skip
def test_garbage_is_a_clear_error_in_every_format(module: Module, data: bytes) -> None:
    assert module.recognises(data) in (True, False)
    with pytest.raises(InputError):
        module.read(data, "bad")


def test_every_truncation_of_a_file_is_an_error_or_a_shorter_file() -> None:
    whole: list[tuple[Module, bytes]] = [
        (msr, json.dumps(MSR).encode()),
        (piper, json.dumps(PIPER).encode()),
        (own, io.encode(msr_tiny().graph)),
        (nodelink, nodelink.write(msr_tiny().graph)),
    ]
    for module, data in whole:
        for length in range(0, len(data), 7):
            with pytest.raises(FormatError):
                module.read(data[:length], "cut")


def test_a_file_is_recognised_by_its_own_format_alone() -> None:
    graph = msr_tiny().graph
    samples: dict[Module, list[bytes]] = {
        msr: [json.dumps(MSR).encode(), json.dumps(MSR, indent=2).encode(), json.dumps(MSR).encode()[:300]],
        nodelink: [nodelink.write(graph), nodelink.write(graph)[:300], b'{"edges": [], "nodes": []}'],
        own: [io.encode(graph), io.encode(tiny_problem()), io.encode(graph)[:100]],
        piper: [json.dumps(PIPER).encode(), json.dumps(PIPER).encode()[:80]],
        pipedream: [PIPEDREAM.encode(), b"\n\tnode1 -- node2\n"],
    }
    recognisers: list[tuple[Module, Callable[[bytes], bool]]] = [(m, m.recognises) for m in samples]
    for module, files in samples.items():
        for data in files:
            assert [m for m, recognises in recognisers if recognises(data)] == [module], data[:80]


def test_names_may_hold_anything() -> None:
    odd = '<b>"\n\t\\ {x} \u2028 [red]'
    graph = msr.read(changed(MSR, "nodes", 1, "name", to=odd), "odd").graph
    assert odd in graph.op_name
    for module, write in ((own, io.encode), (nodelink, nodelink.write)):
        again: Graph = module.read(write(graph), "odd").graph
        assert again.op_name == graph.op_name
        assert np.array_equal(edges(again), edges(graph))


# Numbers, texts, holes and nests, to put in place of any value of a good file.
ODD: list[object] = [
    None, True, -1, 0, 3, 2**31, 2**62, 2**63, 2**64, 2**80, 0.5, -0.5, 1e308,
    "", "conv", "\x00", [], [[[1]]], {}, {"id": 1},
]  # fmt: skip


def paths(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Every place in a JSON document, the first two records of a list standing for all."""
    items = list(value.items()) if isinstance(value, dict) else []
    items += list(enumerate(value[:2])) if isinstance(value, list) else []
    return [place for key, part in items for place in [(*path, key), *paths(part, (*path, key))]]


def outcome(module: Module, data: bytes) -> str:
    """'read' or 'refused'; any other exception is a failure."""
    try:
        module.read(data, "odd")
    except InputError as problem:
        return "refused" if str(problem) else "refused without a word"
    return "read"


@pytest.mark.parametrize("module", [msr, nodelink, own, piper], ids=lambda module: module.__name__)
def test_any_value_in_any_place_is_read_or_refused(module: Module) -> None:
    writer = {
        msr: lambda: json.dumps(MSR).encode(),
        piper: lambda: json.dumps(PIPER).encode(),
        own: lambda: io.encode(tiny_problem()),
    }
    document = json.loads(writer.get(module, lambda: nodelink.write(msr_tiny().graph))())
    document.pop("digest", None)
    outcomes = Counter(
        outcome(module, changed(document, *path, to=odd)) for path in paths(document) for odd in ODD
    )
    assert outcomes["refused"] > outcomes["read"] > 0
