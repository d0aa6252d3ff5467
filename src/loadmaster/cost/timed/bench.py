"""Bench: fills the database with what a graph lacks on one local device. [torch]"""

import time
from collections.abc import Sequence

from loadmaster.cluster.probe import LocalDevice
from loadmaster.core.arrays import Floats
from loadmaster.core.graph import Graph
from loadmaster.core.run import ignore_progress
from loadmaster.cost.busy_machine import CALM, BusyWatch
from loadmaster.cost.database import CostDatabase, CostRow
from loadmaster.cost.keys import COPIES, GAPS, ISSUES, WHOLE_STEP, Keys, all_keys, collect_keys
from loadmaster.cost.timed.gaps import (
    capture_references,
    capture_trained_reference,
    measure_gaps,
    measure_whole_step,
)
from loadmaster.cost.timed.issue_reference import capture_issue_references, measure_issue
from loadmaster.cost.timed.stopwatch import (
    DeviceLost,
    Job,
    Say,
    measure_jobs,
    preserve_state,
    torch_version,
    watch_machine,
)

_SAVE_EVERY = 20  # rows: an interrupt loses no more
_GAPS_BUDGET_S = 5.0
_GAPS_SHARE = 0.25  # of the budget, at most
_LEAST_FOR_GAPS_S = 1.0
_STEP_BUDGET_S = 6.0
_STEP_SHARE = 0.4
_LEAST_FOR_STEP_S = 5.0  # of the budget: with less, the ops of the graph itself come first


def measure_missing(
    graph: Graph,
    keys: Keys,
    plain_s: Floats,
    here: LocalDevice,
    database: CostDatabase,
    *,
    budget_s: float,
    say: Say,
) -> tuple[dict[str, CostRow], int, float]:
    """Rows of the keys that are known or can be measured in time, how many are new, and the seconds spent."""
    began = time.perf_counter()
    wanted = all_keys(keys)
    known = database.get(wanted, here.chip, torch_version())
    if budget_s <= 0:
        return known, 0, 0.0
    watch = watch_machine(here.torch_name)
    sure = known
    if may_renew(known, watch):
        sure = {key: row for key, row in known.items() if row.moment == CALM}
    jobs = list_jobs(graph, keys, plain_s, sure)
    extra_s = _extra_seconds(here, sure, budget_s)
    if not jobs and not sum(extra_s):
        return known, 0, 0.0
    watch.wait_to_tell()  # or the first ops, which matter most, pass for calm
    new = _measure_and_save(jobs, here, database, budget_s - sum(extra_s), say, watch)
    with preserve_state(here.torch_name):  # models of their own are made for them, with random weights
        if extra_s[0]:
            measure = _measure_gaps if here.on_host else _measure_issue
            measure(here, database, extra_s[0], say, watch)
        if extra_s[1]:
            _measure_whole_step(here, database, extra_s[1], say, watch)
    usable = sum(row.seconds is not None for row in new.values())
    return database.get(wanted, here.chip, torch_version()), usable, time.perf_counter() - began


def _extra_seconds(here: LocalDevice, sure: dict[str, CostRow], budget_s: float) -> tuple[float, float]:
    """How long to measure gaps and a whole step, 0 where they are known or there is no time for them."""
    between = [*GAPS, *COPIES] if here.on_host else ISSUES
    gaps = budget_s >= _LEAST_FOR_GAPS_S and any(key not in sure for key in between)
    gaps_s = min(_GAPS_BUDGET_S, _GAPS_SHARE * budget_s) if gaps else 0.0
    whole = here.on_host and budget_s >= _LEAST_FOR_STEP_S and any(key not in sure for key in WHOLE_STEP)
    return gaps_s, min(_STEP_BUDGET_S, _STEP_SHARE * budget_s) if whole else 0.0


def may_renew(known: dict[str, CostRow], watch: BusyWatch) -> bool:
    """Whether rows of busy or unknown moments can be measured again: some are, and the machine is calm."""
    if all(row.moment == CALM for row in known.values()):
        return False
    watch.wait_to_tell()
    return not watch.is_busy_now()


def list_jobs(graph: Graph, keys: Keys, plain_s: Floats, known: dict[str, CostRow]) -> list[Job]:
    """What is still to be measured."""
    rows = zip(keys.text, keys.count.tolist(), keys.first.tolist(), strict=True)
    return [
        Job(text, count, float(plain_s[op]), int(graph.bytes_moved[op]))
        for text, count, op in rows
        if text not in known
    ]


def _measure_and_save(
    jobs: list[Job], here: LocalDevice, database: CostDatabase, budget_s: float, say: Say, watch: BusyWatch
) -> dict[str, CostRow]:
    """Measured and saved, a few at a time."""
    found: dict[str, CostRow] = {}
    unsaved: list[CostRow] = []
    try:
        for row in measure_jobs(jobs, here.torch_name, here.chip, budget_s=budget_s, say=say, watch=watch):
            found[row.signature] = row
            unsaved.append(row)
            if len(unsaved) >= _SAVE_EVERY:
                database.put(unsaved)
                unsaved = []
    except DeviceLost as problem:
        say(str(problem), 1.0)
    finally:
        database.put(unsaved)
    return found


def _measure_gaps(
    here: LocalDevice, database: CostDatabase, budget_s: float, say: Say, watch: BusyWatch
) -> None:
    """The gaps between ops, from a small model whose ops are measured for it."""
    graphs = capture_references()
    known = _measure_reference_ops(graphs, here, database, budget_s, watch)
    say(f"measuring what lies between ops on {here.chip}", 0.0)
    database.put(measure_gaps(graphs, known, here.torch_name, here.chip, watch))


def _measure_issue(
    here: LocalDevice, database: CostDatabase, budget_s: float, say: Say, watch: BusyWatch
) -> None:
    """What the host takes to issue whole passes to a GPU, beside the ops of those passes."""
    graphs = capture_issue_references()
    known = _measure_reference_ops(graphs, here, database, budget_s, watch)
    say(f"measuring how fast steps are issued to {here.chip}", 0.0)
    database.put(measure_issue(graphs, known, here.torch_name, here.chip, watch))


def _measure_whole_step(
    here: LocalDevice, database: CostDatabase, budget_s: float, say: Say, watch: BusyWatch
) -> None:
    """A step of a reference as a whole, and by its ops."""
    say(f"measuring a whole step on {here.chip}", 0.0)
    graph = capture_trained_reference()
    known = _measure_reference_ops([graph], here, database, budget_s, watch)
    known |= database.get(GAPS, here.chip, torch_version())
    database.put(measure_whole_step(graph, known, here.chip, watch))


def _measure_reference_ops(
    graphs: Sequence[Graph], here: LocalDevice, database: CostDatabase, budget_s: float, watch: BusyWatch
) -> dict[str, CostRow]:
    work: dict[str, int] = {}  # key -> bytes that it moves
    for graph in graphs:
        keys = collect_keys(graph)
        work |= dict(zip(keys.text, graph.bytes_moved[keys.first].tolist(), strict=True))
    known = database.get(work, here.chip, torch_version())
    jobs = [
        Job(text, 1, 1e-6, num_bytes)
        for text, num_bytes in work.items()
        if text not in known or known[text].moment != CALM
    ]
    return known | _measure_and_save(jobs, here, database, budget_s, ignore_progress, watch)
