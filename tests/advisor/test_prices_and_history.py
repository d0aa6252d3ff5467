"""The price of a device second against a linear programme, histories against plain sums, and pages."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import linprog

from loadmaster.advisor.environments.engine import Kind, Rule, replay
from loadmaster.advisor.environments.streams import draw_stream
from loadmaster.advisor.environments.trace import TraceStream
from loadmaster.advisor.environments.trace_engine import Order, TraceRule, replay_trace
from loadmaster.advisor.history import BINS, history_of_decisions, history_of_trace
from loadmaster.advisor.page import plus_minus, write_page
from loadmaster.advisor.prices import fit_prices, fluid_price
from loadmaster.advisor.replay import bench_ramp
from loadmaster.core.errors import InputError
from tests.advisor.shared import GRAPHS, needs_graphs, world


@pytest.mark.parametrize("seed", range(20))
def test_the_fluid_price_is_the_dual_of_its_linear_programme(seed: int) -> None:
    rng = np.random.default_rng(seed)
    area, value = rng.uniform(1, 50, 12), rng.uniform(0.5, 4, 12)
    area[rng.random(12) < 0.2] = np.inf
    capacity = float(rng.uniform(10, 250))
    fits = np.isfinite(area)
    found = linprog(-value[fits], A_ub=area[fits][None], b_ub=[capacity], bounds=(0, 1), method="highs")
    assert fluid_price(area, value, capacity) == pytest.approx(-float(found.ineqlin.marginals[0]), abs=1e-9)


def test_a_price_of_nothing_known_is_refused() -> None:
    with pytest.raises(InputError, match="above 0"):
        fluid_price(np.array([0.0]), np.ones(1), 5.0)
    with pytest.raises(InputError, match="2 device times for 1 values"):
        fluid_price(np.ones(2), np.ones(1), 5.0)


@needs_graphs
def test_prices_are_no_worse_than_no_prices() -> None:
    w, streams = world("own"), [draw_stream("B", s) for s in (1000, 1001)]
    blocking = [
        np.mean([replay(w, s, rule).blocking for s in streams])
        for rule in (fit_prices(w, streams), Rule(Kind.PRICED))
    ]
    assert blocking[0] < blocking[1]


@needs_graphs
def test_the_history_of_the_published_cluster_is_that_of_its_jobs() -> None:
    w, stream = world("own"), draw_stream("A", 5)
    outcome = replay(w, stream, Rule(Kind.CONSTANT, 4))
    ran = np.flatnonzero(outcome.block >= 0)
    end = outcome.start[ran] + w.jct[stream.model[ran], outcome.block[ran]]
    within = np.minimum(end, stream.arrival[-1]) - outcome.start[ran]
    assert outcome.utilisation == pytest.approx(float((4 * within).sum() / (32 * stream.arrival[-1])))
    for j in (10, 300, 900):
        now = stream.arrival[j]
        running = (outcome.start[ran] < now) & (end > now + 1e-7)
        assert outcome.num_free[j] == 32 - 4 * running.sum()
    history = history_of_decisions(outcome)
    assert len(history.utilisation_over_time) == BINS
    assert history.fragmented == 0  # four jobs of 4 always leave a block of 4


@pytest.mark.slow
def test_the_history_of_a_trace_is_that_of_its_jobs() -> None:
    hours = 3600.0
    duration = np.full((3, 1, 2, 4), np.inf)
    duration[:, 0, 0, 1] = hours  # every job runs on two devices
    arrival = np.array([0.0, 0.0, 2 * hours])
    stream = TraceStream(
        "three", ("gpu",), arrival, arrival + 5 * hours, duration, np.ones(3, np.int64), np.ones(3)
    )
    outcome = replay_trace(stream, TraceRule(Order.FIFO), np.array([4, 4]))
    found = history_of_trace(outcome, arrival, 8)
    assert found.utilisation == pytest.approx(0.25)  # 4 of 8 devices for the first of two hours
    assert found.utilisation_over_time[0] == pytest.approx(0.5)
    assert found.utilisation_over_time[-1] == pytest.approx(0.0)
    assert found.fragmented == pytest.approx(0.0)
    scattered = replay_trace(stream, TraceRule(Order.FIFO), np.array([3, 3]))
    free_on_hosts = history_of_trace(scattered, arrival, 6)
    assert free_on_hosts.fragmented == pytest.approx(0.5)  # the second hour: six free, three on a host


@needs_graphs
def test_a_page_has_lines_over_time_and_escapes_names(tmp_path) -> None:  # type: ignore[no-untyped-def]
    rules = {"<b>const 4": Rule(Kind.CONSTANT, 4), "smallest": Rule(Kind.MEETS)}
    rows = bench_ramp(world("fixed"), range(2), rules, distributions=("A",), bounds=False)
    assert [row.policy for row in rows] == list(rules)
    assert rows[1].details["fragmented"] > 0
    assert rows[1].details_half["utilisation"] > 0
    write_page(tmp_path / "p.html", "t", "blocking", [*rows, replace(rows[0], setting="B", history={})])
    text = (tmp_path / "p.html").read_text()
    # an interval and two lines for each of three policies; the last of them has no history
    assert text.count('class="stroke s') == 3 + 2 * 2
    assert "<b>const" not in text
    assert "±" in text
    assert plus_minus(99.91, 110.0) == "100±110"
    assert plus_minus(0.3671, 0.0621) == "0.367±0.062"
    assert plus_minus(5.0, float("inf")) == "5"


@needs_graphs
def test_every_column_of_a_table_fits_80_characters(say) -> None:  # type: ignore[no-untyped-def]
    command = (
        "advise",
        "bench",
        "fixed",
        "--graphs",
        str(GRAPHS),
        "--seeds",
        "2",
        "--policy",
        "smallest >= 4",
    )
    code, out, _ = say(*command, columns=80)
    assert code == 0
    for word in ("rejected", "horizon %", "busy %", "fragmented", "±"):
        assert word in out
