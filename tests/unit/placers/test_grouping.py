"""Grouping by hand and on the published families: what merges, what never does, and the way back."""

from dataclasses import replace
from typing import Any

import networkx as nx
import numpy as np
import pytest

from loadmaster.api import plan as place
from loadmaster.core.arrays import Ints
from loadmaster.core.check import check_plan
from loadmaster.core.errors import PlanError, ProblemError
from loadmaster.core.graph import NO_GROUP, NO_MIRROR, Graph, Phase, edges, held_bytes, units
from loadmaster.core.plan import Plan, plan_of
from loadmaster.core.problem import Problem
from loadmaster.graph.build import GraphBuilder
from loadmaster.graph.generate import (
    FAMILIES,
    chain,
    fork_join,
    layered,
    many_source,
    rnn_grid,
    with_benchmark_cluster,
)
from loadmaster.placers.grouping.groups import GroupedProblem, group_ops
from loadmaster.simulator.events.engine import prepare, simulate
from tests.builders import (
    cluster_of,
    diamond,
    fan_out,
    graph_of,
    loose_ops,
    plan_on,
    problem_of,
    star_cluster,
)

PARAM, FORWARD, BACKWARD, UPDATE = Phase.PARAM, Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE


def _published(graph: Graph, *, memory_factor: float = 2.0) -> Problem:
    """The benchmark's four devices, with that many times the memory of all weights, gradients and outputs."""
    workload = with_benchmark_cluster(graph)
    assert workload.cluster is not None
    assert workload.costs is not None
    need = int(graph.resident_bytes.sum() + graph.tensor_bytes.sum())
    each = np.full(4, int(memory_factor * need / 4), dtype=np.int64)
    cluster = replace(workload.cluster, memory_bytes=each)
    return replace(problem_of(graph, cluster, 0.0), costs=workload.costs)


def _sets(group: GroupedProblem) -> list[set[int]]:
    return [
        set(np.flatnonzero(group.coarse.op_of == op).tolist()) for op in range(group.problem.graph.num_ops)
    ]


def _op_bytes(graph: Graph) -> Any:
    """Weights, gradients and outputs of each op of a published family."""
    return graph.resident_bytes + np.bincount(graph.tensor_op, graph.tensor_bytes, graph.num_ops)


def _longest_s(problem: Problem) -> float:
    """The longest path by networkx, on times of the first kind."""
    seconds = problem.costs.compute_s[:, 0].tolist()
    net: nx.DiGraph[int] = nx.DiGraph()
    net.add_nodes_from(range(-1, len(seconds)))
    net.add_weighted_edges_from((-1, op, seconds[op]) for op in range(len(seconds)))
    pairs = zip(*(side.tolist() for side in edges(problem.graph)), strict=True)
    net.add_weighted_edges_from((a, b, seconds[b]) for a, b in pairs)
    return float(nx.dag_longest_path_length(net))


def _listed(problem: Problem) -> Plan:
    """A small list scheduler: longest path to the end first, each op where it ends first, one port each."""
    graph, seconds = problem.graph, problem.costs.compute_s[:, 0].tolist()
    send_s: list[float] = problem.costs.transfer_s.tolist()
    maker: list[int] = graph.tensor_op.tolist()
    reads: list[list[int]] = [[] for _ in seconds]
    rank = list(seconds)
    for tensor, op in sorted(zip(graph.use_tensor.tolist(), graph.use_op.tolist(), strict=True)):
        reads[op].append(tensor)
    for op in reversed(range(len(rank))):
        for tensor in reads[op]:
            rank[maker[tensor]] = max(rank[maker[tensor]], seconds[maker[tensor]] + send_s[tensor] + rank[op])
    free, out, into = [0.0] * 4, [0.0] * 4, [0.0] * 4
    end, device = [0.0] * len(rank), [0] * len(rank)
    there: dict[tuple[int, int], float] = {}
    order = sorted(range(len(rank)), key=lambda op: (-rank[op], op))  # topological: times are above zero

    def arrival(tensor: int, d: int) -> float:
        home = device[maker[tensor]]
        if home == d:
            return end[maker[tensor]]
        sent = max(end[maker[tensor]], out[home], into[d]) + send_s[tensor]
        return there.get((tensor, d), sent)

    for op in order:
        starts = [max([free[d], *(arrival(t, d) for t in reads[op])]) for d in range(4)]
        best = device[op] = starts.index(min(starts))
        for tensor in reads[op]:
            if device[maker[tensor]] != best and (tensor, best) not in there:
                sent = there[tensor, best] = arrival(tensor, best)
                out[device[maker[tensor]]] = into[best] = sent
        end[op] = free[best] = starts[best] + seconds[op]
    return plan_of(np.array(device, dtype=np.int32), np.argsort(order).astype(np.int32))


