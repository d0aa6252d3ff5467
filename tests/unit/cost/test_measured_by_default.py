"""Devices of this machine are measured without being asked; those of elsewhere have vendors' peaks."""

import re
from pathlib import Path

import pytest

import loadmaster as lm
from loadmaster.cluster.local import is_here
from loadmaster.core.errors import InputError
from loadmaster.core.problem import Origin
from loadmaster.cost.cost_request import UNASKED_ENVIRONMENT
from loadmaster.cost.database import ENVIRONMENT, open_database

torch = pytest.importorskip("torch", exc_type=ImportError)
from torch import nn  # noqa: E402

from loadmaster.graph.capture import capture  # noqa: E402

TWO_PARTS = "cpu#0-1GB, cpu#1-1GB"


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(UNASKED_ENVIRONMENT, "0.2s")
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "costs.sqlite"))
    return tmp_path / "costs.sqlite"


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def count_rows(path: Path) -> int:
    with open_database(path) as known:
        return known.count()


@pytest.mark.parametrize(
    ("devices", "here"),
    [
        (TWO_PARTS, True),
        ("cpu", True),
        ("cpu#0-64MB", True),
        ("cpu-900TB", False),  # more than this machine can have
        ("A100-80GB, cpu", False),
        ("cuda:97", False),
        ("cluster.toml", False),
        ("cpu | cpu", False),
        ("", False),
        (None, False),
    ],
)
def test_devices_are_here_where_this_machine_has_them(devices: str | None, here: bool) -> None:
    assert is_here(devices) is here


def test_a_plan_on_devices_that_are_here_rests_on_measured_costs(database: Path) -> None:
    graph = capture(make_model(), (torch.zeros(2, 8),))
    measured = lm.problem(graph, TWO_PARTS, costs="auto").costs
    assert (measured.origin == Origin.MEASURED).any()
    assert count_rows(database) > 0
    elsewhere = lm.problem(graph, "A100-80GB, cpu-64GB", costs="auto").costs
    assert (elsewhere.origin == Origin.ANALYTIC).all()


def test_one_may_say_no_to_measuring(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = capture(make_model(), (torch.zeros(2, 8),))
    for costs, seconds in (("roofline", "0.2s"), ("auto", "0")):
        monkeypatch.setenv(UNASKED_ENVIRONMENT, seconds)
        assert (lm.problem(graph, TWO_PARTS, costs=costs).costs.origin == Origin.ANALYTIC).all()
    assert not database.exists()


def test_place_measures_and_leaves_random_numbers_and_the_outputs_alone(database: Path) -> None:
    torch.manual_seed(3)
    model = make_model()
    plain = model(torch.ones(2, 8))
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    placed = lm.place(model, torch.zeros(2, 8), devices=TWO_PARTS, budget="20x")
    assert torch.equal(torch.rand(4), expected)
    assert (placed.placement.problem.costs.origin == Origin.MEASURED).any()
    assert torch.equal(placed(torch.ones(2, 8)), plain)
    assert re.search(r"predicted: a step takes [0-9.]+ .?s \(±[0-9]+ %\)", placed.explain())


def test_place_says_no_to_measuring_where_it_is_told_to(database: Path) -> None:
    placed = lm.place(make_model(), torch.zeros(2, 8), devices=TWO_PARTS, budget="20x", costs="roofline")
    assert (placed.placement.problem.costs.origin == Origin.ANALYTIC).all()
    with pytest.raises(InputError, match="costs"):
        lm.place(make_model(), placed.placement, costs="auto")
    with pytest.raises(InputError, match="roofline"):
        lm.place(make_model(), torch.zeros(2, 8), devices=TWO_PARTS, costs="rooflin")


def test_a_predicted_step_of_measured_costs_has_an_error_bar(database: Path) -> None:
    from loadmaster.report.documents import placement_document

    graph = capture(make_model(), (torch.zeros(2, 8),))
    measured = lm.plan(lm.problem(graph, TWO_PARTS, costs="auto"), budget="20x")
    assert placement_document(measured)["step_rel_error"] > 0
    guessed = lm.plan(lm.problem(graph, TWO_PARTS), budget="20x")
    assert placement_document(guessed)["step_rel_error"] is None


def test_processes_of_a_pipeline_are_measured_with_their_share_of_the_threads(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = capture(make_model(), (torch.zeros(2, 8),))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        lm.problem(graph, TWO_PARTS, costs="auto", pipeline="auto")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    with open_database(database) as known:
        assert {chip.rpartition(", ")[2] for chip in known.devices()} == {"1 thread"}
