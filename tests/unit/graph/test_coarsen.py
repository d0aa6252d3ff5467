"""Coarsening by hand: what merges, what stays, and the way back."""

from itertools import pairwise

import numpy as np
import pytest

from loadmaster.core.arrays import Ints
from loadmaster.core.errors import InputError
from loadmaster.core.graph import NO_GROUP, NO_MIRROR, NO_SIGNATURE, Dtype, Graph, Phase, edges, held_bytes
from loadmaster.core.plan import Pipeline, Plan
from loadmaster.core.problem import BY_ROUTE, Costs, Origin
from loadmaster.graph.build import GraphBuilder
from loadmaster.graph.coarsen import coarsen_costs, expand
from loadmaster.graph.generate import FAMILIES, chain
from tests.builders import diamond, loose_ops
from tests.coarsening import coarsen, label_by_module


def _labels(*values: int) -> Ints:
    return np.array(values, dtype=np.int32)


def _pairs(graph: Graph) -> list[tuple[int, int]]:
    return list(zip(*(side.tolist() for side in edges(graph)), strict=True))


def test_merged_ops_add_their_work_and_take_the_largest_workspace() -> None:
    builder = GraphBuilder("three")
    small = builder.op("small", kind="a", flops=1.0, bytes_moved=10, resident_bytes=100, workspace_bytes=7)
    large = builder.op(
        "large",
        kind="b",
        flops=5.0,
        bytes_moved=20,
        resident_bytes=200,
        workspace_bytes=3,
        dtype=Dtype.FLOAT16,
    )
    last = builder.op("last", kind="c", flops=2.0, signature="c [3]")
    builder.use(builder.tensor(small, 11), large)
    builder.use(builder.tensor(large, 22), last)
    coarse = coarsen(builder.build(), _labels(4, 4, -9))
    graph = coarse.graph
    assert coarse.op_of.tolist() == [0, 0, 1]
    assert graph.op_name == ("small (+1)", "last")
    assert graph.op_kind == ("fused", "c")
    assert graph.flops.tolist() == [6.0, 2.0]
    assert graph.bytes_moved.tolist() == [30, 0]
    assert graph.resident_bytes.tolist() == [300, 0]
    assert graph.workspace_bytes.tolist() == [7, 0]
    assert graph.dtype.tolist() == [Dtype.FLOAT16, Dtype.FLOAT32]
    assert graph.signature.tolist() == [NO_SIGNATURE, 0]
    assert (graph.tensor_bytes.tolist(), coarse.tensor_of.tolist()) == ([22], [1])


def test_tensor_used_by_two_members_is_used_once() -> None:
    graph = coarsen(diamond(), _labels(0, 1, 1, 2)).graph
    assert graph.num_tensors == 3
    assert list(zip(graph.use_tensor.tolist(), graph.use_op.tolist(), strict=True)) == [
        (0, 1),
        (1, 2),
        (2, 2),
    ]


def test_a_circle_between_merged_ops_becomes_one_op() -> None:
    # a -> b -> c with a and c merged: b lies between them
    coarse = coarsen(chain(3), _labels(0, 1, 0))
    assert coarse.graph.num_ops == 1
    assert coarse.op_of.tolist() == [0, 0, 0]


def test_result_stands_in_topological_order_and_otherwise_by_first_member() -> None:
    # a, b, c -> a2 with a and a2 merged: c must now come before a, and b is the first that is ready
    builder = GraphBuilder("late input")
    a, b, c, a2 = (builder.op(name) for name in ("a", "b", "c", "a2"))
    builder.use(builder.tensor(c, 1), a2)
    coarse = coarsen(builder.build(), _labels(a, b, c, a))
    assert coarse.graph.op_name == ("b", "c", "a (+1)")
    assert coarse.op_of.tolist() == [2, 0, 1, 2]
    assert a2 == 3


def test_base_stays_before_a_view_that_does_not_read_it() -> None:
    builder = GraphBuilder("late base")
    a, v, c, a2 = (builder.op(name) for name in ("a", "v", "c", "a2"))
    read = builder.op("read")
    base = builder.tensor(a, 8)
    builder.use(base, read)
    builder.use(builder.tensor(v, 4, storage=base), read)
    builder.use(builder.tensor(c, 1), a2)
    graph = coarsen(builder.build(), _labels(a, v, c, a, read)).graph
    assert graph.op_name == ("c", "a (+1)", "v", "read")


