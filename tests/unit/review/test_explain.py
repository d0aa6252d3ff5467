"""explain, diff and whatif: what they say is what comes of doing it."""

from dataclasses import replace

import numpy as np
import pytest

from loadmaster import api
from loadmaster.core.errors import InputError, ProblemError, UnknownNameError
from loadmaster.core.placement import Placement
from loadmaster.core.problem import Objective, Split
from loadmaster.graph.build import GraphBuilder
from loadmaster.review.diff import match_ops
from loadmaster.review.explain import close_over, find_ops
from loadmaster.review.settings import Settings, change_problem
from loadmaster.review.whatif import parse_sweep
from tests.builders import chain, graph_of, plan_on, problem_of, star_cluster
from tests.pipeline_steps import Layer, layers_problem

SOURCE, DEVICES = "gen:transformer:300", "RTX4090, RTX3090, cpu-64GB"


@pytest.fixture(scope="module")
def answer() -> Placement:
    return api.plan(SOURCE, DEVICES, budget="50x")


def test_what_an_op_would_cost_elsewhere_is_what_moving_it_costs(answer: Placement) -> None:
    found = api.explain(answer, "h.1", budget="10x", replan=False)
    assert answer.plan is not None
    chosen = close_over(answer.problem.graph, find_ops(answer.problem.graph, "h.1"))
    assert len(found.elsewhere) == 3
    for at, row in enumerate(found.elsewhere):
        moved = replace(answer.plan, device=np.where(chosen, at, answer.plan.device).astype(np.int32))
        timeline = api.simulate(answer.problem, moved)
        assert row.time_s == timeline.step_s
        over = np.maximum(timeline.peak_bytes - answer.problem.cluster.usable_bytes, 0)
        assert row.over_bytes == over.max()


def test_a_plan_found_with_a_module_elsewhere_has_it_there(answer: Placement) -> None:
    found = api.explain(answer, "h.1", budget="20x")
    for row in found.elsewhere:
        if row.replanned_s is not None and row.time_s is not None and not row.over_bytes:
            assert row.replanned_s <= row.time_s * (1 + 1e-9)


def test_the_best_single_change_is_what_whatif_finds(answer: Placement) -> None:
    found = api.explain(answer, budget="20x")
    best = next(row for row in found.changes if row.name != "as it is")
    assert [row.time_s for row in found.changes if row.time_s] == sorted(
        row.time_s for row in found.changes if row.time_s
    )
    word = best.name.removeprefix("add ")
    again, _ = api.whatif(
        answer,
        **({"add": [word]} if best.name.startswith("add ") else {"set": best.name.split(", ")}),
        budget="20x",
        together=True,
    )
    assert again.rows[-1].time_s == best.time_s


def test_memory_that_binds_is_found_by_giving_more() -> None:
    # two ops of 10 bytes on a fast device of 15 bytes: with 20 bytes both would run there
    graph = graph_of({"resident_bytes": 10, "makes": [1]}, {"uses": [0], "resident_bytes": 10})
    problem = problem_of(graph, replace(star_cluster(2, memory=15)), 1.0)
    answer = api.plan(problem, budget="50x")
    assert answer.score_s == 3.0  # with a transfer of 1 s
    found = api.explain(answer, budget="50x")
    rows = {row.name: row.time_s for row in found.changes}
    assert rows["ref0.memory=2x"] == 2.0
    assert any("memory=2x" in reason and "most" in reason for reason in found.reasons)


def test_more_memory_never_looks_worse_and_changes_do_what_they_say(answer: Placement) -> None:
    found, last = api.whatif(answer, set=["gpu1.memory=2x", "gpu0-gpu1.rate=2x"], budget="20x")
    assert [row.name for row in found.rows] == [
        "as it is", "gpu1.memory=2x", "gpu0-gpu1.rate=2x", "gpu1.memory=2x, gpu0-gpu1.rate=2x",
    ]  # fmt: skip
    assert answer.score_s is not None
    for row in found.rows:
        assert row.time_s is not None
        assert row.time_s <= answer.score_s * (1 + 1e-9)
    assert last is not None
    assert last.problem.cluster.memory_bytes[1] == 2 * answer.problem.cluster.memory_bytes[1]


def test_a_device_can_be_added_removed_and_sped_up(answer: Placement) -> None:
    more = change_problem(answer.problem, Settings(add=("1xA100-80GB",))).problem
    assert more.cluster.num_devices == 4
    assert np.isfinite(more.costs.compute_s).all()
    less = change_problem(answer.problem, Settings(remove=("gpu1",)))
    assert less.problem.cluster.device_name == ("gpu0", "cpu0")
    assert less.device_of.tolist() == [0, -1, 1]
    fast = change_problem(answer.problem, Settings(sets=("gpu0.speed=2x",))).problem
    assert (fast.device_compute_s[:, 0] * 2 == answer.problem.device_compute_s[:, 0]).all()
    assert (fast.device_compute_s[:, 1] == answer.problem.device_compute_s[:, 1]).all()