def _step_s(problem: Problem, plan: Plan) -> float:
    return prepare(problem).score(plan).time_s


# What merges, by hand. One byte takes one second; groups are as long as the longest op unless told otherwise.


def test_chain_merges_up_to_the_longest_op() -> None:
    problem = problem_of(
        graph_of({"makes": [9]}, {"uses": [0], "makes": [9]}, {"uses": [1], "makes": [9]}, {"uses": [2]}),
        star_cluster(2),
        [2.0, 1.0, 4.0, 1.0],
    )
    assert _sets(group_ops(problem)) == [{0, 1}, {2}, {3}]  # 2 + 1 <= 4, but 3 + 4 and 4 + 1 are above
    assert _sets(group_ops(problem, bound_s=96.0)) == [{0, 1}, {2, 3}]  # 96 / (8 * 2) = 6


@pytest.mark.parametrize(("keep", "size"), [(True, 2), (False, 3)])
def test_bytes_of_a_group_stay_within_a_sixteenth_of_the_smallest_device(keep: bool, size: int) -> None:
    # 3 bytes resident each, 2 more if outputs are kept; 160 / 16 = 10
    makes = [{"num_bytes": 2, "keep": keep}]
    ops: list[dict[str, Any]] = [{"resident_bytes": 3, "makes": makes}]
    ops += [{"resident_bytes": 3, "uses": [op], "makes": makes} for op in range(5)]
    cluster = cluster_of({(0, 1): [0], (1, 0): [0]}, kind=[0, 0], memory=[160, 900])
    found = _sets(group_ops(problem_of(graph_of(*ops), cluster, 1.0), bound_s=1e6))
    assert found == [set(range(first, first + size)) for first in range(0, 6, size)]


def test_bytes_read_by_the_backward_pass_count() -> None:
    forward: list[dict[str, Any]] = [{"makes": [4]}, {"uses": [0], "makes": [4]}]
    backward = [
        {"phase": BACKWARD, "mirror": 1, "uses": [0, 1], "makes": [4]},
        {"phase": BACKWARD, "mirror": 0, "uses": [2]},
    ]
    problem = problem_of(graph_of(*forward, *backward), star_cluster(2, memory=8 * 16), 1.0)
    assert (
        group_ops(problem, bound_s=1e6).problem.graph.num_ops == 2
    )  # 4 + 4 bytes saved, the gradient is gone
    tight = problem_of(graph_of(*forward, *backward), star_cluster(2, memory=8 * 16 - 1), 1.0)
    assert group_ops(tight, bound_s=1e6).problem.graph.num_ops == 4


def test_one_branch_merges_into_a_join_while_it_is_cheaper_to_run_than_to_send() -> None:
    problem = problem_of(diamond(5), star_cluster(2), [1.0, 2.0, 3.0, 1.0])
    assert _sets(group_ops(problem)) == [{0}, {2}, {1, 3}]  # saves 5 - 2 rather than 5 - 3


def test_no_branch_merges_into_a_join_when_sending_is_cheaper_or_it_is_not_wanted() -> None:
    cheap = problem_of(diamond(1), star_cluster(2), [1.0, 2.0, 3.0, 1.0])
    assert group_ops(cheap).problem.graph.num_ops == 4
    dear = problem_of(diamond(5), star_cluster(2), [1.0, 2.0, 3.0, 1.0])
    assert group_ops(dear, merge_branches=False).problem.graph.num_ops == 4


