"""Steps of micro-batches, reviewed: the page, explain, diff and whatif speak of the whole step."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from loadmaster import api
from loadmaster.core.answers.review import MEMORY_KINDS
from loadmaster.core.graph import Phase
from loadmaster.core.placement import Placement
from loadmaster.core.problem import Objective
from loadmaster.core.run import Budget
from loadmaster.core.timeline import SpanKind, TimelineOrigin
from loadmaster.report.documents import samples_per_s
from loadmaster.report.pipelines import why
from loadmaster.report.tables import time_word, winner_text
from loadmaster.review.explain import explain_plan
from loadmaster.review.look import review_measured, review_plan
from loadmaster.review.replanning import Replanner
from loadmaster.review.steps import samples_of
from tests.builders import chain, plan_on, problem_of, star_cluster
from tests.pipeline_steps import Layer, layers_problem


@pytest.fixture(scope="module")
def answer() -> Placement:
    layers = [Layer(1.0, 2.0, sent=4, kept=8, weight=6, update=0.5) for _ in range(6)]
    problem = layers_problem(layers, [1.0, 1.0], "1f1b:4")
    return api.plan(problem, budget="20x")


def test_the_review_is_of_the_whole_step(answer: Placement) -> None:
    review = review_plan(answer)
    assert answer.plan is not None
    assert answer.plan.pipeline is not None
    assert review.timeline.step_s == answer.score_s
    assert set(review.timeline.microbatch.tolist()) == {0, 1, 2, 3}
    for device, curve in enumerate(review.memory):
        assert curve.peak_bytes == answer.peak_bytes[device]
        assert (curve.held_bytes >= 0).all()
        assert curve.held_bytes[:, MEMORY_KINDS.index("in flight")].sum() == 0  # each is drawn
    idle = [sum(w.seconds for w in review.waits if w.device == d) for d in range(2)]
    for device, busy in enumerate(review.timeline.busy_s.tolist()):
        assert busy + idle[device] == pytest.approx(review.timeline.step_s)
    assert sum(review.modules[0].seconds) == pytest.approx(float(review.timeline.busy_s.sum()))


def test_the_page_shows_schedule_stages_and_every_pass(answer: Placement, tmp_path: Path) -> None:
    api.write_report(answer, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "4 micro-batches through" in page
    assert ">1f1b<" in page
    names = json.loads(re.search(r'"names":(\[.*?\])', page)[1])  # type: ignore[index]
    assert {f"{work}{batch} of stage 0" for work in "FB" for batch in range(4)} <= set(names)
    svg = str(answer.plot().svg)
    assert ">F3</text>" in svg


def test_waits_of_a_device_for_one_reason_are_one_row(answer: Placement, tmp_path: Path) -> None:
    api.write_report(answer, tmp_path / "page.html")
    table = (tmp_path / "page.html").read_text().partition('id="waiting"')[2].partition("</table>")[0]
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in table.split("<tr>")[2:]]
    reasons = [(device, why) for device, why, *_ in rows if "shorter" not in why]
    assert len(reasons) >= 2
    assert len(reasons) == len(set(reasons))


def test_a_module_moves_with_what_lies_between_and_costs_what_doing_it_costs(answer: Placement) -> None:
    graph, plan = answer.problem.graph, answer.plan
    assert plan is not None
    assert plan.pipeline is not None
    at = dict(zip(graph.op_name, plan.pipeline.stage.tolist(), strict=True))
    last = max(name for name in graph.op_name if name[0] == "f" and at[name] == 0)
    found = explain_plan(answer, last, Replanner(Budget(count=1)))
    other = next(row for row in found.elsewhere if not row.is_here)
    ops = np.array([name[1:] == last[1:] for name in graph.op_name])  # with weight, backward, update
    there = int(plan.pipeline.devices_of(plan.device)[0][1])
    moved = replace(
        plan,
        device=np.where(ops, there, plan.device).astype(np.int32),
        pipeline=replace(plan.pipeline, stage=np.where(ops, 1, plan.pipeline.stage).astype(np.int32)),
    )
    assert other.time_s == api.simulate(answer.problem, moved).step_s
    assert found.own_s == 4 * 1.0


def test_a_plan_does_not_differ_from_itself_in_a_step(answer: Placement) -> None:
    found = api.diff(answer, answer)
    assert found.num_moved == 0
    busy = api.simulate(answer.problem, answer.plan).busy_s  # type: ignore[arg-type]
    assert [row.busy_s[0] for row in found.devices] == pytest.approx(busy.tolist())


def test_measured_passes_are_drawn_under_predicted_ones(answer: Placement, tmp_path: Path) -> None:
    assert answer.plan is not None
    assert answer.plan.pipeline is not None
    graph, stage = answer.problem.graph, answer.plan.pipeline.stage
    flat = review_plan(answer)
    assert flat.graph is not None
    seen = api.simulate(answer.problem, answer.plan)
    keep = np.flatnonzero(seen.kind == SpanKind.COMPUTE)
    keep = keep[np.isin(flat.graph.phase[seen.item[keep]], (Phase.FORWARD, Phase.BACKWARD))]
    first = {
        (int(stage[op]), int(graph.phase[op])): op for op in range(graph.num_ops - 1, -1, -1)
    }  # as a run writes it: named after the first op of its stage
    item = [
        first[int(flat.graph.module[op].rpartition(" ")[2]), int(flat.graph.phase[op])]
        for op in seen.item[keep].tolist()
    ]
    columns = {n: getattr(seen, n)[keep] for n in ("kind", "resource", "microbatch", "start_s", "end_s")}
    measured = replace(seen, origin=TimelineOrigin.MEASURED, item=np.array(item, dtype=np.int32), **columns)
    found = review_measured(answer.problem, answer.plan, measured)
    assert found.timeline.item.tolist() == seen.item[keep].tolist()
    api.write_report(answer, tmp_path / "page.html", measured=measured)


@pytest.mark.parametrize("to", ["chrome", "csv", "graphml", "nodelink"])
def test_exports_of_steps_speak_of_the_right_ops(answer: Placement, to: str) -> None:
    content, lost = api.export(answer, to)
    if to == "chrome":
        assert "F3 of stage 0" in content.decode()
    else:
        assert any("one micro-batch alone" in line for line in lost)


def test_a_pipeline_of_a_captured_graph_counts_every_sample_of_a_pass() -> None:
    graph = replace(chain(4), capture="joint; from hf:gpt2 --batch 16")
    problem = problem_of(graph, star_cluster(2, memory=100), 1.0, objective=Objective.THROUGHPUT)
    placement = api.plan(problem, algorithm=plan_on([0, 0, 1, 1]))
    assert samples_of(problem, placement.plan) == 16
    assert placement.score_s is not None
    assert samples_per_s(placement) == pytest.approx(16 / placement.score_s)
    assert time_word(problem) == "time per 16 samples"
    rows = api.whatif(placement, set="ref0-ref1.rate=2x", budget="5x")[0].rows
    assert rows[0].per_sample_s == pytest.approx(placement.score_s / 16)


def test_the_page_of_a_pipeline_says_how_busy_devices_are_while_it_runs(tmp_path: Path) -> None:
    problem = problem_of(chain(4), star_cluster(2, memory=100), 1.0, objective=Objective.THROUGHPUT)
    placement = api.plan(problem, algorithm=plan_on([0, 0, 1, 1]))
    api.write_report(placement, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "How busy each device is while the pipeline runs" in page
    assert page.count(">busy 100.0 %<") == 2  # both run all the time, one sample after the other
    assert "of the step" not in page
    assert "This is one pass alone" in page


def test_every_replica_of_a_stage_is_counted(tmp_path: Path) -> None:
    problem = layers_problem([Layer(8.0, 16.0, sent=1)] * 2, [1.0, 1.0], "")
    placement = api.plan(problem, pipeline="auto", budget="60x")
    assert placement.plan is not None
    assert placement.plan.pipeline is not None
    assert placement.plan.pipeline.num_replicas == 2
    assert placement.plan.count_ops(2).tolist() == [problem.graph.num_ops] * 2
    assert why(placement)[0].startswith("one stage on ref0 and again on ref1:")
    assert [m.score_s for m in placement.members if m.reason == "best"] == [placement.score_s]
    assert "one pass" not in winner_text(placement)
    api.write_report(placement, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert '<span class="on">ref0, ref1</span>' in page
