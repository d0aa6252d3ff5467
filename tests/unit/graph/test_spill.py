"""Spilling as a plan: the graph with loads, what the simulators say of it, what the planner makes of it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loadmaster as lm
from loadmaster.core.check import check_plan, why_not_runnable
from loadmaster.core.errors import ClusterError, InputError, ProblemError, UnknownNameError
from loadmaster.core.graph import Phase
from loadmaster.core.plan import plan_of
from loadmaster.graph.spill import LOAD, find_readings, max_window_bytes
from loadmaster.graph.transformer import transformer
from tests.reference import simulate as reference
from tests.spilling import COMPUTES, STORES, spilling

DEVICES = "H200-200GB, cpu-500GB"


@pytest.fixture(scope="module")
def graph() -> lm.Graph:
    """A transformer whose weights outweigh all else."""
    return transformer(num_layers=8, width=1600, num_heads=25, seq=256, batch=2, vocab=2000)


@pytest.fixture(scope="module")
def problem(graph: lm.Graph) -> lm.Problem:
    return lm.problem(graph, DEVICES, optimizer="adamw")


def alone(problem: lm.Problem) -> Any:
    """Everything on the GPU, in the order of the program."""
    num = problem.graph.num_ops
    return plan_of(np.zeros(num, dtype=np.int32), np.arange(num, dtype=np.int32))


def largest(graph: lm.Graph) -> int:
    return int(graph.tensor_bytes[graph.phase[graph.tensor_op] == Phase.PARAM].max())


def everything(_: str) -> bool:
    return True


@pytest.mark.parametrize("times", [1, 2, 8])
def test_both_simulators_agree_on_graphs_with_loads(problem: lm.Problem, times: int) -> None:
    made, plan = spilling(problem, everything, window_bytes=times * largest(problem.graph))
    timeline, other = lm.simulate(made, plan), reference(made, plan, dispatch="in_order", links="shared")
    assert timeline.step_s == other.step_s
    assert timeline.peak_bytes.tolist() == list(other.peak_bytes)


def test_work_is_kept_and_nothing_but_loads_is_added(problem: lm.Problem) -> None:
    graph = problem.graph
    made, _ = spilling(problem, everything, window_bytes=1)
    new = [op for op, kind in enumerate(made.graph.op_kind) if kind == LOAD]
    assert made.graph.flops.sum() == graph.flops.sum()
    assert made.graph.resident_bytes.sum() == graph.resident_bytes.sum()
    some = find_readings(graph).values()
    assert len(new) == sum(1 + bool(one.backward) for each in some for one in each)
    assert not made.costs.compute_s[new].any()


@pytest.mark.parametrize("times", [1, 2, 4, 64])
def test_copies_never_take_more_than_the_window(problem: lm.Problem, times: int) -> None:
    window = times * largest(problem.graph)
    made, plan = spilling(problem, everything, window_bytes=window)
    timeline, graph = lm.simulate(made, plan), made.graph
    load = np.array([kind == LOAD for kind in graph.op_kind])
    moves = (timeline.kind == 1) & load[graph.tensor_op[np.minimum(timeline.item, graph.num_tensors - 1)]]
    begins = {int(timeline.item[at]): float(timeline.start_s[at]) for at in np.flatnonzero(moves)}
    ends = dict.fromkeys(begins, 0.0)
    compute = timeline.kind == 0
    op_end = dict(zip(timeline.item[compute].tolist(), timeline.end_s[compute].tolist(), strict=True))
    for t, op in zip(graph.use_tensor.tolist(), graph.use_op.tolist(), strict=True):
        if t in ends:
            ends[t] = max(ends[t], op_end[op])
    size = graph.tensor_bytes
    for at in begins.values():
        there = sum(int(size[t]) for t in begins if begins[t] <= at < ends[t])
        assert there <= window
    assert max_window_bytes(graph) <= window
    assert check_plan(made, plan) == []
    assert why_not_runnable(made, plan) == []


def test_a_larger_window_hides_more_of_the_way(problem: lm.Problem) -> None:
    weight = largest(problem.graph)
    steps = [
        lm.simulate(*spilling(problem, everything, window_bytes=times * weight)).step_s for times in (1, 3, 9)
    ]
    assert steps[0] > steps[1] >= steps[2]
    assert steps[2] >= lm.simulate(problem, alone(problem)).step_s


def test_memory_moves_from_the_device_to_the_store(problem: lm.Problem) -> None:
    before = lm.simulate(problem, alone(problem)).peak_bytes
    made, plan = spilling(problem, everything, window_bytes=2 * largest(problem.graph))
    after = lm.simulate(made, plan).peak_bytes
    assert after[COMPUTES] < before[COMPUTES] - 0.8 * problem.graph.resident_bytes.sum()
    assert after[STORES] >= problem.graph.resident_bytes.sum()


def capped(graph: lm.Graph, share: float, **asked: Any) -> lm.Problem:
    whole = lm.problem(graph, DEVICES, optimizer="adamw")
    peak = int(lm.simulate(whole, alone(whole)).peak_bytes[COMPUTES])
    return lm.problem(graph, f"H200-{int(share * peak)}B, cpu-500GB", optimizer="adamw", **asked)


@pytest.mark.parametrize("share", [0.9, 0.6, 0.4])
def test_spilling_beats_layers_on_the_host_by_far(graph: lm.Graph, share: float) -> None:
    question = capped(graph, share)
    without = lm.plan(question, budget="40x")
    spilled = lm.plan(question, budget="40x", spill="host")
    assert spilled.fits
    assert spilled.plan is not None
    assert spilled.algorithm == "spill"
    assert lm.check_plan(spilled.problem, spilled.plan) == []
    assert lm.simulate(spilled.problem, spilled.plan).step_s == spilled.score_s
    assert spilled.score_s is not None
    assert not without.fits or (without.score_s or 0.0) > 3 * spilled.score_s


def test_only_what_is_lacking_is_spilled(graph: lm.Graph) -> None:
    counts = []
    for share in (0.9, 0.6):
        found = lm.plan(capped(graph, share), budget="40x", spill="host")
        held = found.problem.graph.resident_bytes * (found.plan.device == STORES)  # type: ignore[union-attr]
        counts.append(int(held.sum()))
    assert 0 < counts[0] < counts[1] < graph.num_ops * int(1e12)


def test_where_all_fits_nothing_is_spilled(problem: lm.Problem) -> None:
    found = lm.plan(problem, budget="20x", spill="host")
    assert LOAD not in found.problem.graph.op_kind


def test_a_spilled_plan_is_saved_and_read_again(graph: lm.Graph, tmp_path: Path) -> None:
    found = lm.plan(capped(graph, 0.6), budget="20x", spill="host")
    lm.save(found, tmp_path / "plan.json")
    again = lm.load(tmp_path / "plan.json")
    assert again.digest == found.digest
    assert max_window_bytes(again.problem.graph) == max_window_bytes(found.problem.graph) > 0


def test_pins_and_several_devices_are_respected(graph: lm.Graph) -> None:
    whole = lm.problem(graph, "2xH200-200GB, cpu-500GB", optimizer="adamw")
    peak = int(lm.simulate(whole, alone(whole)).peak_bytes[0])
    names = [graph.op_name[op] for op in find_readings(graph)][:2]
    cluster = f"2xH200-{peak // 3}B, cpu-500GB"
    question = lm.problem(graph, cluster, optimizer="adamw", pin={names[0]: "gpu0", names[1]: "cpu0"})
    found = lm.plan(question, budget="40x", spill="host")
    assert found.fits
    assert found.plan is not None
    place = {name: at for at, name in enumerate(found.problem.graph.op_name)}
    assert [int(found.plan.device[place[name]]) for name in names] == [0, 2]


def test_what_cannot_be_spilled_is_said(graph: lm.Graph) -> None:
    with pytest.raises(ClusterError, match="needs host memory beside a device"):
        lm.plan(lm.problem(graph, "2xH200"), spill="host")
    with pytest.raises(UnknownNameError, match="device to spill to 'disk'"):
        lm.plan(lm.problem(graph, DEVICES), spill="disk")
    with pytest.raises(ProblemError, match="only the step objective"):
        lm.plan(lm.problem(graph, DEVICES, "throughput"), spill="host", budget="5x")
    assert issubclass(ProblemError, InputError)


def test_spilling_works_with_any_algorithm(graph: lm.Graph) -> None:
    for name in ("single_device", "m_etf"):
        assert lm.plan(capped(graph, 0.5), algorithm=name, budget="20x", spill="host").algorithm == "spill"
