"""Look: a placement's plan, or a measured run of it, reviewed: the front door of this room's first half."""

from dataclasses import replace

import numpy as np

from loadmaster.core.answers.review import CriticalPart, LinkLoad, ModuleUse, Review
from loadmaster.core.arrays import Floats
from loadmaster.core.check import why_not_runnable
from loadmaster.core.errors import PlanError
from loadmaster.core.graph import Graph, Phase
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Plan, in_graph_order
from loadmaster.core.problem import Links, Objective, Problem
from loadmaster.core.timeline import SpanKind, Timeline
from loadmaster.core.units import format_bytes, format_percent, format_seconds
from loadmaster.review.critical_path import critical_spans, describe_path
from loadmaster.review.memory_curves import memory_curves
from loadmaster.review.spans import index_spans, seconds_of
from loadmaster.review.steps import has_steps, on_flat_graph, op_seconds, samples_of, settled_bytes
from loadmaster.review.waiting import list_waits
from loadmaster.simulator.events.engine import prepare
from loadmaster.simulator.pipelines.lowering import lower
from loadmaster.simulator.pipelines.unrolled import simulate_step

_NEARLY_FULL = 0.9


def shown_plan(placement: Placement) -> Plan:
    """The plan, or the one that came nearest where none fits."""
    plan = placement.plan or placement.least_overflow_plan
    if plan is None:
        raise PlanError(
            f"the file holds no plan at all ({placement.status.value}), so there is nothing to draw"
        )
    return plan


def review_plan(placement: Placement) -> Review:
    """Simulate a placement's plan and say what is to be said of it."""
    problem, plan = placement.problem, shown_plan(placement)
    if has_steps(problem, plan):
        return _review_step(placement, plan)
    simulator = prepare(problem)
    timeline = simulator.timeline(plan)
    found = _review_spans(problem, plan, timeline)
    curves = memory_curves(simulator, plan)
    return replace(
        found,
        memory=curves,
        limit=_describe_limit(placement, found.critical, timeline),
        notes=(*_list_notes(problem, plan), *[f"The plan {text}." for text in put_off(placement)]),
    )


def _review_step(placement: Placement, plan: Plan) -> Review:
    """The same of a step of micro-batches: its spans are passes of whole stages."""
    problem = placement.problem
    timeline, flat = simulate_step(problem, plan)
    settled = settled_bytes(problem, plan, flat)
    found = _review_spans(flat.problem, flat.plan, timeline)
    return replace(
        found,
        graph=flat.problem.graph,
        memory=memory_curves(prepare(flat.problem), flat.plan, settled),
        modules=module_uses(problem, plan, op_seconds(problem, plan)),
        limit=_describe_limit(placement, found.critical, timeline),
        samples=samples_of(problem, plan),
        notes=tuple(_list_notes(problem, plan)),
    )


def review_measured(problem: Problem, plan: Plan, timeline: Timeline) -> Review:
    """What a measured timeline of a plan says; memory over time is not known of it."""
    _require_match(problem, timeline)
    if not has_steps(problem, plan):
        return _review_spans(problem, plan, timeline)
    flat = lower(problem, plan)
    found = _review_spans(flat.problem, flat.plan, on_flat_graph(problem, plan, flat, timeline))
    return replace(found, graph=flat.problem.graph, modules=())


def put_off(placement: Placement) -> list[str]:
    """What to know of a captured step whose plan runs ops in another order than torch does."""
    problem, plan = placement.problem, placement.plan
    if plan is None or problem.objective != Objective.STEP or problem.graph.capture in ("", "generated"):
        return []
    if not why_not_runnable(problem, plan):
        return []
    own = in_graph_order(plan)
    timeline = simulate_step(problem, own)[0] if has_steps(problem, own) else prepare(problem).timeline(own)
    slower = format_seconds(timeline.step_s)
    if placement.score_s is not None and slower == format_seconds(placement.score_s):
        return []
    return [f"delays some gradients, and torch does not: in training this step takes {slower}"]


