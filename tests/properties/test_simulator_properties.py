"""The compiled simulator against a second one written apart, and the laws every timeline obeys."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadmaster.core import io
from loadmaster.core.errors import PlanError
from loadmaster.core.plan import Plan
from loadmaster.core.problem import Links, Problem
from loadmaster.core.timeline import SpanKind, Timeline
from loadmaster.simulator.events.engine import Dispatch, prepare
from loadmaster.simulator.events.throughput import steady_state
from tests import reference
from tests.strategies import placed_problems

many = settings(max_examples=400, deadline=None)
some = settings(max_examples=150, deadline=None)


def sent(timeline: Timeline, num_devices: int) -> list[tuple[int, int, int, float, float]]:
    moved = timeline.kind != SpanKind.COMPUTE
    pair = timeline.resource[moved]
    rows = zip(
        timeline.item[moved].tolist(),
        (pair // num_devices).tolist(),
        (pair % num_devices).tolist(),
        timeline.start_s[moved].tolist(),
        timeline.end_s[moved].tolist(),
        strict=True,
    )
    return sorted(rows)


@many
@given(st.data(), st.sampled_from(list(Links)), st.sampled_from(["in_order", "ready"]))
def test_the_compiled_simulator_agrees_with_the_reference_to_the_bit(
    data: st.DataObject, links: Links, dispatch: str
) -> None:
    assert_agreement(data, links, dispatch)


@pytest.mark.slow
@settings(max_examples=6000, deadline=None)
@given(st.data(), st.sampled_from(list(Links)), st.sampled_from(["in_order", "ready"]))
def test_the_compiled_simulator_agrees_with_the_reference_at_length(
    data: st.DataObject, links: Links, dispatch: str
) -> None:
    assert_agreement(data, links, dispatch)


def assert_agreement(data: st.DataObject, links: Links, dispatch: str) -> None:
    # With dispatch 'ready' the reference ignores issue; the compiled one makes an order and issues that.
    problem, plan = data.draw(placed_problems(links=links, issue=dispatch == "in_order"))
    ours = prepare(problem)
    theirs = reference.simulate(problem, plan, dispatch=dispatch, links=links.value)
    assert not theirs.stuck
    timeline = ours.timeline(plan, dispatch=Dispatch(dispatch))
    outcome = ours.run(plan, dispatch=Dispatch(dispatch))
    assert outcome.op_start.tolist() == theirs.op_start
    assert outcome.op_end.tolist() == theirs.op_end
    assert sent(timeline, problem.cluster.num_devices) == sorted(theirs.transfers)
    assert outcome.peak_bytes.tolist() == theirs.peak_bytes
    assert timeline.step_s == theirs.step_s


@some
@given(st.data())
def test_a_deadlock_is_refused_by_both(data: st.DataObject) -> None:
    problem, plan = data.draw(placed_problems(may_deadlock=True))
    theirs = reference.simulate(problem, plan, dispatch="in_order", links=problem.links.value)
    if theirs.stuck:
        with pytest.raises(PlanError, match="deadlock"):
            prepare(problem).run(plan, dispatch=Dispatch.IN_ORDER)
    else:
        outcome = prepare(problem).run(plan, dispatch=Dispatch.IN_ORDER)
        assert outcome.op_end.tolist() == theirs.op_end


@some
@given(st.data(), st.sampled_from(list(Links)))
def test_replaying_the_start_order_gives_the_same_timeline(data: st.DataObject, links: Links) -> None:
    problem, plan = data.draw(placed_problems(links=links, issue=False))
    simulator = prepare(problem)
    first = simulator.run(plan, dispatch=Dispatch.READY)
    ready = Plan(plan.device, first.start_rank, plan.recompute, None)
    again = simulator.run(ready, dispatch=Dispatch.IN_ORDER)
    assert again.op_start.tolist() == first.op_start.tolist()
    assert again.peak_bytes.tolist() == first.peak_bytes.tolist()
    ordered = simulator.order_by_start(plan)
    assert simulator.score(ordered) == simulator.score(simulator.order_by_start(ordered))


@some
@given(st.data(), st.sampled_from([Links.SHARED, Links.PARALLEL, Links.HALF_DUPLEX]))
def test_no_resource_does_two_things_at_once_and_nothing_starts_before_its_inputs(
    data: st.DataObject, links: Links
) -> None:
    problem, plan = data.draw(placed_problems(links=links))
    graph, cluster = problem.graph, problem.cluster
    outcome = prepare(problem).run(plan, dispatch=Dispatch.IN_ORDER)
    engine = cluster.engine[plan.device]
    for e in set(engine.tolist()):
        ops = np.flatnonzero(engine == e)
        spans = sorted((outcome.op_start[i], outcome.op_end[i]) for i in ops)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
    arrival = {
        (int(t), int(d)): float(end)
        for t, d, end in zip(
            outcome.transfer_tensor, outcome.transfer_target, outcome.transfer_end, strict=True
        )
    }
    assert len(arrival) == len(outcome.transfer_tensor)  # each tensor once per destination
    for t, op in zip(graph.use_tensor.tolist(), graph.use_op.tolist(), strict=True):
        maker, here = int(graph.tensor_op[t]), int(plan.device[op])
        known = outcome.op_end[maker] if plan.device[maker] == here else arrival[(t, here)]
        assert outcome.op_start[op] >= known
    busiest = max(float((outcome.op_end - outcome.op_start)[engine == e].sum()) for e in set(engine.tolist()))
    everything = float((outcome.op_end - outcome.op_start).sum()) + float(
        (outcome.transfer_end - outcome.transfer_start).sum()
    )
    slack = float(problem.costs.issue_s.sum())
    assert busiest <= outcome.step_s + 1e-9
    assert outcome.step_s <= everything + slack + 1e-9


@some
@given(st.data(), st.sampled_from(list(Links)))
def test_the_timeline_shows_every_op_once_on_its_device(data: st.DataObject, links: Links) -> None:
    problem, plan = data.draw(placed_problems(links=links))
    timeline = prepare(problem).timeline(plan, dispatch=Dispatch.IN_ORDER)
    compute = timeline.kind == SpanKind.COMPUTE
    assert sorted(timeline.item[compute].tolist()) == list(range(problem.graph.num_ops))
    assert timeline.resource[compute].tolist() == plan.device[timeline.item[compute]].tolist()


@some
@given(st.data())
def test_no_directed_link_carries_two_transfers_at_once(data: st.DataObject) -> None:
    problem, plan = data.draw(placed_problems(links=Links.SHARED))
    outcome = prepare(problem).run(plan, dispatch=Dispatch.IN_ORDER)
    source = plan.device[problem.graph.tensor_op[outcome.transfer_tensor]]
    spans: dict[int, list[tuple[float, float]]] = {}
    rows = zip(source, outcome.transfer_target, outcome.transfer_start, outcome.transfer_end, strict=True)
    for s, d, begin, end in rows:
        for link in problem.cluster.route[s, d]:
            if link >= 0 and end > begin:
                spans.setdefault(int(link), []).append((float(begin), float(end)))
    for carried in spans.values():
        assert all(a[1] <= b[0] for a, b in pairwise(sorted(carried)))


@some
@given(st.data())
def test_problems_and_plans_come_back_from_json(data: st.DataObject) -> None:
    problem, plan = data.draw(placed_problems())
    for noun in (problem, plan, problem.graph, problem.cluster, problem.costs):
        assert io.decode(io.encode(noun)).digest == noun.digest


@some
@given(st.data(), st.sampled_from([0.5, 4.0]))
def test_scaling_all_times_scales_the_makespan(data: st.DataObject, factor: float) -> None:
    problem, plan = data.draw(placed_problems())
    scaled = _scaled(problem, factor)
    plain = prepare(problem).run(plan)
    stretched = prepare(scaled).run(plan)
    assert stretched.op_end.tolist() == (plain.op_end * factor).tolist()
    assert stretched.peak_bytes.tolist() == plain.peak_bytes.tolist()


def _scaled(problem: Problem, factor: float) -> Problem:
    costs, cluster = problem.costs, problem.cluster
    given_s = costs.transfer_s >= 0
    return replace(
        problem,
        costs=replace(
            costs,
            compute_s=costs.compute_s * factor,
            issue_s=costs.issue_s * factor,
            transfer_s=np.where(given_s, costs.transfer_s * factor, costs.transfer_s),
        ),
        cluster=replace(
            cluster,
            link_bytes_per_s=cluster.link_bytes_per_s / factor,
            link_latency_s=cluster.link_latency_s * factor,
        ),
    )


@some
@given(st.data())
def test_relabelling_devices_changes_nothing(data: st.DataObject) -> None:
    problem, plan = data.draw(placed_problems())
    num = problem.cluster.num_devices
    new = np.array(data.draw(st.permutations(range(num))), dtype=np.int32)  # device d becomes new[d]
    renamed = _relabelled(problem, new)
    moved = Plan(new[plan.device], plan.priority, plan.recompute, None)
    links = [Links.SHARED, Links.PARALLEL, Links.HALF_DUPLEX]
    for how in links:
        before = prepare(problem, links=how).run(plan)
        after = prepare(renamed, links=how).run(moved)
        assert after.op_end.tolist() == before.op_end.tolist()
        assert after.peak_bytes[new].tolist() == before.peak_bytes.tolist()


def _relabelled(problem: Problem, new: Any) -> Problem:
    cluster = problem.cluster
    old = np.argsort(new)
    return replace(
        problem,
        cluster=replace(
            cluster,
            device_name=tuple(cluster.device_name[d] for d in old),
            kind=cluster.kind[old],
            host=cluster.host[old],
            engine=cluster.engine[old],
            memory_bytes=cluster.memory_bytes[old],
            reserve_bytes=cluster.reserve_bytes[old],
            route=cluster.route[np.ix_(old, old)],
        ),
        pinned=np.where(problem.pinned >= 0, new[problem.pinned], problem.pinned),
    )


@some
@given(st.data())
def test_max_load_agrees_with_the_reference(data: st.DataObject) -> None:
    problem, plan = data.draw(placed_problems(links=Links.HOST))
    assert steady_state(problem, plan).time_s == pytest.approx(reference.throughput(problem, plan), rel=1e-12)
