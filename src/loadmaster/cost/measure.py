"""Measure: Costs from measurements on this machine's own devices, and from the database of earlier ones.

Every distinct piece of work of a graph (`keys`) is timed once per device kind that this machine has, the
largest share of the step first, within a budget of seconds; what the database knows is not timed again. What
was not measured, and cannot be, has the time of a roofline *fitted* to what was (`fit`). Kinds of other
machines have the rows that were measured there and imported, if any. Needs the extra `[torch]` only where
something is to be timed.

An op's origin is MEASURED where its time was measured on every kind that can run it on its own. On the host
an op also has its share of what Python and autograd take between ops (`gaps`); on a GPU `issue_s` is
scaled to what whole passes take (`issue`).
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadmaster.cluster.probe import LocalDevice, is_chip, local_devices
from loadmaster.core.arrays import Bools, Floats
from loadmaster.core.cluster import Cluster
from loadmaster.core.errors import CostError
from loadmaster.core.graph import Graph, Phase
from loadmaster.core.plan import Plan
from loadmaster.core.problem import Costs, Origin, Problem
from loadmaster.core.question import MEASURE_S
from loadmaster.core.run import ignore_progress
from loadmaster.cost.busy_machine import BUSY, CALM
from loadmaster.cost.database import CostDatabase, CostRow
from loadmaster.cost.error_bar import op_errors
from loadmaster.cost.fit import RooflineFit, Samples, fit_roofline
from loadmaster.cost.issue import scale_issues
from loadmaster.cost.keys import GAPS, TENSORFLOW, Keys, all_keys, collect_keys
from loadmaster.cost.roofline import REL_ERROR, roofline_costs, takes_no_time
from loadmaster.cost.signature import AUTOCAST
from loadmaster.cost.timed.copies import copy_seconds, is_one_cpu
from loadmaster.cost.timed.whole_step import find_anchor

_PRESET_CPUS = ("cpu16", "cpu64")
Say = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class KindReport:
    """What is known of one device kind of the cluster."""

    kind: str
    chip: str  # whose measurements are used, '' = none
    num_keys: int  # distinct pieces of work
    num_known: int  # of which measured
    num_new: int  # of which in this run
    measured_share: float  # of the time of one step on this kind alone
    fitted: RooflineFit | None
    num_busy: int = 0  # of the known ones, measured while other work took the processors

    def __str__(self) -> str:
        """One line for people."""
        if not self.chip:
            return f"{self.kind}: nothing measured, times are the roofline's"
        share = f"{100 * self.measured_share:.1f} % of the step's time"
        text = f"{self.kind}: {self.num_known} of {self.num_keys} ops measured ({share}; {self.num_new} new)"
        if self.num_busy:
            text += (
                f"; {self.num_busy} while this machine was busy with other work, so times may be far off:"
                " they are measured again when it is idle"
            )
        return text


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Costs, and where they come from."""

    costs: Costs
    kinds: tuple[KindReport, ...]


def measure_costs(
    graph: Graph,
    cluster: Cluster,
    database: CostDatabase,
    *,
    budget_s: float = MEASURE_S,
    say: Say = ignore_progress,
) -> MeasuredCosts:
    """Costs of every op on every kind, measured as far as the budget reaches."""
    keys = collect_keys(graph)
    if not keys.text:
        raise CostError(
            f"graph {graph.name!r} has no op with a signature, so none can be measured; capture a PyTorch"
            " model, or leave measuring out"
        )
    local = match_chips(cluster, local_devices())
    plain = roofline_costs(graph, cluster)
    columns, reports = [], []
    left_s = budget_s
    for k, kind in enumerate(cluster.kind_name):
        here = local[k]
        known: dict[str, CostRow] = {}
        new, spent_s = 0, 0.0
        chip = here.chip if here is not None else _find_imported_chip(database, kind)
        if here is not None:
            share = left_s / sum(1 for other in local[k:] if other is not None)
            known, new, spent_s = _load_or_measure_rows(
                graph, keys, plain.compute_s[:, k], here, database, share, say
            )
        elif chip:
            known = database.get(all_keys(keys), chip, None)
        left_s = max(0.0, left_s - spent_s)
        column = _make_column(graph, cluster, k, keys, plain.compute_s[:, k], known)
        columns.append(column)
        copies_s = copy_seconds(graph.tensor_bytes, known) if is_one_cpu(cluster) else None
        if copies_s is not None:
            plain = dataclasses.replace(plain, transfer_s=copies_s)
        reports.append(_make_report(kind, chip if column.measured.any() else "", graph, keys, column, new))
    return MeasuredCosts(_join_columns(plain, cluster, columns), tuple(reports))