def _review_spans(problem: Problem, plan: Plan, timeline: Timeline) -> Review:
    index = index_spans(problem.graph, timeline)
    path = critical_spans(problem, timeline, index)
    return Review(
        timeline=timeline,
        memory=(),
        waits=list_waits(problem, timeline, index),
        critical=describe_path(problem, timeline, path),
        critical_ops=tuple(path),
        links=link_loads(problem, timeline),
        modules=module_uses(problem, plan, _seconds_on_devices(problem, timeline)),
        limit="",
        samples=samples_of(problem, plan),
    )


def _require_match(problem: Problem, timeline: Timeline) -> None:
    if timeline.device_name != problem.cluster.device_name:
        raise PlanError(
            f"the timeline is of {', '.join(timeline.device_name)}, the plan of"
            f" {', '.join(problem.cluster.device_name)}; give the timeline of this plan"
        )
    for kind, most, word in (
        (True, problem.graph.num_ops, "ops"),
        (False, problem.graph.num_tensors, "tensors"),
    ):
        items = timeline.item[(timeline.kind == SpanKind.COMPUTE) == kind]
        if len(items) and (items.max() >= most or items.min() < 0):
            raise PlanError(
                f"the timeline speaks of number {int(items.max())} of the graph's {word}, of which there are"
                f" {most}; give the timeline of this plan"
            )


def link_loads(problem: Problem, timeline: Timeline) -> tuple[LinkLoad, ...]:
    """Bytes and busy time of every link that is used, the busiest first."""
    cluster, num = problem.cluster, problem.cluster.num_devices
    moved = np.flatnonzero(timeline.kind == SpanKind.TRANSFER)
    moved = moved[timeline.resource[moved] // num != timeline.resource[moved] % num]
    source, target = timeline.resource[moved] // num, timeline.resource[moved] % num
    size, seconds = problem.graph.tensor_bytes[timeline.item[moved]], seconds_of(timeline)[moved]
    total, busy, count = (
        np.zeros(cluster.num_links, dtype=kind) for kind in (np.int64, np.float64, np.int64)
    )
    for hop in range(cluster.route.shape[2]):
        link = cluster.route[source, target, hop]
        there = link >= 0
        np.add.at(total, link[there], size[there])
        np.add.at(busy, link[there], seconds[there])
        np.add.at(count, link[there], 1)
    rows = [
        LinkLoad(cluster.link_name[at], int(total[at]), int(count[at]), float(busy[at]), float(rate))
        for at, rate in enumerate(cluster.link_bytes_per_s.tolist())
        if count[at] and (total[at] or busy[at])
    ]
    return tuple(sorted(rows, key=lambda row: -row.busy_s))


def _seconds_on_devices(problem: Problem, timeline: Timeline) -> Floats:
    """[N, D] how long each op ran on each device."""
    seconds = np.zeros((problem.graph.num_ops, problem.cluster.num_devices))
    compute = timeline.kind == SpanKind.COMPUTE
    np.add.at(seconds, (timeline.item[compute], timeline.resource[compute]), seconds_of(timeline)[compute])
    return seconds


def module_uses(problem: Problem, plan: Plan, seconds: Floats) -> tuple[ModuleUse, ...]:
    """The tree of modules in the order of a walk, from the whole model down; `seconds` is [N, D]."""
    graph, num = problem.graph, problem.cluster.num_devices
    made = np.bincount(graph.tensor_op, graph.tensor_bytes.astype(np.float64), minlength=graph.num_ops)
    made[graph.phase == Phase.PARAM] = 0.0  # a weight is counted as resident
    counts = np.zeros((graph.num_ops, num))
    counts[np.arange(graph.num_ops), plan.device] = 1
    own = np.concatenate(
        [seconds, counts, made[:, None], graph.resident_bytes[:, None].astype(float)], axis=1
    )
    paths, inverse = np.unique(np.array(graph.module, dtype=object).astype(str), return_inverse=True)
    sums = np.zeros((len(paths), own.shape[1]))
    np.add.at(sums, inverse, own)
    children: dict[str, dict[str, None]] = {"": {}}
    total: dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]] = {"": np.zeros(own.shape[1])}
    row_of = {path: at for at, path in enumerate(paths.tolist())}
    for path in _in_order_of_running(graph):
        row = sums[row_of[path]]
        words = path.split(".") if path else []
        total[""] += row
        for depth in range(len(words)):
            above, below = ".".join(words[:depth]), ".".join(words[: depth + 1])
            children.setdefault(above, {})[below] = None
            total[below] = total.get(below, 0.0) + row
    found: list[ModuleUse] = []
    stack = [("", 0)]
    while stack:
        path, depth = stack.pop()
        row, under = total[path], children.get(path, {})
        found.append(
            ModuleUse(
                path=path,
                depth=depth,
                num_ops=int(row[num : 2 * num].sum()),
                num_below=len(under),
                seconds=tuple(row[:num].tolist()),
                ops_on=tuple(int(n) for n in row[num : 2 * num]),
                output_bytes=int(row[2 * num]),
                resident_bytes=int(row[2 * num + 1]),
            )
        )
        stack += [(child, depth + 1) for child in reversed(under)]
    return tuple(found)