def test_the_other_branch_never_follows_the_first_into_the_join() -> None:
    # with the bound this high everything would be one group if rows of single consumers decided
    problem = problem_of(diamond(5), star_cluster(2), [1.0, 2.0, 3.0, 1.0])
    assert _sets(group_ops(problem, bound_s=1e6)) == [{0}, {2}, {1, 3}]


def test_branches_of_a_fork_stay_apart() -> None:
    problem = problem_of(fan_out(3, 9), star_cluster(2), 1.0)
    assert group_ops(problem, bound_s=1e6).problem.graph.num_ops == 4


def test_ops_without_time_are_no_branches() -> None:
    problem = problem_of(diamond(5), star_cluster(2), [1.0, 0.0, 0.0, 1.0])
    assert _sets(group_ops(problem, bound_s=1e6)) == [{0, 1, 2, 3}]


def test_sources_cheaper_than_their_transfer_merge_into_their_consumer_and_others_do_not() -> None:
    makes: list[dict[str, Any]] = [{"makes": [size]} for size in (4, 4, 1)]
    problem = problem_of(graph_of(*makes, {"uses": [0, 1, 2]}), star_cluster(2), [2.0, 2.0, 2.0, 1.0])
    assert _sets(group_ops(problem)) == [{2}, {0, 1, 3}]  # 2 + 2 + 1 s, though the longest op takes 2


def test_edge_beside_a_longer_path_is_no_branch() -> None:
    # a residual connection: x -> f -> add and x -> add
    graph = graph_of({"makes": [1]}, {"uses": [0], "makes": [1]}, {"uses": [0, 1]})
    assert _sets(group_ops(problem_of(graph, star_cluster(2), 1.0), bound_s=1e6)) == [{0, 1, 2}]


def test_parameters_are_no_inputs_of_a_join_and_merge_as_their_readers_do() -> None:
    graph = graph_of(
        {"phase": PARAM, "group": 0, "resident_bytes": 4, "makes": [4]},
        {"phase": PARAM, "group": 1, "resident_bytes": 4, "makes": [4]},
        {"uses": [0], "makes": [1]},
        {"uses": [1, 2], "makes": [1]},
        {"phase": UPDATE, "group": 0, "uses": [0, 3]},
        {"phase": UPDATE, "group": 1, "uses": [1, 3]},
    )
    coarse = group_ops(problem_of(graph, star_cluster(2), [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]), bound_s=1e6)
    assert _sets(coarse) == [{0, 1}, {2, 3}, {4, 5}]
    group = coarse.problem.graph.group
    assert group[0] == group[2] != NO_GROUP  # a parameter stays with its update
    assert group[1] == NO_GROUP  # and may be held elsewhere than it is used


def test_backward_ops_merge_as_their_mirrors_and_stay_with_them() -> None:
    forward = [{"makes": [1]}, {"uses": [0], "makes": [1]}, {"uses": [1], "makes": [1]}]
    backward = [
        {"phase": BACKWARD, "mirror": mirror, "uses": [tensor], "makes": [1]}
        for mirror, tensor in ((2, 2), (1, 3), (0, 4))
    ]
    problem = problem_of(graph_of(*forward, *backward), star_cluster(2), [2.0, 1.0, 5.0, 5.0, 1.0, 2.0])
    coarse = group_ops(problem, bound_s=6 * 16.0)  # 2 + 1 + 1 + 2 is just allowed
    assert _sets(coarse) == [{0, 1}, {2}, {3}, {4, 5}]
    assert coarse.problem.graph.mirror.tolist() == [NO_MIRROR, NO_MIRROR, 1, 0]
    assert coarse.problem.graph.group.tolist() == [0, 1, 1, 0]


