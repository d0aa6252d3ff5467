"""Steps of micro-batches for people and files: stages, layers, bubbles, and the reason of each stage."""

import re
from typing import Any

import numpy as np
from rich.table import Table

from loadmaster.core.arrays import Floats, Ints
from loadmaster.core.graph import Graph, Phase
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Pipeline, Plan
from loadmaster.core.timeline import Timeline
from loadmaster.core.units import format_bytes, format_percent, format_seconds
from loadmaster.report.text_columns import columns, one_line
from loadmaster.simulator.pipelines.stage_facts import find_facts

_BLOCK = re.compile(r"((?:^|.*?\.)\D[^.]*)\.(\d+)(?=\.|$)")
_UNEVEN = 1.05  # shares of layers and of speed that differ by less are not worth a word


def stepped_plan(placement: Placement) -> tuple[Plan, Pipeline] | None:
    """The plan of a placement and its pipeline, where a whole step of micro-batches was asked for."""
    plan = placement.plan or placement.least_overflow_plan
    if plan is None or plan.pipeline is None or not placement.problem.is_stepped:
        return None
    return plan, plan.pipeline


def count_layers(graph: Graph, stage: Ints, num_stages: int) -> tuple[list[int], int]:
    """How many layers each stage has, and of how many: modules that are numbered alike, such as `h.0`.

    A layer is where most of its forward work is. Without numbered modules all are 0.
    """
    found: dict[tuple[str, int], Floats] = {}
    for op in np.flatnonzero(graph.phase == Phase.FORWARD).tolist():
        match = _BLOCK.match(graph.module[op])
        if match:
            work = found.setdefault((match[1], int(match[2])), np.zeros(num_stages))
            work[stage[op]] += graph.flops[op] + graph.bytes_moved[op] + 1.0
    counts = [0] * num_stages
    for work in found.values():
        counts[int(work.argmax())] += 1
    return counts, len(found)


def summary_text(placement: Placement, timeline: Timeline | None) -> str:
    """Schedule, micro-batches, replicas and bubble in a line."""
    found = stepped_plan(placement)
    assert found is not None
    plan, pipeline = found
    ranks = f"{pipeline.num_stages} stage{'s' * (pipeline.num_stages > 1)}"
    if pipeline.stages_per_rank > 1:
        ranks += f" on {pipeline.num_ranks} ranks"
    text = f"{pipeline.schedule}, {pipeline.num_microbatches} micro-batches through {ranks}"
    if pipeline.num_replicas > 1:
        shares = " + ".join(map(str, pipeline.microbatches))
        text += f", {pipeline.num_replicas} replicas ({shares} micro-batches)"
    if timeline is not None:
        text += f"; devices wait {format_percent(bubble_share(timeline, plan))} of the step"
    return text


def stages(placement: Placement, timeline: Timeline | None) -> Table:
    """Every stage: where it is, what it has, how long a micro-batch takes, and what it holds in flight."""
    names, rows = stage_cells(placement)
    numbers = names[2:-1]
    table = columns(*names, right=numbers, whole=("stage", *numbers))
    for row in rows:
        table.add_row(row[0], one_line(row[1]), *row[2:])
    return table