def test_phases_of_one_label_stay_apart_and_mirror_each_other() -> None:
    builder = GraphBuilder("step")
    forward = [builder.op(f"f{i}", group=i) for i in range(2)]
    backward = [
        builder.op(f"b{i}", phase=Phase.BACKWARD, mirror=forward[i], group=i) for i in reversed(range(2))
    ]
    row = [*forward, *backward]
    for left, right in pairwise(row):
        builder.use(builder.tensor(left, 1), right)
    graph = coarsen(builder.build(), _labels(0, 0, 0, 0)).graph
    assert graph.op_name == ("f0 (+1)", "b1 (+1)")
    assert graph.phase.tolist() == [Phase.FORWARD, Phase.BACKWARD]
    assert graph.mirror.tolist() == [NO_MIRROR, 0]
    assert graph.group[0] == graph.group[1] != NO_GROUP


def test_backward_op_of_two_forward_ops_mirrors_neither() -> None:
    builder = GraphBuilder("step")
    forward = [builder.op(f"f{i}") for i in range(2)]
    for i in range(2):
        builder.op(f"b{i}", phase=Phase.BACKWARD, mirror=forward[i])
    graph = coarsen(builder.build(), _labels(0, 1, 2, 2)).graph
    assert graph.mirror.tolist() == [NO_MIRROR] * 3


def test_groups_that_meet_in_a_coarse_op_become_one() -> None:
    builder = GraphBuilder("groups")
    for op, group in enumerate([1, 2, 1, 2, NO_GROUP, 7]):
        builder.op(f"op{op}", group=group)
    graph = coarsen(builder.build(), _labels(0, 0, 2, 3, 4, 5)).graph  # op0 and op1 merge groups 1 and 2
    assert len(set(graph.group[:3].tolist())) == 1
    assert graph.group[0] != NO_GROUP
    assert graph.group[3:].tolist() == [NO_GROUP, NO_GROUP]  # a group of one is no constraint


def test_kept_tensor_without_outer_use_becomes_resident_and_others_vanish() -> None:
    builder = GraphBuilder("kept")
    a, b = builder.op("a"), builder.op("b")
    builder.use(builder.tensor(a, 5, keep=True), b)
    builder.use(builder.tensor(a, 9), b)
    builder.tensor(b, 3, keep=True)
    graph = coarsen(builder.build(), _labels(0, 0)).graph
    assert graph.num_tensors == 0
    assert graph.resident_bytes.tolist() == [8]


def test_storage_stays_as_long_as_one_of_its_views_does() -> None:
    # base (30 bytes, in the first op) -> slice (10 bytes, in the first op too) -> reader
    builder = GraphBuilder("sliced")
    make, cut, read = (builder.op(name) for name in ("make", "cut", "read"))
    base = builder.tensor(make, 30)
    builder.use(base, cut)
    view = builder.tensor(cut, 10, storage=base)
    builder.use(view, read)
    coarse = coarsen(builder.build(), _labels(0, 0, 1))
    assert coarse.tensor_of.tolist() == [base, view]
    assert coarse.graph.tensor_storage.tolist() == [0, 0]
    assert coarse.graph.use_tensor.tolist() == [1]


def test_names_stay_unique_when_a_made_name_exists() -> None:
    builder = GraphBuilder("names")
    for name in ("x", "y", "x (+1)"):
        builder.op(name)
    graph = coarsen(builder.build(), _labels(0, 0, 1)).graph
    assert graph.op_name == ("x (+1)", "x (+1) #2")


def test_module_of_a_coarse_op_is_what_its_members_share() -> None:
    builder = GraphBuilder("modules")
    for i, module in enumerate(["h.1.attn.c", "h.1.attn.d", "h.10.attn", ""]):
        builder.op(f"op{i}", module=module)
    graph = builder.build()
    assert coarsen(graph, _labels(0, 0, 1, 2)).graph.module == ("h.1.attn", "h.10.attn", "")
    assert coarsen(graph, _labels(0, 0, 0, 2)).graph.module == ("h", "")