def measured_share(problem: Problem, plan: Plan) -> float:
    """The share of a plan's compute time that was measured."""
    seconds = problem.device_compute_s[np.arange(problem.graph.num_ops), plan.device]
    seconds = np.where(np.isfinite(seconds), seconds, 0.0)
    total = float(seconds.sum())
    return float(seconds[problem.costs.origin == Origin.MEASURED].sum()) / total if total > 0 else 0.0


def match_chips(cluster: Cluster, devices: tuple[LocalDevice, ...]) -> list[LocalDevice | None]:
    """[K] the local device that each kind of a cluster is, if any.

    A CPU preset means this machine's CPU where every other kind is on this machine too.
    """
    found: list[LocalDevice | None] = []
    for kind, on_host in zip(cluster.kind_name, cluster.on_host.tolist(), strict=True):
        same = (d for d in devices if d.on_host == on_host and is_chip(kind, d.chip))
        found.append(next(same, None))
    cpu = next((d for d in devices if d.on_host), None)
    strangers = [k for k, here in enumerate(found) if here is None]
    if all(cluster.on_host[k] and cluster.kind_name[k] in _PRESET_CPUS for k in strangers):
        return [cpu if here is None else here for here in found]
    return found


def _find_imported_chip(database: CostDatabase, kind: str) -> str:
    """The chip of another machine whose rows are a kind's."""
    return next((chip for chip in database.devices() if is_chip(kind, chip)), "")


def _load_or_measure_rows(
    graph: Graph,
    keys: Keys,
    plain_s: Floats,
    here: LocalDevice,
    database: CostDatabase,
    budget_s: float,
    say: Say,
) -> tuple[dict[str, CostRow], int, float]:
    """Rows of all keys that are known or can be measured in time, how many are new, and the seconds spent."""
    name, extra = (
        ("TensorFlow", "tensorflow") if keys.text[0].startswith(TENSORFLOW) else ("PyTorch", "torch")
    )
    try:
        bench = _import_bench(extra)
    except ImportError:
        known = database.get(all_keys(keys), here.chip, None)
        if not known:
            raise CostError(
                f"measuring needs {name}; install it with: pip install 'loadmaster[{extra}]'"
            ) from None
        return known, 0, 0.0
    measured: tuple[dict[str, CostRow], int, float] = bench.measure_missing(
        graph, keys, plain_s, here, database, budget_s=budget_s, say=say
    )
    return measured


def _import_bench(extra: str) -> Any:
    """What times the ops of a framework."""
    if extra == "tensorflow":
        from loadmaster.cost.timed import tensorflow_timing

        return tensorflow_timing
    from loadmaster.cost.timed import bench

    return bench


@dataclass(frozen=True, slots=True, eq=False)
class _Column:
    """One kind's costs."""

    compute_s: Floats  # [N]
    issue_s: Floats  # [N]
    measured: Bools  # [N]
    failed: Bools  # [N] tried, and cannot run on its own there
    rel_error: Floats  # [N]
    fitted: RooflineFit | None
    num_busy: int  # keys measured while the machine was busy