def stage_cells(placement: Placement) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows of the table of stages; all between the second and the last are numbers."""
    found = stepped_plan(placement)
    assert found is not None
    rows = _stage_rows(placement, *found)
    layered = any(row["layers"] for row in rows)
    numbers = (*(["layers"] if layered else []), "ops", "micro-batch", "in flight", "kept", "sends")
    cells = [
        (
            str(row["stage"]),
            " + ".join(row["devices"]),
            *([str(row["layers"])] if layered else []),
            str(row["ops"]),
            format_seconds(row["microbatch_s"]),
            str(row["in_flight"]),
            format_bytes(row["in_flight_bytes"]),
            format_bytes(row["sent_bytes"]),
            "yes" if row["recomputed"] else "no",
        )
        for row in rows
    ]
    return ("stage", "on", *numbers, "recomputed"), cells


def verdict_of(placement: Placement, timeline: Timeline) -> tuple[str, str]:
    """The schedule, and what it is made of, for the top of a page."""
    found = stepped_plan(placement)
    assert found is not None
    schedule, _, rest = summary_text(placement, timeline).partition(", ")
    return schedule, rest


def _stage_rows(placement: Placement, plan: Plan, pipeline: Pipeline) -> list[dict[str, Any]]:
    problem, num = placement.problem, pipeline.num_stages
    names = problem.cluster.device_name
    layers, _ = count_layers(problem.graph, pipeline.stage, num)
    facts = find_facts(problem, pipeline.stage, plan.recompute, num)
    devices = pipeline.devices_of(plan.device)
    again = set(np.unique(pipeline.stage[plan.recompute]).tolist())
    counts = np.bincount(pipeline.stage[problem.graph.phase == Phase.FORWARD], minlength=num)
    kind = problem.cluster.kind[devices[0]]
    seconds = (facts.forward_s + facts.backward_s)[np.arange(num), kind]
    return [
        {
            "stage": s,
            "rank": s % pipeline.num_ranks,
            "devices": [names[d] for d in devices[:, s].tolist()],
            "layers": layers[s],
            "ops": int(counts[s]),
            "microbatch_s": float(seconds[s]),
            "in_flight": int(pipeline.in_flight[s]),
            "in_flight_bytes": int(pipeline.in_flight[s] * facts.stash_bytes[s]),
            "resident_bytes": int(facts.resident_bytes[s]),
            "sent_bytes": int(facts.forward_bytes[s]),
            "recomputed": s in again,
        }
        for s in range(num)
    ]


def why(placement: Placement) -> list[str]:
    """Why stages are as unequal as they are, a line for each rank that is not like the others."""
    found = stepped_plan(placement)
    if found is None:
        return []
    plan, pipeline = found
    problem, num = placement.problem, pipeline.num_stages
    layers, total = count_layers(problem.graph, pipeline.stage, num)
    facts = find_facts(problem, pipeline.stage, plan.recompute, num)
    speed = _speeds(facts.forward_s + facts.backward_s)
    devices, ranks = pipeline.devices_of(plan.device)[0], pipeline.num_ranks
    if ranks == 1:
        replicas = [problem.cluster.device_name[row[0]] for row in pipeline.devices_of(plan.device)]
        where = " and again on ".join(replicas)
        return [f"one stage on {where}: more stages would wait for each other longer than they gain"]
    kinds = problem.cluster.kind[devices[:ranks]]
    even, fastest = 1.0 / ranks, float(speed[kinds].max())
    lines = []
    for rank in range(ranks):
        own = [s for s in range(num) if s % ranks == rank]
        got = sum(layers[s] for s in own)
        share = float(speed[kinds[rank]] / speed[kinds].sum())
        name = problem.cluster.device_name[devices[rank]]
        what = f"stage {own[0]}" if len(own) == 1 else f"stages {', '.join(map(str, own))}"
        if total and not 1 / _UNEVEN < share / even < _UNEVEN:
            ratio = float(speed[kinds[rank]]) / fastest
            pace = "the fastest" if ratio >= 1.0 else f"{ratio:.2f}x as fast as the fastest"
            lines.append(
                f"{what} on {name} ({problem.cluster.kind_name[kinds[rank]]}, {pace}):"
                f" {got} of {total} layers"
            )
        elif total and not 1 / 1.25 < max(got, 0.5) / (even * total) < 1.25:
            end = "the ends of the model weigh as much as layers, or memory is short"
            lines.append(f"{what} on {name}: {got} of {total} layers, though as fast as others: {end}")
    again = np.unique(pipeline.stage[plan.recompute]).tolist()
    lines += [
        f"stage {s} runs its forward pass again, so that {pipeline.in_flight[s]} micro-batches fit"
        for s in again
    ]
    return lines


def _speeds(seconds: Floats) -> Floats:
    """[K] steps a second of each kind, for the whole model."""
    whole = np.where(np.isfinite(seconds), seconds, 0.0).sum(axis=0)
    speeds: Floats = 1.0 / np.maximum(whole, 1e-300)
    return speeds


def pipeline_document(placement: Placement, timeline: Timeline | None) -> dict[str, Any]:
    """What `--json` prints of a step of micro-batches, beside what it prints of every pipeline."""
    found = stepped_plan(placement)
    assert found is not None
    plan, pipeline = found
    return {
        "stages": _stage_rows(placement, plan, pipeline),
        "layers": count_layers(placement.problem.graph, pipeline.stage, pipeline.num_stages)[1],
        "ranks": pipeline.num_ranks,
        "stages_per_rank": pipeline.stages_per_rank,
        "replicas": pipeline.num_replicas,
        "replica_microbatches": list(pipeline.microbatches),
        "bubble_share": None if timeline is None else bubble_share(timeline, plan),
        "why": why(placement),
    }


def bubble_share(timeline: Timeline, plan: Plan) -> float:
    """The share of the step in which the devices of a pipeline wait."""
    assert plan.pipeline is not None
    used = np.unique(plan.pipeline.devices_of(plan.device))
    busy: Floats = timeline.busy_s[used]
    return float(1.0 - busy.sum() / (len(used) * timeline.step_s)) if timeline.step_s > 0 else 0.0