def test_transformer_by_layer_keeps_its_phases_and_is_fit_for_training_rules() -> None:
    fine = FAMILIES["transformer"](1500, 0)
    graph = coarsen(fine, label_by_module(fine, 2)).graph
    ops = [(module, Phase(phase)) for module, phase in zip(graph.module, graph.phase, strict=True)]
    assert all(ops.count((f"h.{layer}", phase)) == 1 for layer in range(12) for phase in Phase)
    forward, backward = ops.index(("h.7", Phase.FORWARD)), ops.index(("h.7", Phase.BACKWARD))
    assert graph.mirror[backward] == forward
    assert graph.group[backward] == graph.group[forward] != NO_GROUP
    param, update = ops.index(("h.7", Phase.PARAM)), ops.index(("h.7", Phase.UPDATE))
    assert graph.group[param] == graph.group[update] != graph.group[forward]
    assert held_bytes(graph).sum() == held_bytes(fine).sum()


def test_costs_of_members_add_up_and_transfers_stay_as_given() -> None:
    coarse = coarsen(diamond(), _labels(0, 1, 1, 2))
    costs = Costs(
        compute_s=np.array([[1.0, 2.0], [3.0, np.inf], [5.0, 6.0], [7.0, 8.0]]),
        issue_s=np.array([0.5, 0.25, 0.25, 0.0]),
        transfer_s=np.array([4.0, BY_ROUTE, 6.0]),
        origin=np.array([Origin.GIVEN, Origin.GIVEN, Origin.MEASURED, Origin.ANALYTIC], dtype=np.int8),
        rel_error=np.array([0.1, 0.2, 0.3, 0.4]),
    )
    found = coarsen_costs(costs, coarse)
    assert found.compute_s.tolist() == [[1.0, 2.0], [8.0, np.inf], [7.0, 8.0]]
    assert found.issue_s.tolist() == [0.5, 0.5, 0.0]
    assert found.transfer_s.tolist() == [4.0, BY_ROUTE, 6.0]
    assert found.origin.tolist() == [Origin.GIVEN, Origin.MEASURED, Origin.ANALYTIC]
    assert found.rel_error.tolist() == [0.1, 0.3, 0.4]


def test_plan_expands_to_members_in_graph_order() -> None:
    coarse = coarsen(loose_ops(5), _labels(0, 1, 0, 1, 2))
    pipeline = Pipeline(
        stage=_labels(0, 1, 1),
        replicas=_labels(1, 1),
        num_microbatches=4,
        schedule="1f1b",
        in_flight=_labels(2, 1),
        stage_s=np.ones(2),
    )
    recompute = np.array([False, True, False])
    plan = Plan(device=_labels(2, 0, 1), priority=_labels(10, 5, 7), recompute=recompute, pipeline=pipeline)
    fine = expand(plan, coarse)
    assert fine.device.tolist() == [2, 0, 2, 0, 1]
    assert fine.priority.tolist() == [3, 0, 4, 1, 2]
    assert fine.recompute.tolist() == [False, True, False, True, False]
    assert fine.pipeline is not None
    assert fine.pipeline.stage.tolist() == [0, 1, 0, 1, 1]
    assert fine.pipeline.num_microbatches == 4


def test_what_does_not_fit_together_is_refused() -> None:
    graph = loose_ops(3)
    coarse = coarsen(graph, _labels(0, 0, 1))
    other = coarsen(loose_ops(4), _labels(0, 1, 2, 3))
    plan = Plan(device=_labels(0), priority=_labels(0), recompute=np.zeros(1, dtype=np.bool_), pipeline=None)
    with pytest.raises(InputError, match="1 ops does not fit 2 coarse"):
        expand(plan, coarse)
    costs = Costs(np.ones((3, 1)), np.zeros(3), np.zeros(0), np.zeros(3, dtype=np.int8), np.zeros(3))
    with pytest.raises(InputError, match="3 ops do not fit a map of 4"):
        coarsen_costs(costs, other)
