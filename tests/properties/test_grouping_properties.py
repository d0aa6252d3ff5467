"""Grouping any problem: acyclic, nothing lost, constraints kept, and every plan of the groups can be run."""

import networkx as nx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from loadmaster.core.check import check_plan
from loadmaster.core.graph import NO_GROUP, NO_MIRROR, NO_STORAGE, Graph, Phase, units
from loadmaster.core.problem import FREE, Problem
from loadmaster.placers.grouping.groups import GroupedProblem, group_ops
from loadmaster.simulator.events.engine import simulate
from tests.builders import graph_of, problem_of, star_cluster
from tests.strategies import picks, plans, problems


@st.composite
def groupings(draw: st.DrawFn) -> tuple[Problem, GroupedProblem]:
    """A problem with its grouping under drawn limits, often generous ones."""
    problem = draw(problems(max_ops=14))
    group = group_ops(
        problem,
        bound_s=draw(st.sampled_from((None, 1e3))),
        max_ops=draw(st.sampled_from((None, None, 1, 3))),
        merge_branches=draw(st.booleans()),
        byte_share=draw(st.sampled_from((1, 16))),
    )
    return problem, group


def _order(graph: Graph) -> "nx.DiGraph[int]":
    """Producer before consumer, base before view."""
    net: nx.DiGraph[int] = nx.DiGraph()
    net.add_nodes_from(range(graph.num_ops))
    maker = graph.tensor_op.tolist()
    net.add_edges_from((maker[t], op) for t, op in zip(graph.use_tensor, graph.use_op.tolist(), strict=True))
    bases = enumerate(graph.tensor_storage.tolist())
    net.add_edges_from((maker[base], maker[t]) for t, base in bases if base != NO_STORAGE)
    net.remove_edges_from(list(nx.selfloop_edges(net)))
    return net


@settings(deadline=None)
@given(groupings())
def test_groups_stand_in_topological_order_and_hold_one_phase(case: tuple[Problem, GroupedProblem]) -> None:
    problem, group = case
    op_of = group.coarse.op_of.tolist()
    assert set(op_of) == set(range(group.problem.graph.num_ops))
    assert all(op_of[a] <= op_of[b] for a, b in _order(problem.graph).edges)
    assert group.problem.graph.phase[op_of].tolist() == problem.graph.phase.tolist()


@settings(deadline=None)
@given(groupings())
def test_work_and_seconds_are_kept(case: tuple[Problem, GroupedProblem]) -> None:
    problem, group = case
    fine, small = problem.graph, group.problem.graph
    assert small.flops.sum() == fine.flops.sum()
    for op in range(small.num_ops):
        members = group.coarse.op_of == op
        assert group.problem.costs.compute_s[op].tolist() == problem.costs.compute_s[members].sum(0).tolist()
        assert small.resident_bytes[op] >= fine.resident_bytes[members].sum()
        pins = set(problem.pinned[members].tolist()) - {FREE}
        assert pins == set(group.problem.pinned[[op]].tolist()) - {FREE}


@settings(deadline=None)
@given(groupings())
def test_what_belongs_together_is_tied(case: tuple[Problem, GroupedProblem]) -> None:
    problem, group = case
    unit, _ = units(group.problem.graph)
    place = unit[group.coarse.op_of]
    for name in set(problem.graph.group.tolist()) - {NO_GROUP}:
        assert len(set(place[problem.graph.group == name].tolist())) == 1
    if (problem.pinned == FREE).all() and np.isfinite(problem.costs.compute_s).all():
        back = np.flatnonzero(problem.graph.mirror != NO_MIRROR)
        assert (place[back] == place[problem.graph.mirror[back]]).all()


@settings(deadline=None)
@given(groupings(), st.data())
def test_any_plan_of_the_groups_comes_back_valid_and_runs(
    case: tuple[Problem, GroupedProblem], data: st.DataObject
) -> None:
    problem, group = case
    plan = data.draw(plans(group.problem))
    fine = group.back(plan)
    assert [v for v in check_plan(problem, fine) if v.rule != "memory"] == []
    assert fine.device.tolist() == [plan.device[op] for op in group.coarse.op_of]
    assert (simulate(problem, fine).end_s >= 0).all()  # a deadlock would be refused


@st.composite
def _forward_problems(draw: st.DrawFn, *, times: tuple[float, ...] = (1.0, 0.0, 2.0, 3.0)) -> Problem:
    """A forward graph of up to twelve ops, with times and transfers of the same size."""
    num = draw(st.integers(2, 12))
    reach = picks(draw, (1, 2, 0, 3, 4), 2 * num)
    ops = [
        {
            "uses": sorted({op - back for back in reach[2 * op : 2 * op + 2] if 0 < back <= op}),
            "makes": [size],
        }
        for op, size in enumerate(picks(draw, range(5), num))
    ]
    return problem_of(graph_of(*ops), star_cluster(3), picks(draw, times, num))


def _true_branches(net: "nx.DiGraph[int]", inside: set[int], join: int) -> list[int]:
    """Producers of a join within its group that are no sources, with all that is theirs alone."""
    producers = set(net.predecessors(join))
    found = []
    for op in inside & producers:
        others = [nx.ancestors(net, other) for other in producers - {op}]
        own = ({op} | (nx.ancestors(net, op) & inside)).difference(*others)
        if any(set(net.predecessors(member)) - own for member in own):
            found.append(op)
    return found


@settings(deadline=None, max_examples=200)
@given(_forward_problems(times=(1.0, 2.0, 3.0)), st.booleans())
def test_at_most_one_branch_of_a_join_is_in_its_group(problem: Problem, merge_branches: bool) -> None:
    group = group_ops(problem, bound_s=1e6, merge_branches=merge_branches)
    net = nx.transitive_reduction(_order(problem.graph))  # an edge beside a longer path is no branch
    for op in range(group.problem.graph.num_ops):
        inside = set(np.flatnonzero(group.coarse.op_of == op).tolist())
        for join in inside:
            taken = len(_true_branches(net, inside, join))
            if taken + len(set(net.predecessors(join)) - inside) > 1:  # else it joins nothing that counts
                assert taken <= int(merge_branches)


@settings(deadline=None)
@given(_forward_problems())
def test_without_branches_the_longest_path_grows_by_sources_alone(problem: Problem) -> None:
    group = group_ops(problem, bound_s=1e6, merge_branches=False)
    seconds = problem.costs.compute_s[:, 0]
    assert problem.graph.phase.tolist() == [Phase.FORWARD] * problem.graph.num_ops
    longest = [
        _longest_s(_order(p.graph), p.costs.compute_s[:, 0].tolist()) for p in (problem, group.problem)
    ]
    net = _order(problem.graph)
    assert longest[0] <= longest[1] <= longest[0] + _cheap_starts(net, seconds.tolist())


def _cheap_starts(net: "nx.DiGraph[int]", seconds: list[float]) -> float:
    """Seconds of ops all of whose ancestors are in rows from one source: they may count as sources too."""
    starts = [op for op in net if all(net.in_degree(a) <= 1 for a in {op} | nx.ancestors(net, op))]
    return float(sum(seconds[op] for op in starts))


def _longest_s(net: "nx.DiGraph[int]", seconds: list[float]) -> float:
    ends: dict[int, float] = {}
    for op in nx.topological_sort(net):
        ends[op] = seconds[op] + max((ends[before] for before in net.predecessors(op)), default=0.0)
    return max(ends.values())
