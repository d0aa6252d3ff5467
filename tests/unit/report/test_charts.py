"""Charts of the page: what they must let one see."""

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from loadmaster import api
from loadmaster.core.answers.review import MEMORY_KINDS, MemoryCurve
from loadmaster.core.answers.study_log import StudyLog, TrialLog
from loadmaster.core.graph import Phase
from loadmaster.core.placement import Placement
from loadmaster.core.timeline import Timeline
from loadmaster.report.charts import cluster_picture, memory_chart
from loadmaster.report.curves import comparison_chart, line_chart
from loadmaster.report.documents import save_trace
from loadmaster.report.gantt import draw_gantt, render_svg, shown_classes, time_ticks
from loadmaster.report.study_page import render_study_page
from loadmaster.review.look import review_plan
from tests.builders import chain, graph_of, plan_on, problem_of, star_cluster


def ring(num: int) -> Placement:
    """Every device sends to the next one."""
    problem = problem_of(chain(2 * num, num_bytes=5), star_cluster(num, memory=10**6, rate=5.0), 1.0)
    return api.plan(problem, algorithm=plan_on([op % num for op in range(2 * num)]))


@pytest.mark.parametrize("num", [2, 3, 4, 5, 8])
def test_arrows_begin_and_end_outside_of_boxes_so_that_their_text_can_be_read(num: int) -> None:
    placement = ring(num)
    svg = cluster_picture(placement.problem.cluster, review_plan(placement), placement.peak_bytes.tolist())
    root = ElementTree.fromstring(svg)
    boxes = [
        [float(rect.get(word) or 0) for word in ("x", "y", "width", "height")]
        for rect in root.iter("rect")
        if "box-under" in (rect.get("class") or "")
    ]
    assert len(boxes) == num
    wires = [path.get("d") or "" for path in root.iter("path") if path.get("class") == "wire"]
    assert len(wires) >= num
    for wire in wires:
        numbers = [float(each) for each in re.findall(r"-?[\d.]+", wire)]
        for x, y in (numbers[:2], numbers[-2:]):
            assert not any(left < x < left + w and top < y < top + h for left, top, w, h in boxes), wire


def test_two_ways_between_two_devices_have_labels_apart() -> None:
    placement = ring(4)
    svg = cluster_picture(placement.problem.cluster, review_plan(placement), placement.peak_bytes.tolist())
    marks = [text for text in ElementTree.fromstring(svg).iter("text") if "halo" in (text.get("class") or "")]
    places = [(float(mark.get("x") or 0), float(mark.get("y") or 0)) for mark in marks]
    assert len(places) >= 4
    for at, (x, y) in enumerate(places):
        assert all(abs(x - a) > 30 or abs(y - b) > 10 for a, b in places[:at])


def test_labels_of_arrows_that_cross_do_not_cover_each_other() -> None:
    devices = [0, 1, 0, 2, 0, 3, 1, 2, 1, 3, 2, 3, 0, 1, 3, 1, 2, 0, 3, 2, 1, 0]  # every pair, both ways
    problem = problem_of(chain(len(devices), num_bytes=5), star_cluster(4, memory=10**6, rate=4070.0), 1.0)
    placement = api.plan(problem, algorithm=plan_on(devices))
    svg = cluster_picture(problem.cluster, review_plan(placement), placement.peak_bytes.tolist())
    marks = [text for text in ElementTree.fromstring(svg).iter("text") if "halo" in (text.get("class") or "")]
    assert len(marks) == 12
    boxes = []
    for mark in marks:
        x, y, wide = float(mark.get("x") or 0), float(mark.get("y") or 0), 6.0 * len(mark.text or "")
        left = x - {"start": 0.0, "middle": wide / 2, "end": wide}[mark.get("text-anchor") or ""]
        boxes.append((left, y - 9, left + wide, y + 2))
    for at, (left, top, right, bottom) in enumerate(boxes):
        assert not any(left < c and a < right and top < d and b < bottom for a, b, c, d in boxes[:at])


def curve_of(size: int) -> MemoryCurve:
    held = np.zeros((1, len(MEMORY_KINDS)), np.int64)
    held[0, 0] = size
    return MemoryCurve(time_s=np.zeros(1), held_bytes=held, peak_bytes=size, peak_s=0.0)


def test_the_limit_is_drawn_while_there_is_something_to_see_beside_it() -> None:
    assert 'class="limit"' in memory_chart("gpu0", curve_of(10 << 20), 100 << 20, 1.0)
    far = memory_chart("gpu0", curve_of(10 << 20), 1000 << 20, 1.0)
    assert 'class="limit"' not in far
    assert "peak 10.0 MiB of 1000.0 MiB" in far


