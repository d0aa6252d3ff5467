"""Costs that can be trusted: a busy machine is noticed and marked, and predictions have an error bar."""

import math
import sqlite3
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import loadmaster as lm
from loadmaster.core.graph import Phase
from loadmaster.core.plan import plan_of
from loadmaster.core.problem import Origin
from loadmaster.cost.busy_machine import BUSY, CALM, UNKNOWN, BusyWatch, ProcessorTimes, count_cores
from loadmaster.cost.database import COLUMNS, CostDatabase, CostRow, open_database
from loadmaster.cost.error_bar import (
    BUSY_ERROR,
    ISSUE_ERROR,
    MEASURED_ERROR,
    NO_ANCHOR_ERROR,
    UNKNOWN_ERROR,
    format_error,
    op_errors,
    step_error,
)
from loadmaster.cost.exchange import export_costs, import_costs
from loadmaster.cost.issue import scale_issues
from loadmaster.cost.keys import (
    COPIES,
    ISSUE_CALL,
    ISSUES,
    WHOLE_STEP,
    Keys,
    collect_keys,
    issue_keys,
    step_key,
)
from loadmaster.cost.timed.copies import copy_seconds
from loadmaster.cost.timed.whole_step import find_anchor

pytest.importorskip("torch", exc_type=ImportError)
import torch

from loadmaster.cost.timed.issue_reference import capture_issue_references, measure_issue
from loadmaster.cost.timed.stopwatch import merge_rows

ROW = CostRow("aten.relu.default float32[8]", "chip", "2.9", "2026-01-01T00:00:00Z", 2.0, 0.1, 9)
EARLIER, LATER = "2025-06-01T00:00:00Z", "2026-06-01T00:00:00Z"


def watch(all_s: "list[float | None]", own_s: list[float], *, threads: int, cores: int = 2) -> BusyWatch:
    """A watch that reads a second later each time."""
    seconds = zip(all_s, own_s, strict=True)
    times = iter([ProcessorTimes(float(at), total, own) for at, (total, own) in enumerate(seconds)])
    return BusyWatch(threads=threads, cores=cores, read=lambda: next(times))


def put_and_get(path: Path, *rows: CostRow) -> CostRow:
    with open_database(path) as database:
        for row in rows:
            database.put([row])
        return database.get([ROW.signature], "chip", "2.9")[ROW.signature]


@pytest.mark.parametrize(
    ("all_s", "own_s", "threads", "cores", "busy"),
    [
        ([0.0, 2.0], [0.0, 2.0], 2, 2, False),  # all of it is ours
        ([0.0, 1.05], [0.0, 1.0], 2, 2, False),  # an idle machine's own chores
        ([0.0, 2.0], [0.0, 1.0], 2, 2, True),  # another program has one of two
        ([0.0, 2.0], [0.0, 1.0], 1, 2, False),  # and we need only the other
        ([0.0, 40.0], [0.0, 32.0], 32, 64, False),  # a large machine has room for both
        ([0.0, 64.0], [0.0, 20.0], 32, 64, True),
        ([None, None], [0.0, 1.0], 2, 2, False),  # nobody knows
    ],
)
def test_other_work_is_noticed_where_it_takes_processors_that_are_needed(
    all_s: "list[float | None]", own_s: list[float], threads: int, cores: int, busy: bool
) -> None:
    assert watch(all_s, own_s, threads=threads, cores=cores).is_busy is busy
    assert watch(all_s, own_s, threads=threads, cores=cores).is_busy_now() is busy


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="this system has no /proc/stat")
def test_programs_that_use_all_processors_make_a_machine_busy() -> None:
    endless = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(endless) for _ in range(count_cores())]
    try:
        machine = BusyWatch(threads=count_cores())
        machine.wait_to_tell()
        time.sleep(0.5)  # they begin
        assert machine.is_busy
        assert machine.is_busy_now()
    finally:
        for one in others:
            one.kill()
            one.wait()


def test_a_busy_stretch_ends_with_the_other_work() -> None:
    machine = watch([0.0, 2.0, 3.0], [0.0, 1.0, 2.0], threads=2)
    assert [machine.is_busy_now(), machine.is_busy_now()] == [True, False]


def test_costs_of_a_busy_moment_do_not_replace_calm_ones(tmp_path: Path) -> None:
    busy = replace(ROW, seconds=900.0, moment=BUSY, date=LATER)
    assert put_and_get(tmp_path / "a", ROW, busy).seconds == 2.0
    assert put_and_get(tmp_path / "b", busy, ROW).seconds == 2.0, "a calm one does, however old"
    unknown = replace(ROW, seconds=3.0, moment=UNKNOWN, date=EARLIER)
    assert put_and_get(tmp_path / "c", busy, unknown, busy).seconds == 3.0
    assert put_and_get(tmp_path / "d", unknown, replace(ROW, date=EARLIER)).moment == CALM


