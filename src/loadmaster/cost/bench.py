"""Bench: fills the database with what a graph lacks on one local device. [torch]"""

import time

from loadmaster.cluster.probe import LocalDevice
from loadmaster.core.arrays import Floats
from loadmaster.core.graph import Graph
from loadmaster.core.run import ignore_progress
from loadmaster.cost.database import CostDatabase, CostRow
from loadmaster.cost.gaps import capture_references, measure_gaps
from loadmaster.cost.keys import GAPS, Keys, collect_keys
from loadmaster.cost.stopwatch import DeviceLost, Job, Say, measure_jobs, torch_version

_SAVE_EVERY = 20  # rows: an interrupt loses no more
_GAPS_BUDGET_S = 5.0
_GAPS_SHARE = 0.25  # of the budget, at most


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
    known = database.get([*keys.text, *GAPS], here.chip, torch_version())
    jobs = list_jobs(graph, keys, plain_s, known)
    if not jobs or budget_s <= 0:
        return known, 0, 0.0
    gaps_s = 0.0 if all(key in known for key in GAPS) else min(_GAPS_BUDGET_S, _GAPS_SHARE * budget_s)
    new = _measure_and_save(jobs, here, database, budget_s - gaps_s, say)
    if gaps_s:
        known |= _measure_gaps(here, database, gaps_s, say)
    usable = sum(row.seconds is not None for row in new.values())
    return known | new, usable, time.perf_counter() - began


def list_jobs(graph: Graph, keys: Keys, plain_s: Floats, known: dict[str, CostRow]) -> list[Job]:
    """What is still to be measured."""
    rows = zip(keys.text, keys.count.tolist(), keys.first.tolist(), strict=True)
    return [
        Job(text, count, float(plain_s[op]), int(graph.bytes_moved[op]))
        for text, count, op in rows
        if text not in known
    ]


def _measure_and_save(
    jobs: list[Job], here: LocalDevice, database: CostDatabase, budget_s: float, say: Say
) -> dict[str, CostRow]:
    """Measured and saved, a few at a time."""
    found: dict[str, CostRow] = {}
    unsaved: list[CostRow] = []
    try:
        for row in measure_jobs(jobs, here.torch_name, here.chip, budget_s=budget_s, say=say):
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


def _measure_gaps(here: LocalDevice, database: CostDatabase, budget_s: float, say: Say) -> dict[str, CostRow]:
    """The gaps between ops, from a small model, whose ops are measured for it."""
    graphs = capture_references()
    texts = dict.fromkeys(text for graph in graphs for text in collect_keys(graph).text)
    known = database.get(list(texts), here.chip, torch_version())
    jobs = [Job(text, 1, 1e-6, 0) for text in texts if text not in known]
    known |= _measure_and_save(jobs, here, database, budget_s, ignore_progress)
    say(f"measuring what lies between ops on {here.chip}", 0.0)
    rows = measure_gaps(graphs, known, here.torch_name, here.chip)
    database.put(rows)
    return {row.signature: row for row in rows}