def test_the_last_time_of_the_axis_is_not_cut_off() -> None:
    held = np.zeros((1, len(MEMORY_KINDS)), dtype=np.int64)
    held[0, 0] = 5
    svg = memory_chart("gpu0", MemoryCurve(np.zeros(1), held, 5, 0.0), 100, 10_000.0)
    texts = [text for text in ElementTree.fromstring(svg).iter("text") if text.get("text-anchor") == "middle"]
    assert len(texts) > 3
    for text in texts:
        assert float(text.get("x") or 0) + 6.0 * len(text.text or "") / 2 < 480


def test_a_long_name_of_a_device_ends_before_what_stands_beside_it() -> None:
    svg = memory_chart("a very long name of a device of some cluster", curve_of(30 << 20), 10 << 20, 1.0)
    name, said = [text for text in ElementTree.fromstring(svg).iter("text") if text.get("y") == "14"]
    wide = 8.0 * len(name.text or "")  # bold, 12.5 px
    assert float(name.get("x") or 0) + wide < float(said.get("x") or 0) - 6.0 * len(said.text or "")
    assert (name.text or "").endswith("…")


def test_labels_of_algorithms_cover_neither_each_other_nor_a_point() -> None:
    near = [("chain_balance", 0.2, 1.11), ("cpsat_latency", 0.6, 1.11), ("segments", 2.0, 0.824)]
    near += [("refine(segments)", 1.75, 0.824), ("m_etf", 0.125, 2.76), ("m_sct", 0.09, 2.76)]
    near += [("fastest_device", 0.0021, 1.11), ("heft", 0.0025, 1.11), ("cpop", 0.0028, 1.11)]
    near += [("single_device", 0.00275, 1.12), ("m_topo", 0.0015, 1.4), ("layers", 1.2, 0.83)]
    root = ElementTree.fromstring(comparison_chart(near, 0.5))
    boxes, dots = [], []
    for group in root.iter("g"):
        (text,), (dot,) = group.findall("text"), group.findall("circle")
        x, y, wide = float(text.get("x") or 0), float(text.get("y") or 0), 6.0 * len(text.text or "")
        left = x - {"start": 0.0, "middle": wide / 2, "end": wide}[text.get("text-anchor") or ""]
        assert left > 96, text.text  # the numbers of the axis stand left of it
        assert left + wide < 940, text.text
        boxes.append((left, y - 9, left + wide, y + 2))
        dots.append((float(dot.get("cx") or 0), float(dot.get("cy") or 0)))
    assert len(boxes) == len(near)
    for at, (left, top, right, bottom) in enumerate(boxes):
        assert not any(left < x < right and top < y < bottom for x, y in dots)
        for a, b, c, d in boxes[:at]:
            assert not (left < c and a < right and top < d and b < bottom)


def test_labels_at_the_bound_do_not_lie_on_its_line_and_the_axis_is_named_in_full() -> None:
    near = [("m_topo", 0.0015, 25.2), ("m_etf", 0.34, 25.25), ("auto", 1.3, 25.2)]
    root = ElementTree.fromstring(comparison_chart(near, 25.2, upright="time per 16 samples"))
    (line,) = [path.get("d") or "" for path in root.iter("path") if path.get("class") == "limit"]
    height = float(line[1:].split("H")[0].split()[1])
    for group in root.iter("g"):
        (text,) = group.findall("text")
        assert not float(text.get("y") or 0) - 9 < height < float(text.get("y") or 0) + 2, text.text
    (named,) = [text for text in root.iter("text") if text.text == "time per 16 samples"]
    assert named.get("text-anchor") is None
    assert float(named.get("x") or 0) > 0
    shown = [text.text for text in root.iter("text") if text.get("text-anchor") == "end"]
    assert {"24 s", "26 s"} <= set(shown)


def test_times_of_an_axis_are_in_one_unit() -> None:
    assert [text for _, text in time_ticks(154.0, 4)] == ["0 s", "50 s", "100 s", "150 s"]
    assert [text for _, text in time_ticks(1.8, 4)] == ["0 s", "0.5 s", "1 s", "1.5 s"]
    assert time_ticks(1500.0, 3)[1:] == [(600.0, "10 min"), (1200.0, "20 min")]
    assert [text for _, text in time_ticks(2.5e-5, 3)] == ["0 s", "10 us", "20 us"]


def test_the_word_limit_stands_where_the_peak_does_not() -> None:
    for peak_s, anchor in ((0.9, "start"), (0.1, "end")):
        held = np.full((1, len(MEMORY_KINDS)), 5 << 20, dtype=np.int64)
        curve = MemoryCurve(np.zeros(1), held, peak_s, 35 << 20)
        root = ElementTree.fromstring(memory_chart("gpu0", curve, 36 << 20, 1.0))
        (limit,) = [text for text in root.iter("text") if (text.text or "").startswith("limit")]
        assert limit.get("text-anchor") == anchor


