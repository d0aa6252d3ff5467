"""What a notebook shows, and the live table of a search."""

import io
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from rich.console import Console

from loadmaster import api
from loadmaster.core.placement import Placement
from loadmaster.core.problem import Problem
from loadmaster.core.run import PlanNews
from loadmaster.core.units import format_bytes
from loadmaster.report.live_plan import LivePlan, show_live
from tests.browser.pages import HOSTILE, hostile, two_devices
from tests.builders import plan_on


def test_a_placement_shows_a_table_and_a_picture() -> None:
    html = two_devices()._repr_html_()
    assert "lower bound" in html
    assert "<svg" in html
    assert html.count("<table") == 2


@pytest.mark.parametrize("noun", ["placement", "timeline", "plan"])
def test_names_in_a_notebook_are_text(noun: str) -> None:
    answer = hostile()
    assert answer.plan is not None
    shown = {"placement": answer, "timeline": api.simulate(answer.problem, answer.plan), "plan": answer.plan}[
        noun
    ]
    html = shown._repr_html_()
    ElementTree.fromstring(f"<div>{html}</div>")  # one well-formed tree: no name has opened an element
    assert HOSTILE[0] not in html
    assert "<b onclick" not in html


def test_answers_print_what_the_command_line_prints() -> None:
    placement = two_devices()
    answer = api.explain(placement, "net.part1", budget="5x")
    assert str(answer).splitlines()[0] == answer.reasons[0]
    assert "device" in str(answer)
    outcomes, _ = api.whatif(placement, set=["ref0-ref1.rate=2x"], budget="5x")
    assert str(outcomes).splitlines()[0].split() == ["change", "time", "against", "now", "why"]
    assert "moved" in str(api.diff(placement, placement))
    assert "needs" in str(api.fit("gen:chain:20", "cpu-1GB", quick=True))


def test_names_in_printed_answers_are_text() -> None:
    answer = api.explain(hostile(), HOSTILE[0], budget="5x")
    html = answer._repr_html_()
    ElementTree.fromstring(html)
    assert "<img" not in html
    assert "\x1b" not in str(api.explain(hostile(), HOSTILE[3], budget="5x"))


def test_a_picture_is_saved_as_svg(tmp_path: Path) -> None:
    answer = two_devices()
    answer.plot().save(tmp_path / "plan.svg")
    tree = ElementTree.parse(tmp_path / "plan.svg")
    assert tree.getroot().tag.endswith("svg")
    assert answer.plan is not None
    assert answer.plan.plot(answer.problem)._repr_svg_() == answer.plot().svg
    assert "gpu" in (tmp_path / "plan.svg").read_text() or "ref0" in (tmp_path / "plan.svg").read_text()


def test_the_legend_of_a_picture_has_the_colours_that_are_there() -> None:
    svg = two_devices().plot().svg
    assert ">forward</text>" in svg
    assert ">transfer</text>" in svg
    assert ">update</text>" not in svg


def test_a_picture_can_be_read_on_a_light_page_of_a_dark_system() -> None:
    svg = two_devices().plot().svg
    dark = svg[svg.index("prefers-color-scheme:dark") :]
    for style in (svg, dark):
        assert re.search(r"svg\.gantt\{background:#[0-9a-f]+\}", style)


def test_a_timeline_alone_knows_no_forward_pass() -> None:
    answer = two_devices()
    assert answer.plan is not None
    timeline = api.simulate(answer.problem, answer.plan)
    assert ">compute</text>" in timeline._repr_html_()
    assert ">forward</text>" not in timeline._repr_html_()
    assert ">forward</text>" in timeline.plot(answer.problem.graph).svg


def test_every_span_of_a_small_plan_is_in_the_picture() -> None:
    svg = two_devices().plot().svg
    assert svg.count('class="g0"') == 2 + 1  # one path a device, and the legend
    assert svg.count('class="g4"') == 1 + 1  # the transfer, and the legend


def test_a_terminal_shows_the_best_so_far_while_it_searches() -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=100)
    with show_live(console) as live:
        assert live is not None
        live.say("refine", 0.0)
        live.watch(PlanNews(2.0, 0, 1.6))
    shown = text.getvalue()
    assert "best so far" in shown
    assert "at most 25.0 %" in shown


def test_nothing_is_shown_where_nobody_looks() -> None:
    with show_live(Console(file=io.StringIO())) as live:
        assert live is None


def test_better_plans_are_told_as_they_are_found() -> None:
    from loadmaster.core.run import Budget
    from loadmaster.placers.ask import PlanRequest, find_placement
    from loadmaster.placers.registry import placer

    heard: list[PlanNews] = []
    problem = api.problem("gen:transformer:300", "RTX4090, RTX3090")
    ask = PlanRequest(placer("auto"), Budget(count=60), watch=heard.append)
    answer = find_placement(problem, ask)
    assert len(heard) > 1
    ranks = [(news.overflow_bytes, news.time_s) for news in heard]
    assert ranks == sorted(ranks, reverse=True)
    assert heard[-1].time_s == answer.score_s
    assert heard[-1].bound_s == answer.bound_s


def test_a_bound_that_is_proven_while_it_searches_is_told() -> None:
    from loadmaster.core.run import Bound, Budget, Run
    from loadmaster.placers.answer import best_of
    from loadmaster.placers.ask import PlanRequest, find_placement

    problem = two_devices().problem
    plan = plan_on([0, 0, 0, 1, 1, 1])

    def prove(problem: Problem, run: Run) -> Placement:
        found = run.score(plan)
        run.prove(Bound(0.9 * found.time_s, "mine"))
        return best_of(problem, run, [plan], algorithm="prove")

    heard: list[PlanNews] = []
    find_placement(problem, PlanRequest(prove, Budget(count=1), watch=heard.append))
    assert heard[-1].bound_s == 0.9 * heard[-1].time_s > heard[0].bound_s


def test_a_plan_too_large_says_so() -> None:
    live = LivePlan()
    live.watch(PlanNews(2.0, 2**30, 1.0))
    assert live.rows()["best so far"] == "2 s, but 1.0 GiB too large"
    assert live.rows()["gap"] == "-"


def test_a_picture_of_a_placement_shows_the_memory_of_every_device() -> None:
    placement = api.plan("gen:transformer:100", "RTX4090, T4", algorithm="chain_balance", budget="5x")
    picture = placement.plot().svg
    assert "peak of memory" in picture
    for device in range(2):
        peak = format_bytes(int(placement.peak_bytes[device]))
        limit = format_bytes(int(placement.problem.cluster.usable_bytes[device]))
        assert f"{peak} of {limit}" in picture
    assert "gpu0 RTX4090" in picture
    assert "gpu1 T4" in picture
