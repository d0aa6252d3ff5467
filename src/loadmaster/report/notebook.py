"""What Jupyter shows of a plan, a timeline and a placement: a small table, and the one drawing of a Gantt."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from loadmaster.core.cluster import Cluster
from loadmaster.core.graph import Graph
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Plan
from loadmaster.core.problem import Problem
from loadmaster.core.reasons import why_none_fits
from loadmaster.core.timeline import SpanKind, Timeline
from loadmaster.core.units import format_bytes, format_percent, format_seconds
from loadmaster.graph.build import GraphBuilder
from loadmaster.report import tables
from loadmaster.report.gantt import CLASSES, draw_gantt, render_svg
from loadmaster.report.plain_text import escape_for_xml

_TABLE = '<table style="font-variant-numeric:tabular-nums;text-align:left">'


def render_html(noun: Placement | Plan | Timeline) -> str:
    """A table, and where times are known the picture."""
    if isinstance(noun, Placement):
        return _render_placement(noun)
    if isinstance(noun, Timeline):
        return f"{_timeline_table(noun)}{render_picture(noun)}"
    return _render_plan(noun)


def render_picture(noun: Placement | Timeline | Plan, of: Graph | Problem | None = None) -> str:
    """The Gantt as SVG, with its own colours for light and dark."""
    if isinstance(noun, Timeline):
        graph = of.graph if isinstance(of, Problem) else of
        if graph is not None:
            return _draw(graph, noun)
        return _draw(_nameless_graph(noun), noun, words=("compute", *CLASSES[1:]))  # phases are the graph's
    if isinstance(noun, Plan):
        assert isinstance(of, Problem), "a plan is drawn on its problem"
        return _draw(*_simulate(of, noun), of.cluster)
    plan = noun.plan or noun.least_overflow_plan
    assert plan is not None, "a placement without any plan has no picture"
    return _draw(*_simulate(noun.problem, plan), noun.problem.cluster)


def _simulate(problem: Problem, plan: Plan) -> tuple[Graph, Timeline]:
    """The timeline, and the graph that it speaks of."""
    from loadmaster.simulator.events.engine import simulate
    from loadmaster.simulator.pipelines.unrolled import simulate_step

    if problem.is_stepped and plan.pipeline is not None:
        timeline, flat = simulate_step(problem, plan)
        return flat.problem.graph, timeline
    return problem.graph, simulate(problem, plan)


def _draw(
    graph: Graph, timeline: Timeline, cluster: Cluster | None = None, words: Sequence[str] = CLASSES
) -> str:
    """The picture; where the cluster is known, with the memory of its devices."""
    title = f"{graph.name}: {format_seconds(timeline.step_s)}, {timeline.origin.value}"
    gantt = draw_gantt(graph, {timeline.origin.value: timeline})
    if cluster is None:
        return render_svg(gantt, title=title, standalone=True, words=words)
    kinds = [cluster.kind_name[kind] for kind in cluster.kind.tolist()]
    shown = {name: f"{name} {kind}" for name, kind in zip(cluster.device_name, kinds, strict=True)}
    lanes = tuple(replace(lane, title=shown.get(lane.title, lane.title)) for lane in gantt.lanes)
    room = (cluster.memory_bytes - cluster.reserve_bytes).tolist()
    pairs = zip(timeline.peak_bytes.tolist(), room, strict=True)
    memory = dict(zip((shown[name] for name in timeline.device_name), pairs, strict=True))
    return render_svg(replace(gantt, lanes=lanes), title=title, standalone=True, memory=memory)


def _nameless_graph(timeline: Timeline) -> Graph:
    """As many ops and tensors as the spans speak of."""
    compute = timeline.kind == SpanKind.COMPUTE
    builder = GraphBuilder("timeline")
    for op in range(int(timeline.item[compute].max(initial=0)) + 1):
        builder.op(f"op {op}")
    for _ in range(int(timeline.item[~compute].max(initial=-1)) + 1):
        builder.tensor(0, 0)
    return builder.build()


def _render_placement(placement: Placement) -> str:
    problem = placement.problem
    word = tables.time_word(problem)
    rows = [("status", tables.status_text(placement)), ("algorithm", placement.algorithm)]
    if placement.score_s is not None:
        rows.append((word, format_seconds(placement.score_s)))
    rows.append(("lower bound", tables.bound_text(placement)))
    if placement.gap is not None:
        rows.append(("gap", f"at most {format_percent(placement.gap)}"))
    rows += [("why", line) for line in ([] if placement.fits else why_none_fits(placement))]
    title = f"<b>{escape_for_xml(problem.graph.name)} on {escape_for_xml(problem.cluster.name)}</b>"
    devices = [
        (name, f"{format_bytes(peak)} of {tables.memory_text(usable)}")
        for name, peak, usable in zip(
            problem.cluster.device_name,
            placement.peak_bytes.tolist(),
            problem.cluster.usable_bytes.tolist(),
            strict=True,
        )
    ]
    has_plan = placement.plan is not None or placement.least_overflow_plan is not None
    picture = render_picture(placement) if has_plan else ""
    return f"<div>{title}{_table(rows)}{_table(devices)}{picture}</div>"


def _timeline_table(timeline: Timeline) -> str:
    rows = [(timeline.origin.value, format_seconds(timeline.step_s)), ("spans", f"{len(timeline.kind):,}")]
    for name, busy, peak in zip(
        timeline.device_name, timeline.busy_s.tolist(), timeline.peak_bytes.tolist(), strict=True
    ):
        share = format_percent(busy / timeline.step_s) if timeline.step_s else "-"
        rows.append((name, f"busy {share}, peak {format_bytes(peak)}"))
    return _table(rows)


def _render_plan(plan: Plan) -> str:
    counts = np.bincount(plan.device).tolist()
    rows = [("ops", f"{len(plan.device):,}")]
    rows += [(f"on device {device}", f"{count:,}") for device, count in enumerate(counts) if count]
    if plan.recompute.any():
        rows.append(("recomputed", f"{int(plan.recompute.sum()):,}"))
    if plan.pipeline is not None:
        stages = len(plan.pipeline.replicas)
        rows.append(
            ("pipeline", f"{stages} stages, {plan.pipeline.schedule}:{plan.pipeline.num_microbatches}")
        )
    return f"{_table(rows)}<small>plan.plot(problem) draws it</small>"


def _table(rows: list[tuple[str, str]]) -> str:
    cells = "".join(
        f"<tr><td>{escape_for_xml(name)}</td><td>{escape_for_xml(text)}</td></tr>" for name, text in rows
    )
    return f"{_TABLE}{cells}</table>"