def _make_column(
    graph: Graph, cluster: Cluster, k: int, keys: Keys, plain_s: Floats, known: dict[str, CostRow]
) -> _Column:
    """Measured where there is a row, fitted where there is none."""
    num = len(keys.text)
    rows = [known.get(text) for text in keys.text]
    seconds = np.array([np.nan if row is None or row.seconds is None else row.seconds for row in rows])
    issue = np.array([np.nan if row is None or row.seconds is None else row.issue_s for row in rows])
    spread = np.array([0.0 if row is None else row.spread for row in rows])
    moment = [CALM if row is None else row.moment for row in rows]
    has = np.isfinite(seconds)
    failed = np.array([row is not None and row.seconds is None for row in rows])
    fitted = _fit_measured(graph, cluster, k, keys, seconds)
    idle, on_host = takes_no_time(graph), bool(cluster.on_host[k])
    compute_s, rel_error = plain_s.copy(), np.full(graph.num_ops, REL_ERROR)
    if fitted is not None:
        guessed = fitted.seconds(graph.flops, graph.bytes_moved.astype(np.float64), graph.dtype)
        compute_s, rel_error = np.where(idle, 0.0, guessed), np.full(graph.num_ops, fitted.rel_error)
    of = np.clip(keys.of_op, 0, num - 1)
    measured: Bools = keys.measurable & has[of]
    lost: Bools = keys.measurable & failed[of]
    use = measured & (on_host | ~idle)  # a view launches nothing on a GPU
    compute_s = np.where(use, seconds[of], np.where(measured, 0.0, compute_s))
    num_busy = sum(bool(has[at]) and moment[at] == BUSY for at in range(num))
    gap_s = np.where(keys.measurable & on_host, _gap_s(graph, known), 0.0)
    factor, anchor_spread = find_anchor(compute_s + gap_s, keys, known) if on_host else (1.0, 0.0)
    rel_error = np.where(measured, op_errors(spread, moment, anchor_spread)[of], rel_error)
    if on_host:
        compute_s = factor * (compute_s + gap_s)
        return _Column(compute_s, np.zeros(graph.num_ops), measured, lost, rel_error, fitted, num_busy)
    issue_s = np.where(measured, issue[of], _typical_issue_s(graph, measured, issue[of], idle))
    issue_s = np.where(keys.measurable, scale_issues(graph, issue_s, known, _is_mixed(graph)), 0.0)
    return _Column(compute_s, issue_s, measured, lost, rel_error, fitted, num_busy)


def _fit_measured(graph: Graph, cluster: Cluster, k: int, keys: Keys, seconds: Floats) -> RooflineFit | None:
    """The roofline through what was measured; updates and views follow rules of their own."""
    idle = takes_no_time(graph)[keys.first]
    usable = np.isfinite(seconds) & ~idle & (graph.phase[keys.first] != Phase.UPDATE)
    ops = keys.first[usable]
    samples = Samples(
        seconds[usable], graph.flops[ops], graph.bytes_moved[ops].astype(np.float64), graph.dtype[ops]
    )
    return fit_roofline(samples, cluster.flops_per_s[k], float(cluster.memory_bytes_per_s[k]))


def _is_mixed(graph: Graph) -> bool:
    """Whether ops decide what to cast."""
    return any(AUTOCAST in text for text in graph.signature_table)


def _gap_s(graph: Graph, known: dict[str, CostRow]) -> Floats:
    """[N] what Python and autograd add to each op, and calling the optimizer to its updates together."""
    forward, backward, call, mixed_forward, update, mixed_backward = (
        known[key].seconds if key in known else None for key in GAPS
    )
    if _is_mixed(graph):
        forward = forward if mixed_forward is None else mixed_forward
        backward = backward if mixed_backward is None else mixed_backward
    num_updates = max(1, int((graph.phase == Phase.UPDATE).sum()))
    added = {
        Phase.FORWARD: forward or 0.0,
        Phase.BACKWARD: backward or 0.0,
        Phase.UPDATE: (update or 0.0) + (call or 0.0) / num_updates,
    }
    return np.array([added.get(phase, 0.0) for phase in Phase])[graph.phase]


def _typical_issue_s(graph: Graph, measured: Bools, issue: Floats, idle: Bools) -> Floats:
    """[N] what ops that were not measured take to launch: as much as those like them that were."""
    usual = np.zeros(graph.num_ops)
    for alike in (idle, ~idle):
        seen = measured & alike
        usual[alike] = float(np.median(issue[seen])) if seen.any() else 0.0
    return usual


def _join_columns(plain: Costs, cluster: Cluster, columns: list[_Column]) -> Costs:
    """Side by side; launching takes as long as on the accelerator that takes longest to launch on."""
    compute_s = np.stack([column.compute_s for column in columns], axis=1)
    everywhere = np.all([column.measured | column.failed for column in columns], axis=0)
    everywhere &= np.any([column.measured for column in columns], axis=0)
    return dataclasses.replace(
        plain,
        compute_s=compute_s,
        issue_s=np.max([column.issue_s for column in columns], axis=0),
        origin=np.where(everywhere, Origin.MEASURED, Origin.ANALYTIC).astype(np.int8),
        rel_error=np.max([column.rel_error for column in columns], axis=0),
    )


def _make_report(kind: str, chip: str, graph: Graph, keys: Keys, column: _Column, new: int) -> KindReport:
    total = float(column.compute_s.sum())
    share = float(column.compute_s[column.measured].sum()) / total if total > 0 else 0.0
    known = len(np.unique(keys.of_op[column.measured]))
    return KindReport(kind, chip, len(keys.text), known, new, share, column.fitted, column.num_busy)