def _in_order_of_running(graph: Graph) -> list[str]:
    """Module paths by the first op that runs in each; weights, which stand first, do not count."""
    first: dict[str, int] = {}
    runs = np.flatnonzero(graph.phase != Phase.PARAM)
    for op in (*runs.tolist(), *np.flatnonzero(graph.phase == Phase.PARAM).tolist()):
        first.setdefault(graph.module[op], op)
    return list(first)


def _describe_limit(placement: Placement, critical: tuple[CriticalPart, ...], timeline: Timeline) -> str:
    """What the critical path is made of, and which device's memory is full."""
    if placement.problem.objective == Objective.THROUGHPUT:
        text = _describe_busiest(placement)
    else:
        shares: dict[tuple[str, str], float] = {}
        for part in critical:
            key = (part.kind, part.resource)
            shares[key] = shares.get(key, 0.0) + part.end_s - part.start_s
        if not shares:
            return "nothing takes any time"
        (kind, where), seconds = max(shares.items(), key=lambda pair: pair[1])
        words = {"compute": "computing on", "transfer": "transfers from", "wait": "waiting on"}
        share = format_percent(seconds / timeline.step_s) if timeline.step_s else "-"
        text = f"{words[kind]} {where}: {share} of the critical path ({format_seconds(seconds)})"
    cluster = placement.problem.cluster
    full = [
        f"{name} ({format_bytes(peak)} of {format_bytes(usable)})"
        for name, peak, usable in zip(
            cluster.device_name, placement.peak_bytes.tolist(), cluster.usable_bytes.tolist(), strict=True
        )
        if peak > _NEARLY_FULL * usable
    ]
    return f"{text}; memory is nearly full on {', '.join(full)}" if full and placement.fits else text


def _describe_busiest(placement: Placement) -> str:
    from loadmaster.simulator.events.throughput import steady_state

    problem = placement.problem
    loads = steady_state(problem, shown_plan(placement))
    at = int(loads.load_s.argmax())
    text = f"{problem.cluster.device_name[at]}, busy for {format_seconds(float(loads.load_s[at]))} a pass"
    if len(loads.link_s) and float(loads.link_s.max()) > float(loads.load_s[at]):
        link = int(loads.link_s.argmax())
        text = (
            f"link {problem.cluster.link_name[link]}, busy for"
            f" {format_seconds(float(loads.link_s[link]))} a pass"
        )
    return f"the busiest resource is {text}"


def _list_notes(problem: Problem, plan: Plan) -> list[str]:
    notes = []
    if problem.objective == Objective.THROUGHPUT:
        notes.append(
            "The plan is for throughput: the timeline shows one pass of the graph through all devices;"
            " while the"
            " pipeline runs, the next passes follow behind it."
        )
    if has_steps(problem, plan):
        notes.append(
            "The timeline shows the whole step: F3 is the forward pass of micro-batch 3 through a stage, B3"
            " its backward pass, I3 and W3 the two halves of one that is split."
        )
    elif plan.pipeline is not None:
        notes.append("Memory counts all micro-batches in flight; the timeline shows one of them.")
    if problem.links == Links.HOST:
        notes.append("Transfers go through host memory; link loads are not known under --links host.")
    return notes