def test_of_two_busy_measurements_the_quicker_stays(tmp_path: Path) -> None:
    slow, quick = (replace(ROW, seconds=s, moment=BUSY) for s in (800.0, 4.0))
    assert put_and_get(tmp_path / "a", slow, quick).seconds == 4.0
    assert put_and_get(tmp_path / "b", quick, slow).seconds == 4.0


def test_turns_of_one_op_give_the_quickest_and_how_far_they_lie_apart() -> None:
    both = merge_rows(ROW, replace(ROW, seconds=3.0, count=3))
    assert (both.seconds, both.spread, both.count) == (2.0, 0.25, 12)
    assert merge_rows(replace(ROW, seconds=1.0, moment=BUSY), ROW).seconds == 2.0
    assert merge_rows(ROW, replace(ROW, seconds=1.0, moment=BUSY)).seconds == 2.0
    assert merge_rows(ROW, replace(ROW, seconds=None)) is ROW


def make_old_database(path: Path) -> None:
    """As version 1 was."""
    old = sqlite3.connect(path)
    old.execute(
        "CREATE TABLE cost (signature TEXT NOT NULL, device TEXT NOT NULL, torch TEXT NOT NULL,"
        " date TEXT NOT NULL, seconds REAL, spread REAL NOT NULL, count INTEGER NOT NULL,"
        " issue_s REAL NOT NULL, reason TEXT NOT NULL, PRIMARY KEY (signature, device, torch)) WITHOUT ROWID"
    )
    row = ("aten.relu.default float32[8]", "chip", "2.9", "2026-01-01T00:00:00Z", 2.0, 0.1, 9, 0.0, "")
    old.execute("INSERT INTO cost VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
    old.execute(f"PRAGMA application_id = {0x4C4D4353}")
    old.execute("PRAGMA user_version = 1")
    old.commit()
    old.close()


def test_an_old_database_loads_and_its_rows_say_nothing_of_their_moment(tmp_path: Path) -> None:
    make_old_database(tmp_path / "costs.sqlite")
    told: list[str] = []
    with open_database(tmp_path / "costs.sqlite", tell=told.append) as database:
        assert database.rows() == [replace(ROW, moment=UNKNOWN)]
        database.put([replace(ROW, seconds=1.0, date=EARLIER)])
        assert database.rows()[0].seconds == 1.0
    assert told == []


def test_many_processes_may_open_an_old_database_at_once(tmp_path: Path) -> None:
    make_old_database(tmp_path / "costs.sqlite")
    told: list[str] = []

    def write(number: int) -> None:
        with open_database(tmp_path / "costs.sqlite", tell=told.append, needed=True) as database:
            database.put([replace(ROW, signature=f"op {number}")])

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with open_database(tmp_path / "costs.sqlite") as database:
        assert database.count() == 9
    assert told == []


def test_a_document_of_an_older_version_says_nothing_of_its_moment(tmp_path: Path) -> None:
    database: CostDatabase
    with open_database(tmp_path / "a") as database:
        database.put([replace(ROW, moment=BUSY)])
        export_costs(database, tmp_path / "costs.json")
    text = (tmp_path / "costs.json").read_text()
    assert '"moment": "busy"' in text
    assert COLUMNS[-1] == "moment"
    old = text.replace('"schema": 2', '"schema": 1').replace(',\n   "moment": "busy"', "")
    assert old != text
    assert "moment" not in old
    (tmp_path / "old.json").write_text(old)
    for name, moment in (("costs.json", BUSY), ("old.json", UNKNOWN)):
        with open_database(tmp_path / f"of {name}") as database:
            import_costs(database, tmp_path / name)
            assert database.rows()[0].moment == moment


def test_the_error_bar_grows_with_spread_busy_moments_and_a_missing_whole_step() -> None:
    spread = np.array([0.0, 0.3, 0.0, 0.0])
    found = op_errors(spread, [CALM, CALM, BUSY, UNKNOWN], 0.0).tolist()
    assert found == [MEASURED_ERROR, 0.3, BUSY_ERROR, UNKNOWN_ERROR]
    (anchored,) = op_errors(np.array([0.3]), [CALM], 0.4)
    assert anchored == pytest.approx(0.5)
    (loose,) = op_errors(np.array([0.0]), [CALM], None)
    assert loose == pytest.approx(math.hypot(MEASURED_ERROR, NO_ANCHOR_ERROR))


def test_a_step_that_the_host_issues_slowly_has_a_wide_error_bar() -> None:
    problem = lm.problem("gen:chain:4", "H200")
    num = problem.graph.num_ops
    plan = plan_of(np.zeros(num, dtype=np.int32), np.arange(num, dtype=np.int32))
    for issue_s, wanted in ((1e-9, 0.1), (1.0, ISSUE_ERROR)):
        costs = replace(
            problem.costs,
            issue_s=np.full(num, issue_s),
            rel_error=np.full(num, 0.1),
            origin=np.full(num, Origin.MEASURED, dtype=np.int8),
        )
        assert step_error(replace(problem, costs=costs), plan) == pytest.approx(wanted)


def test_an_error_bar_is_printed_beside_the_seconds() -> None:
    assert format_error(1.34, 0.12) == "1.34 s (±12 %)"
    assert format_error(1.34, None) == "1.34 s"


def make_keys() -> Keys:
    of_op = np.array([0, 0, 1], dtype=np.int32)
    return Keys(("a", "b"), of_op, np.array([0, 2], dtype=np.int32), np.array([2, 1], dtype=np.int64))


def test_the_sum_of_ops_is_anchored_to_a_whole_step() -> None:
    seconds, keys = np.array([1.0, 1.0, 2.0]), make_keys()
    whole = {
        name: replace(ROW, signature=name, seconds=s) for name, s in zip(WHOLE_STEP, (6.0, 5.0), strict=True)
    }
    assert find_anchor(seconds, keys, {}) == (1.0, None)
    assert find_anchor(seconds, keys, whole) == (6.0 / 5.0, 0.1)
    own = {step_key(keys): replace(ROW, seconds=8.0, spread=0.02)}
    assert find_anchor(seconds, keys, whole | own) == (2.0, 0.02), "its own step counts"


def test_a_whole_step_of_a_busy_moment_anchors_nothing() -> None:
    seconds, keys = np.array([1.0, 1.0, 2.0]), make_keys()
    rows = {name: replace(ROW, seconds=s) for name, s in zip(WHOLE_STEP, (6.0, 5.0), strict=True)}
    rows[WHOLE_STEP[0]] = replace(rows[WHOLE_STEP[0]], moment=BUSY)
    rows[step_key(keys)] = replace(ROW, seconds=80.0, moment=BUSY)
    assert find_anchor(seconds, keys, rows) == (1.0, None)
    absurd = {name: replace(ROW, seconds=s) for name, s in zip(WHOLE_STEP, (50.0, 5.0), strict=True)}
    assert find_anchor(seconds, keys, absurd) == (1.0, None)


def test_transfers_between_parts_of_a_cpu_take_the_time_of_measured_copies() -> None:
    rows = {key: replace(ROW, seconds=s) for key, s in zip(COPIES, (1.0, 3.0, 70.0), strict=True)}
    sizes = np.array([0, 2**12, (2**12 + 2**18) // 2, 2**18, 2**24, 2**26])
    found = copy_seconds(sizes, rows)
    assert found is not None
    assert found.tolist() == pytest.approx([1.0, 1.0, 2.0, 3.0, 70.0, 280.0])
    assert copy_seconds(sizes, {}) is None


@pytest.mark.parametrize("mixed", [False, True])
def test_a_pass_is_issued_as_long_as_the_reference_says_for_its_ops(mixed: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    graph = lm.capture(model, (torch.zeros(3, 8),))
    own_s = np.where(graph.phase == Phase.PARAM, 0.0, 1e-5)
    factors = {"forward": 2.0, "backward": 1.5, "update": 0.5, "mixed forward": 3.0, "mixed backward": 0.8}
    known = {ISSUE_CALL: CostRow(ISSUE_CALL, "chip", "torch", "date", 1e-4)}
    for name, factor in factors.items():
        whole, by_ops = issue_keys(name)
        known[whole] = CostRow(whole, "chip", "torch", "date", factor * 7e-3)
        known[by_ops] = CostRow(by_ops, "chip", "torch", "date", 7e-3)
    found = scale_issues(graph, own_s, known, mixed)
    before = "mixed " * mixed
    for phase, name in ((Phase.FORWARD, f"{before}forward"), (Phase.BACKWARD, f"{before}backward")):
        ops = graph.phase == phase
        assert found[ops].sum() == pytest.approx(factors[name] * own_s[ops].sum())
    updates = graph.phase == Phase.UPDATE
    assert found[updates].sum() == pytest.approx(0.5 * own_s[updates].sum() + 1e-4)
    assert (scale_issues(graph, own_s, {}, mixed) == own_s).all()  # nothing measured: as each op alone


def test_passes_of_the_reference_are_timed_beside_its_ops() -> None:
    graphs = capture_issue_references(depth=2)
    rows = {
        key: CostRow(key, "chip", "torch", "date", 1e-6, issue_s=1e-6)
        for graph in graphs
        for key in collect_keys(graph).text
    }
    found = {row.signature: row for row in measure_issue(graphs, rows, "cpu", "chip", BusyWatch(), depth=2)}
    assert set(found) == set(ISSUES)
    assert all(row.seconds and row.seconds > 0 for row in found.values())
    forward = int(((graphs[0].phase == Phase.FORWARD) & collect_keys(graphs[0]).measurable).sum())
    assert found["issue forward by ops"].seconds == pytest.approx(1e-6 * forward)
    del rows[collect_keys(graphs[0]).text[0]]
    left = {row.signature for row in measure_issue(graphs, rows, "cpu", "chip", BusyWatch(), depth=2)}
    assert not left & set(issue_keys("forward"))
