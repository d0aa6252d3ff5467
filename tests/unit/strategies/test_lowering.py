"""Lowering: the flat graph of a strategy, replayed by a simulator written apart, and counted by hand."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from loadmaster import api
from loadmaster.core.check import check_plan
from loadmaster.core.cluster import SOCKET_BYTES_PER_S, SOCKET_LATENCY_S
from loadmaster.core.errors import PlanError
from loadmaster.core.graph import Phase
from loadmaster.core.plan import plan_of
from loadmaster.core.problem import Links
from loadmaster.core.strategy import Mode, Sync
from loadmaster.core.timeline import SpanKind
from loadmaster.report.gantt import draw_gantt
from loadmaster.simulator.events.engine import prepare, simulate
from loadmaster.strategies.ask import make_evaluator
from loadmaster.strategies.lowering.lower import LoweredStrategy, lower
from loadmaster.strategies.splitting.splits import find_splits
from tests import reference
from tests.unit.strategies.models import along_step, mixed_step
from tests.unit.strategies.strategies import (
    BATCH,
    TWO_HOSTS,
    all_ways,
    every_op,
    group_of,
    halves,
    problem_for,
    strategy_of,
    weights,
    wide_problem,
)

WAYS = tuple(all_ways(wide_problem()))


def lowered(way: str) -> LoweredStrategy:
    problem = wide_problem()
    return lower(problem, all_ways(problem)[way])


@pytest.mark.parametrize("way", WAYS)
def test_a_second_simulator_finds_the_same_step_and_peaks(way: str) -> None:
    flat = lowered(way)
    assert [v for v in check_plan(flat.problem, flat.plan) if v.rule != "memory"] == []
    witness = reference.simulate(flat.problem, flat.plan, dispatch="in_order", links="shared")
    score = prepare(flat.problem).score(flat.plan)
    assert witness.stuck == []
    assert score.time_s == pytest.approx(witness.step_s, rel=1e-12)
    assert list(score.peak_bytes) == witness.peak_bytes


@pytest.mark.parametrize("way", WAYS)
def test_every_op_runs_once_for_each_of_its_rows(way: str) -> None:
    problem = wide_problem()
    strategy, flat = all_ways(problem)[way], lowered(way)
    for group in strategy.groups:
        for op in group.ops.tolist():
            copies = np.flatnonzero(flat.op == op)
            once = problem.graph.phase[op] == Phase.UPDATE and (
                group.sync == Sync.PS or group.microbatches > 1
            )
            shared = problem.graph.phase[op] == Phase.PARAM and group.microbatches > 1
            expected = 1 if once or shared else len(group.devices) * group.microbatches
            assert len(copies) == expected
            assert set(flat.plan.device[copies].tolist()) <= set(group.devices)


def test_one_device_is_the_plain_simulation() -> None:
    problem = wide_problem()
    flat = lower(problem, all_ways(problem)["place"])
    plain = prepare(problem).score(
        dataclasses.replace(
            plan_of(np.full(problem.graph.num_ops, 1, dtype=np.int32)),
            priority=np.arange(problem.graph.num_ops, dtype=np.int32),
        )
    )
    score = prepare(flat.problem).score(flat.plan)
    assert score.time_s == pytest.approx(plain.time_s, rel=1e-12)
    assert score.peak_bytes[: flat.num_devices] == plain.peak_bytes


def gradient_bytes(way: str = "even") -> int:
    graph = wide_problem().graph
    splits = find_splits(graph, BATCH)
    read = graph.use_tensor[graph.phase[graph.use_op] == Phase.UPDATE]
    return int(graph.tensor_bytes[read[splits.form[read] == 2]].sum())


def test_a_ring_sends_the_whole_gradient_of_each_replica() -> None:
    # 2 (n - 1) / n of all gradients over every edge, as the closed form has it: not divided by replicas.
    problem = wide_problem()
    flat = lower(
        problem, strategy_of(problem, group_of(every_op(problem), (0, 1), (6, 6), sync=Sync.ALLREDUCE))
    )
    used = flat.link_bytes[flat.link_bytes > 0]
    assert {c.name for c in flat.collectives} == {"ring"}
    assert used.tolist() == [gradient_bytes()] * 4  # each of two buses, both ways


def test_factors_send_rows_instead_of_matrices() -> None:
    problem = wide_problem(width=512)
    plain, factors = (lower(problem, all_ways(problem)[way]) for way in ("even", "factors"))
    names = [op for op in weights(problem.graph) if problem.graph.op_name[op] == "layers.2.weight"]
    one = strategy_of(
        problem, group_of(every_op(problem), (0, 1), (6, 6), sync=Sync.ALLREDUCE, sfb=tuple(names))
    )
    sent = lower(problem, one)
    # 12 rows of 512 + 512 numbers, half of them from each, against 512 x 512 numbers.
    saved, spent = 512 * 512 * 4, (6 * 512 * 4) * 2
    assert plain.link_bytes.max() - sent.link_bytes.max() == saved - spent
    assert factors.link_bytes.max() < plain.link_bytes.max()


def test_only_the_chosen_op_runs_on_all_rows() -> None:
    problem = wide_problem()
    flat = lower(problem, all_ways(problem)["factors"])
    graph, whole = problem.graph, lower(problem, all_ways(problem)["place"])
    splits = find_splits(graph, BATCH)
    named = {op for op in range(graph.num_ops) if graph.op_kind[op] == "mm"}
    for op in named:
        makes = splits.form[graph.tensor_op == op]
        full = whole.problem.costs.compute_s[whole.op == op, 0]
        own = flat.problem.costs.compute_s[flat.op == op, 0]
        assert (own == full).all() == bool((makes == 2).all()), graph.op_name[op]


def test_collectives_overlap_the_backward_pass_and_occupy_links() -> None:
    problem = wide_problem(width=2048, devices=TWO_HOSTS)
    strategy = strategy_of(problem, group_of(every_op(problem), (0, 2), (6, 6), sync=Sync.ALLREDUCE))
    flat = lower(problem, strategy)
    timeline = simulate(flat.problem, flat.plan)
    real = flat.problem.cluster.num_devices
    moved = timeline.kind == SpanKind.TRANSFER
    long = moved & (timeline.end_s - timeline.start_s > 1e-6)
    assert long.any()
    assert (timeline.resource[long] // real >= flat.num_devices).all()  # they start on channels
    backward = (timeline.kind == SpanKind.COMPUTE) & (timeline.resource < flat.num_devices)
    assert timeline.start_s[long].min() < timeline.end_s[backward].max()
    nic = [link for link, name in enumerate(problem.cluster.link_name) if "nic" in name or "net" in name]
    assert (flat.link_bytes[nic] > 0).any()


def test_every_communicator_has_one_channel_of_its_own() -> None:
    problem = wide_problem()
    counts = {}
    for way in ("even", "other devices", "place"):
        flat = lower(problem, all_ways(problem)[way])
        added = flat.problem.cluster.device_name[flat.num_devices :]
        counts[way] = sum(": " not in name for name in added)  # the others are ends of its edges
    assert counts == {"even": 1, "other devices": 2, "place": 0}


def test_processes_of_one_host_send_through_sockets() -> None:
    problem = wide_problem(devices="cpu#0-4GB, cpu#1-4GB")
    assert problem.cluster.link_bytes_per_s.min() > SOCKET_BYTES_PER_S  # in one process nothing is sent
    group = group_of(every_op(problem), (0, 1), (6, 6), sync=Sync.ALLREDUCE)
    flat = lower(problem, strategy_of(problem, group)).problem.cluster
    links = problem.cluster.num_links
    assert (flat.link_bytes_per_s[:links] <= SOCKET_BYTES_PER_S).all()
    assert (flat.link_latency_s[:links] >= SOCKET_LATENCY_S).all()
    evaluator = make_evaluator(problem, BATCH)  # the same at the level of groups
    assert evaluator.wires.latency_s[0][1] >= SOCKET_LATENCY_S
    assert evaluator.facts.bytes_per_s[0, 1] <= SOCKET_BYTES_PER_S


def test_links_that_are_shared_make_a_step_longer_than_links_that_are_not() -> None:
    problem = wide_problem(width=2048, devices=TWO_HOSTS)
    flat = lower(problem, all_ways(problem)["server"])  # two replicas push into one bus
    shared, apart = (
        simulate(flat.problem, flat.plan, links=links).step_s for links in (Links.SHARED, Links.PARALLEL)
    )
    assert shared > apart


def test_a_server_alone_holds_the_optimizer_state() -> None:
    problem = wide_problem()
    flat = lower(problem, all_ways(problem)["server"])
    resident = [int(flat.problem.graph.resident_bytes[flat.plan.device == d].sum()) for d in (0, 1, 2)]
    assert resident[0] == resident[1] < resident[2] == int(problem.graph.resident_bytes.sum())


def test_rows_that_are_sent_on_are_counted_once_for_each_target() -> None:
    problem = wide_problem()
    head, tail = halves(problem)
    one = strategy_of(
        problem,
        group_of(head, (0, 1), (6, 6), sync=Sync.ALLREDUCE),
        group_of(tail, (0, 1), (4, 8), sync=Sync.ALLREDUCE),
    )
    same = strategy_of(problem, group_of(every_op(problem), (0, 1), (6, 6), sync=Sync.ALLREDUCE))
    # Two rows of one tensor move to the second device, and their gradients back, over two links each.
    crossing = lower(problem, one).link_bytes.sum() - lower(problem, same).link_bytes.sum()
    assert crossing == 2 * (2 * 256 * 4) * 2


def test_micro_batches_hold_fewer_activations_than_the_batch() -> None:
    problem = problem_for(mixed_step(6))
    ops = every_op(problem)
    place = strategy_of(problem, group_of(ops, (0,), (6,), mode=Mode.PLACE), batch=6)
    piped = strategy_of(
        problem, group_of(ops, (0,), (6,), mode=Mode.PIPELINE, microbatches=3), batch=6, schedule="1f1b"
    )
    peaks = [simulate(f.problem, f.plan).peak_bytes[0] for f in (lower(problem, s) for s in (place, piped))]
    assert peaks[1] < peaks[0]


def test_an_op_that_needs_all_rows_is_named() -> None:
    problem = problem_for(along_step(lambda x: x.cumsum(0)))
    strategy = strategy_of(
        problem, group_of(every_op(problem), (0, 1), (8, 8), sync=Sync.ALLREDUCE), batch=16
    )
    with pytest.raises(PlanError, match=r"op 'cumsum' cannot run on some of the rows: it mixes rows"):
        lower(problem, strategy)


def test_a_batch_that_nothing_has_is_refused() -> None:
    problem = wide_problem()
    ops = every_op(problem)
    with pytest.raises(PlanError, match="is known to have 14 rows"):
        lower(problem, strategy_of(problem, group_of(ops, (0, 1), (7, 7), sync=Sync.ALLREDUCE), batch=14))


def test_other_links_are_refused_by_name() -> None:
    problem = dataclasses.replace(wide_problem(), links=Links.HALF_DUPLEX)
    with pytest.raises(PlanError, match="not 'half-duplex'; ask for one of them"):
        lower(problem, all_ways(problem)["even"])


def test_a_gradient_without_an_op_of_its_own_cannot_be_made_from_factors() -> None:
    problem = problem_for(mixed_step(6))
    norm = problem.graph.op_name.index("norm.weight")
    strategy = strategy_of(
        problem,
        group_of(every_op(problem), (0, 1), (3, 3), sync=Sync.ALLREDUCE, sfb=(norm,)),
        batch=6,
    )
    with pytest.raises(PlanError, match="leave it out of sfb"):
        lower(problem, strategy)


def test_the_same_strategy_is_lowered_to_the_same_graph() -> None:
    first, second = lowered("more devices"), lowered("more devices")
    assert first.problem.digest == second.problem.digest


def test_the_page_of_a_strategy_shows_devices_and_not_what_carries_sums(tmp_path: Path) -> None:
    flat = lowered("even")
    cluster = flat.problem.cluster
    assert cluster.is_channel.tolist() == [at >= flat.num_devices for at in range(cluster.num_devices)]
    answer = api.plan(flat.problem, algorithm=flat.plan)
    api.write_report(answer, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    head = f"{flat.num_devices} devices and what carries sums of gradients between them"
    assert head in page
    assert page.count('class="box-under"') == flat.num_devices
    assert 'class="wire"' in page  # sums go from device to device
    assert not re.search(r'<td class="name">(<span[^>]*></span>)?(sums|server)', page)
    assert "inside of devices" not in page
    timeline = simulate(flat.problem, flat.plan)
    channels = set(np.flatnonzero(cluster.is_channel).tolist())
    lanes = draw_gantt(flat.problem.graph, {"predicted": timeline}, channels=channels).lanes
    assert [lane.title for lane in lanes if not lane.is_link] == list(cluster.device_name[: flat.num_devices])
    assert not any(" → sums" in lane.title or " → server" in lane.title for lane in lanes)