def test_backward_op_that_would_close_a_circle_stays_alone() -> None:
    # forward 0 -> 1 merge; backward b1 -> alone -> b0, where `alone` mirrors nothing
    graph = graph_of(
        {"makes": [1]},
        {"uses": [0], "makes": [1]},
        {"phase": BACKWARD, "mirror": 1, "uses": [1], "makes": [1]},
        {"phase": BACKWARD, "uses": [2], "makes": [1]},
        {"phase": BACKWARD, "mirror": 0, "uses": [3]},
    )
    assert _sets(group_ops(problem_of(graph, star_cluster(2), 1.0), bound_s=1e6)) == [{0, 1}, {2}, {3}, {4}]


def test_phases_that_alternate_close_no_circle() -> None:
    # f0 -> b -> f1 and f0 -> f1: the two forward ops may not become one around b
    graph = graph_of({"makes": [1]}, {"phase": BACKWARD, "uses": [0], "makes": [1]}, {"uses": [0, 1]})
    assert group_ops(problem_of(graph, star_cluster(2), 1.0), bound_s=1e6).problem.graph.num_ops == 3


def test_ops_that_no_device_may_run_together_are_not_merged() -> None:
    graph = graph_of({"makes": [1]}, {"uses": [0], "makes": [1]}, {"uses": [1], "makes": [1]}, {"uses": [2]})
    links = {(a, b): [0] for a in range(3) for b in range(3) if a != b}
    cluster = cluster_of(links, kind=[0, 1, 1], on_host=(False, False))
    seconds = np.array([[1.0, np.inf], [1.0, 1.0], [np.inf, 1.0], [1.0, 1.0]])
    problem = problem_of(graph, cluster, seconds)
    assert _sets(group_ops(problem, bound_s=1e6)) == [{0, 1}, {2, 3}]
    pinned = replace(problem, pinned=np.array([-1, 0, 2, 1], dtype=np.int32))
    coarse = group_ops(pinned, bound_s=1e6)
    assert _sets(coarse) == [{0, 1}, {2}, {3}]
    assert coarse.problem.pinned.tolist() == [0, 2, 1]


def test_ops_of_one_group_stay_tied_and_what_they_tie_counts_against_the_limit() -> None:
    # ops 0 and 3 belong together: merging 0 with 1 or 2 with 3 would tie 4 + 1 s, the limit is 4
    chained: list[dict[str, Any]] = [{"uses": [op], "makes": [1]} for op in range(3)]
    graph = graph_of({"makes": [1], "group": 7}, chained[0], chained[1], {**chained[2], "group": 7})
    coarse = group_ops(problem_of(graph, star_cluster(2), [2.0, 1.0, 1.0, 2.0]), bound_s=64.0)
    assert _sets(coarse) == [{0}, {1, 2}, {3}]
    assert coarse.problem.graph.group.tolist() == [0, NO_GROUP, 0]


# The published families.


def test_r7_grouped_chain_fits_where_published_grouping_finds_no_device() -> None:
    problem = _published(chain(1000), memory_factor=1.3)
    coarse = group_ops(problem)
    size = np.bincount(coarse.coarse.op_of, _op_bytes(problem.graph))
    assert len(size) >= 50  # at 1/16 of a device each, with 1.3 times the need in all: 64 / 1.3
    assert size.max() <= problem.cluster.memory_bytes.min() / 16
    found = place(coarse.problem, algorithm="chain_balance")
    assert found.plan is not None
    fine = coarse.back(found.plan)
    assert check_plan(problem, fine) == []
    assert (simulate(problem, fine).peak_bytes <= problem.cluster.memory_bytes).all()


def test_r8_blocks_keep_as_many_groups_as_branches() -> None:
    graph = fork_join(1000)
    coarse = group_ops(_published(graph))
    blocks: dict[str, dict[str, set[int]]] = {}
    for module, group in zip(graph.module, coarse.coarse.op_of.tolist(), strict=True):
        if module.count(".") == 2:
            blocks.setdefault(module.rpartition(".")[0], {}).setdefault(module, set()).add(group)
    assert len(blocks) > 50
    for branches in blocks.values():
        assert len(set.union(*branches.values())) >= len(branches)
        assert sum(map(len, branches.values())) == len(set.union(*branches.values()))  # none spans two
    assert coarse.problem.graph.num_ops < 0.3 * graph.num_ops