@pytest.mark.parametrize(
    ("word", "error", "match"),
    [
        ("gpu1.memory", InputError, "sets nothing"),
        ("gpu7.memory=1GB", UnknownNameError, "gpu7"),
        ("gpu1.colour=red", UnknownNameError, "setting of a device"),
        ("gpu1.memory=a lot", InputError, "not a size"),
        ("gpu1.speed=5", InputError, "factor"),
        ("gpu0-gpu1.rate=0x", InputError, "above 0"),
    ],
)
def test_a_wrong_word_is_refused(answer: Placement, word: str, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        change_problem(answer.problem, Settings(sets=(word,)))


def test_the_last_device_cannot_be_removed() -> None:
    problem = problem_of(chain(2), star_cluster(1), 1.0)
    with pytest.raises(ProblemError, match="the only device"):
        change_problem(problem, Settings(remove=("ref0",)))


def test_a_batch_needs_a_source(answer: Placement) -> None:
    with pytest.raises(InputError, match="does not say what it was captured from"):
        api.whatif(answer, batch=2, budget="5x")


def test_a_change_that_cannot_be_asked_is_refused(answer: Placement) -> None:
    for wrong, words in (
        ({"set": "gpu9.memory=2GB"}, "unknown device or link 'gpu9'"),
        ({"set": ["gpu0.speed=2x", "gpu0.memory=much"]}, "'much' is not a size"),
        ({"remove": "gpu9"}, "unknown device 'gpu9'"),
        ({"sweep": "gpu9.memory=8GB..16GB:2"}, "no value is valid: unknown device or link 'gpu9'"),
    ):
        with pytest.raises(InputError, match=words):
            api.whatif(answer, **wrong, budget="5x")  # type: ignore[arg-type]


def test_sweeps_double_or_take_equal_steps() -> None:
    assert parse_sweep("batch=1..10") == ("batch", ["1", "2", "4", "8", "10"])
    assert parse_sweep("gpu1.memory=8GB..16GB:3") == ("gpu1.memory", ["8GB", "12GB", "16GB"])
    assert parse_sweep("batch=3, 5") == ("batch", ["3", "5"])
    for wrong in ("batch", "batch=0..4", "batch=x", "gpu.memory=2GB..1GB", "batch=1..99:1"):
        with pytest.raises(InputError):
            parse_sweep(wrong)


def test_one_change_may_be_a_string_instead_of_a_list(answer: Placement) -> None:
    name = answer.problem.cluster.device_name[0]
    alone, _ = api.whatif(answer, set=f"{name}.speed=2x", budget="5x")
    listed, _ = api.whatif(answer, set=[f"{name}.speed=2x"], budget="5x")
    assert alone == listed
    assert not alone.rows[-1].note.startswith("cannot be asked")


def test_a_sweep_of_memory_has_a_row_for_each_value(answer: Placement) -> None:
    found, _ = api.whatif(answer, sweep="gpu0.memory=1MB..24GB:3", budget="5x")
    assert [row.value for row in found.rows] == ["0.001GB", "12.0005GB", "24GB"]
    assert found.sweep == "gpu0.memory"
    times = [row.time_s for row in found.rows if row.time_s is not None]
    assert times == sorted(times, reverse=True)  # more memory: the plan before still fits


def test_a_plan_does_not_differ_from_itself(answer: Placement) -> None:
    same = api.diff(answer, answer)
    assert (same.num_moved, same.modules, same.notes) == (0, (), ())
    assert same.num_matched == answer.problem.graph.num_ops


def test_what_moved_is_named_by_module(answer: Placement) -> None:
    assert answer.plan is not None
    chosen = close_over(answer.problem.graph, find_ops(answer.problem.graph, "h.1"))
    device = answer.plan.device[chosen]
    target = 1 - int(np.bincount(device, minlength=2)[:2].argmax())
    moved = replace(answer.plan, device=np.where(chosen, target, answer.plan.device).astype(np.int32))
    other = api.plan(answer.problem, algorithm=moved)
    found = api.diff(answer, other)
    assert found.num_moved == int((device != target).sum())
    assert {row.module for row in found.modules} <= {m for m in answer.problem.graph.module if m} | {"h.1"}
    assert all(row.module.startswith("h.1") for row in found.modules)
    assert found.time_s[1] == (other.score_s or api.simulate(other.problem, moved).step_s)


def test_graphs_from_different_code_are_matched_by_module_and_by_work(answer: Placement) -> None:
    graph = answer.problem.graph
    renamed = replace(graph, op_name=tuple(f"node_{op}" for op in range(graph.num_ops)))
    partner, how = match_ops(graph, renamed)
    assert partner.tolist() == [*range(graph.num_ops)]
    assert how == {"by module and kind": graph.num_ops}
    flat = replace(renamed, module=("",) * graph.num_ops)
    partner, how = match_ops(graph, flat)
    assert (graph.flops[partner >= 0] == flat.flops[partner[partner >= 0]]).all()
    assert (partner >= 0).mean() > 0.9


def test_what_binds_is_what_lifting_it_wins_back() -> None:
    """A slow link and a slow device: each is named where it, and not the other, is what costs."""
    problem = problem_of(chain(4, num_bytes=100), star_cluster(2, memory=10**6, rate=10.0), 1.0)
    plan = api.plan(problem, algorithm="single_device")
    found = api.explain(plan, "op1", budget="5x", replan=False)
    away = next(row for row in found.elsewhere if not row.is_here)
    assert away.time_s is not None
    assert away.time_s > found.time_s
    assert away.binds.startswith("link ")
    pair = away.binds.removeprefix("link ")
    freed = change_problem(problem, Settings(sets=(f"{pair}.rate=1000000x",))).problem
    assert plan.plan is not None
    moved = replace(
        plan.plan, device=np.where(find_ops(problem.graph, "op1"), 1 - plan.plan.device, plan.plan.device)
    )
    assert api.simulate(freed, moved).step_s == pytest.approx(found.time_s, rel=1e-3)
    assert any(away.binds in sentence for sentence in found.reasons)


def test_a_slower_device_binds_by_its_speed(answer: Placement) -> None:
    found = api.explain(answer, "h.1", budget="5x", replan=False)
    host = next(row for row in found.elsewhere if row.device == "cpu0")
    assert host.binds == "speed of cpu0"


def test_memory_that_is_short_elsewhere_binds(answer: Placement) -> None:
    small = change_problem(answer.problem, Settings(sets=("gpu1.memory=200MB",))).problem
    assert answer.plan is not None
    on_first = replace(answer.plan, device=np.zeros_like(answer.plan.device))
    there = api.plan(small, algorithm=plan_on(on_first.device.tolist()))
    found = api.explain(there, "h.1", budget="5x", replan=False)
    assert next(row for row in found.elsewhere if row.device == "gpu1").binds == "memory of gpu1"


def test_the_end_of_a_path_finds_a_module_and_two_are_told_apart() -> None:
    builder = GraphBuilder("paths")
    for at, path in enumerate(("net.layer.0.attn", "net.layer.0.mlp", "net.layer.1.attn")):
        builder.op(f"op{at}", module=path)
    graph = builder.build()
    assert find_ops(graph, "layer.0").tolist() == [True, True, False]
    assert find_ops(graph, "mlp").tolist() == [False, True, False]
    with pytest.raises(InputError, match=r"net\.layer\.0\.attn, net\.layer\.1\.attn; write more"):
        find_ops(graph, "attn")
    with pytest.raises(UnknownNameError, match=r"known: net"):
        find_ops(graph, "zzz")


def test_a_pipeline_is_explained_by_its_time_per_pass_and_by_what_its_split_allows() -> None:
    problem = problem_of(
        chain(3), star_cluster(2, memory=100), 1.0, objective=Objective.THROUGHPUT, split=Split.CHAIN
    )
    found = api.explain(api.plan(problem, algorithm=plan_on([0, 0, 1])), "op0", budget="5x", replan=False)
    said = " ".join(found.reasons)
    assert "it takes 1 s, of which 1 s lie on the critical path of 5 s of one pass." in said
    assert "the time per pass is 2 s" in said
    assert "the step" not in said
    away = next(row for row in found.elsewhere if row.device == problem.cluster.device_name[1])
    assert away.note == "no longer chain, as --split asks"
    assert f"On {away.device} (no longer chain" in said


def test_a_plan_that_does_not_fit_blames_no_module_for_another_device() -> None:
    problem = problem_of(chain(4, num_bytes=10), star_cluster(2, memory=5), 1.0)
    found = api.explain(api.plan(problem, algorithm=plan_on([0] * 4)), "op3", budget="5x", replan=False)
    assert any("the plan would still not fit: " in said for said in found.reasons)


def test_every_replica_is_where_a_stage_runs_and_moves() -> None:
    problem = layers_problem([Layer(8.0, 16.0, sent=1)] * 2, [1.0, 1.0], "")
    one = api.plan(problem, algorithm="single_device")
    both = api.plan(problem, pipeline="auto", budget="60x")
    found = api.diff(one, both)
    assert [row.num_ops[1] for row in found.devices] == [problem.graph.num_ops] * 2
    assert {row.after for row in found.modules} == {("ref0 + ref1",)}
    assert api.explain(both, "h.0", budget="5x", replan=False).where == ("ref0", "ref1")