def test_what_takes_no_time_to_send_has_no_arrow_and_no_lane() -> None:
    graph = graph_of({"makes": [5, 0]}, {"uses": [0]}, {"uses": [1]})
    problem = problem_of(graph, star_cluster(3, memory=10**6, rate=5.0), 1.0)
    placement = api.plan(problem, algorithm=plan_on([0, 1, 2]))
    review = review_plan(placement)
    svg = cluster_picture(problem.cluster, review, placement.peak_bytes.tolist())
    assert svg.count('class="wire"') == 1
    gantt = draw_gantt(problem.graph, {"predicted": review.timeline})
    names = problem.cluster.device_name
    assert [lane.title for lane in gantt.lanes if lane.is_link] == [f"{names[0]} → {names[1]}"]


def test_names_of_lanes_predicted_and_measured_are_within_the_picture() -> None:
    problem = problem_of(chain(4, num_bytes=5), star_cluster(2, memory=10**6), 1.0)
    timeline = api.simulate(problem, api.plan(problem, algorithm=plan_on([0, 1, 0, 1])).plan)
    timeline = replace(timeline, device_name=("cpu#0", "cpu#1"))
    gantt = draw_gantt(problem.graph, {"predicted": timeline, "measured": timeline})
    root = ElementTree.fromstring(render_svg(gantt))
    titles = [text for text in root.iter() if text.get("class") == "g-title"]
    ends = [text for text in titles if text.get("text-anchor") == "end"]
    assert any(text.text == "cpu#0 → cpu#1 (predicted)" for text in ends)
    for text in ends:
        assert float(text.get("x", "0")) > 6.5 * len(text.text or "")


def test_the_legend_leaves_out_what_takes_no_time() -> None:
    graph = graph_of({"makes": [5], "phase": Phase.PARAM}, {"uses": [0]})
    problem = problem_of(graph, star_cluster(1, memory=10**6), np.array([0.0, 1.0]))
    placement = api.plan(problem, algorithm=plan_on([0, 0]))
    assert shown_classes(draw_gantt(graph, {"predicted": review_plan(placement).timeline})) == [0]


def test_the_axis_of_losses_has_round_numbers_that_hold_every_loss() -> None:
    root = ElementTree.fromstring(line_chart([("a", [(1, 7.626), (9, 4.517)])], title="", across="step"))
    shown = [float(text.text or "") for text in root.iter("text") if text.get("text-anchor") == "end"]
    assert shown == [4.0, 5.0, 6.0, 7.0, 8.0]


def test_steps_of_a_study_are_round_numbers_and_its_ninth_trial_is_told_apart() -> None:
    lines = [(f"t{at}", tuple((50 + 50 * step, 5.0 - step) for step in range(4))) for at in range(9)]
    root = ElementTree.fromstring(line_chart(lines, title="", across="step"))
    shown = [text.text for text in root.iter("text") if text.get("text-anchor") == "middle"]
    assert shown == ["60", "80", "100", "120", "140", "160", "180", "200", "step"]
    trials = tuple(TrialLog(name, "done", 200, 200, 1.0, 0, losses, {}, 0, 0, "") for name, losses in lines)
    page = render_study_page(StudyLog("study", trials, (), 1.0)).decode()
    assert (
        page.count('<span class="chip d0"></span>t0')
        == page.count('<span class="chip d0 dashed"></span>t8')
        == 1
    )


def test_the_page_of_a_plan_that_does_not_fit_says_memory_and_not_what_limits_its_time(
    tmp_path: Path,
) -> None:
    problem = problem_of(chain(4, num_bytes=10), star_cluster(2, memory=5), 1.0)
    placement = api.plan(problem, algorithm=plan_on([0, 0, 1, 1]))
    assert not placement.fits
    api.write_report(placement, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "does not fit" in text
    assert "What limits it" not in text
    assert "samples/s" not in text  # of a plan that cannot run
    assert "no plan that fits" in text


def test_hidden_devices_are_not_called_busy(tmp_path: Path) -> None:
    problem = problem_of(chain(2), star_cluster(12, memory=100), 1.0)
    api.write_report(api.plan(problem, algorithm=plan_on([0, 0])), tmp_path / "page.html")
    assert "no device that computes is ever idle" in (tmp_path / "page.html").read_text()


def test_spans_of_a_trace_that_touch_share_a_row(tmp_path: Path) -> None:
    problem = problem_of(chain(40), star_cluster(1, memory=10**6), np.linspace(1e-4, 3e-4, 40))
    placement = api.plan(problem, algorithm=plan_on([0] * 40))
    save_trace(placement, review_plan(placement).timeline, str(tmp_path / "trace.json"))
    found, _ = api.import_file(str(tmp_path / "trace.json"), placement)
    assert isinstance(found, Timeline)
    assert [lane.num_rows for lane in draw_gantt(problem.graph, {"measured": found}).lanes] == [1]
