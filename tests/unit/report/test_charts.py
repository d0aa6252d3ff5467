"""Charts of the page: what they must let one see."""

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from loadmaster import api
from loadmaster.core.answers.review import MEMORY_KINDS, MemoryCurve
from loadmaster.core.placement import Placement
from loadmaster.report.charts import cluster_picture, memory_chart
from loadmaster.review.look import review_plan
from tests.builders import chain, plan_on, problem_of, star_cluster


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


def curve_of(size: int) -> MemoryCurve:
    held = np.zeros((1, len(MEMORY_KINDS)), np.int64)
    held[0, 0] = size
    return MemoryCurve(time_s=np.zeros(1), held_bytes=held, peak_bytes=size, peak_s=0.0)


def test_the_limit_is_drawn_while_there_is_something_to_see_beside_it() -> None:
    assert 'class="limit"' in memory_chart("gpu0", curve_of(10 << 20), 100 << 20, 1.0)
    far = memory_chart("gpu0", curve_of(10 << 20), 1000 << 20, 1.0)
    assert 'class="limit"' not in far
    assert "1000.0 MiB, far above" in far


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