def test_r8_longest_path_stays_and_grows_by_a_seventh_at_most_where_branches_merge() -> None:
    problem = _published(fork_join(1000))
    before_s = _longest_s(problem)
    assert before_s == pytest.approx(0.265662)
    assert _longest_s(group_ops(problem, merge_branches=False).problem) == pytest.approx(before_s)
    assert before_s <= _longest_s(group_ops(problem).problem) <= 1.15 * before_s


def test_r8_grouped_plan_is_no_slower_than_an_ungrouped_one() -> None:
    problem = _published(fork_join(1000))
    coarse = group_ops(problem)
    plain_s = _step_s(problem, _listed(problem))
    grouped_s = _step_s(problem, coarse.back(_listed(coarse.problem)))
    assert grouped_s <= plain_s
    assert grouped_s < 0.7 * problem.costs.compute_s.sum()


def test_every_source_is_with_its_consumer() -> None:
    graph = many_source(1000)
    for factor in (1.02, 2.0):
        coarse = group_ops(_published(graph, memory_factor=factor))
        source, target = edges(graph)
        from_source = np.array([kind == "source" for kind in graph.op_kind])[source]
        assert from_source.sum() > 400
        assert (coarse.coarse.op_of[source] == coarse.coarse.op_of[target])[from_source].all()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_work_and_bytes_are_kept(family: str) -> None:
    problem = _published(FAMILIES[family](1000, 0))
    coarse = group_ops(problem).problem
    fine, small = problem.graph, coarse.graph
    assert small.flops.sum() == pytest.approx(fine.flops.sum(), rel=1e-12)
    assert small.bytes_moved.sum() == fine.bytes_moved.sum()
    assert held_bytes(small).sum() == held_bytes(fine).sum()
    assert coarse.costs.compute_s.sum() == pytest.approx(problem.costs.compute_s.sum(), rel=1e-12)
    assert small.num_ops < fine.num_ops


def test_groups_of_a_training_step_merge_backward_alike() -> None:
    graph = FAMILIES["transformer"](1500, 0)
    coarse = group_ops(_published(graph))
    op_of, mirror = coarse.coarse.op_of, graph.mirror
    back = np.flatnonzero(mirror != NO_MIRROR)
    pairs = set(zip(op_of[mirror[back]].tolist(), op_of[back].tolist(), strict=True))
    assert len(pairs) == len({forward for forward, _ in pairs})  # one backward group each
    unit, _ = units(coarse.problem.graph)
    assert all(unit[forward] == unit[backward] for forward, backward in pairs)
    assert coarse.problem.graph.num_ops < 0.2 * graph.num_ops


# Fewer groups than the rules allow.


@pytest.mark.parametrize(
    ("graph", "max_ops"),
    [
        (fork_join(1000), 60),
        (many_source(1000), 100),
        (layered(1000), 300),
        (rnn_grid(1000), 200),
        (loose_ops(300), 64),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_max_ops_is_reached_across_joins_and_said(graph: Graph, max_ops: int) -> None:
    problem = problem_of(graph, star_cluster(4, rate=1e9), np.maximum(graph.flops, 1.0) / 1e12)
    plain, coarse = group_ops(problem), group_ops(problem, max_ops=max_ops)
    assert plain.joins_kept
    assert plain.problem.graph.num_ops > max_ops >= coarse.problem.graph.num_ops
    assert not coarse.joins_kept
    assert check_plan(problem, coarse.back(_round_robin(coarse.problem))) == []


def test_wide_and_recurrent_graphs_keep_their_parallelism_when_they_shrink() -> None:
    for graph, max_ops in ((layered(3000), 1200), (rnn_grid(3000), 300)):
        problem = _published(graph)
        coarse = group_ops(problem, max_ops=max_ops).problem
        assert coarse.graph.num_ops <= max_ops
        assert _longest_s(coarse) <= problem.costs.compute_s.sum() / 4  # four devices can still be busy


def test_bytes_are_not_given_up_for_fewer_groups() -> None:
    problem = _published(chain(1000), memory_factor=1.3)
    coarse = group_ops(problem, max_ops=1)
    size = np.bincount(coarse.coarse.op_of, _op_bytes(problem.graph))
    assert len(size) >= 16 * 4 / 1.3
    assert size.max() <= problem.cluster.memory_bytes.min() / 16


def test_max_ops_that_the_rules_reach_keeps_joins() -> None:
    coarse = group_ops(_published(fork_join(1000)), max_ops=600)
    assert coarse.joins_kept
    assert coarse.problem.graph.num_ops <= 600


# The way back.


def _round_robin(problem: Problem) -> Plan:
    unit, _ = units(problem.graph)
    return plan_on((unit % problem.cluster.num_devices).tolist())


def test_plan_without_an_order_comes_back_without_one() -> None:
    coarse = group_ops(_published(chain(100)))
    plan = _round_robin(coarse.problem)
    fine = coarse.back(plan)
    assert len(set(fine.priority.tolist())) == 1
    assert fine.device.tolist() == plan.device[coarse.coarse.op_of].tolist()


def test_order_of_groups_is_the_order_of_their_ops() -> None:
    problem = problem_of(
        graph_of({"makes": [9]}, {"makes": [9]}, {"uses": [0]}, {"uses": [1]}), star_cluster(1), 1.0
    )
    coarse = group_ops(problem, bound_s=1e6)
    assert _sets(coarse) == [{0, 2}, {1, 3}]
    assert coarse.back(plan_on([0, 0], [5, 2])).priority.tolist() == [2, 0, 3, 1]


def test_peak_of_the_way_back_counts_tensors_inside_a_group() -> None:
    # 0 -(6)-> 1 -(1)-> 2: the first two merge, and the tensor of 6 bytes is gone from the coarse graph
    graph = graph_of({"makes": [6]}, {"uses": [0], "makes": [1]}, {"uses": [1], "resident_bytes": 1})
    problem = problem_of(graph, star_cluster(2, memory=7 * 16), [1.0, 1.0, 2.0])
    coarse = group_ops(problem)
    assert _sets(coarse) == [{0, 1}, {2}]
    assert simulate(coarse.problem, plan_on([0, 1])).peak_bytes.tolist() == [1, 2]
    assert simulate(problem, coarse.back(plan_on([0, 1]))).peak_bytes.tolist() == [7, 2]


def test_what_does_not_fit_is_refused() -> None:
    problem = problem_of(diamond(5), star_cluster(2), [1.0, 2.0, 3.0, 1.0])
    coarse = group_ops(problem)
    with pytest.raises(PlanError, match="4 ops does not fit 3 groups"):
        coarse.back(plan_on([0, 0, 0, 0]))
    for wrong in ({"max_ops": 0}, {"time_share": 0}, {"byte_share": -1}):
        with pytest.raises(ProblemError, match="give 1 or more"):
            group_ops(problem, **wrong)  # type: ignore[arg-type]


def test_grouping_twice_gives_the_same() -> None:
    problem = _published(fork_join(500))
    one, other = (group_ops(problem, max_ops=40) for _ in range(2))
    assert one.problem.digest == other.problem.digest
    labels: list[Ints] = [one.coarse.op_of, other.coarse.op_of]
    assert (labels[0] == labels[1]).all()


def test_groups_of_a_graph_from_the_builder_have_its_names() -> None:
    builder = GraphBuilder("row")
    a, b = builder.op("a", module="m.x"), builder.op("b", module="m.y")
    builder.use(builder.tensor(a, 1), b)
    coarse = group_ops(problem_of(builder.build(), star_cluster(2), 1.0), bound_s=1e6)
    assert coarse.problem.graph.op_name == ("a",)  # of its first member
    assert coarse.problem.graph.module == ("m.x",)
