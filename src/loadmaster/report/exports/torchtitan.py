"""torchtitan: module names of every stage of a pipeline (`parallelism.module_fqns_per_model_part`).

A stage is a stretch of the forward pass on one device; without a pipeline in the plan the stretches are
found. torchtitan moves whole modules, named by their paths: children of numbered lists one by one, all else
by the highest module that lies in one stage.
"""

import json
from collections import Counter

import numpy as np

from loadmaster.core.errors import PlanError
from loadmaster.core.graph import Graph, Phase
from loadmaster.core.placement import Placement
from loadmaster.core.timeline import Timeline
from loadmaster.report.exports.registry import Exported

_LOSS = "loss"


def export(placement: Placement, timeline: Timeline) -> Exported:
    """`[["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]]`, in a document that names the
    devices."""
    graph, plan = placement.problem.graph, placement.plan
    if plan is None:
        raise PlanError(f"no plan was found ({placement.status.value}), so there are no stages")
    if not any(graph.module):
        raise PlanError(f"graph {graph.name!r} names no modules, so there are no lists of them")
    stage = plan.pipeline.stage if plan.pipeline is not None else plan.device
    home = _stage_of_modules(graph, np.asarray(stage))
    parts: list[list[str]] = []
    owners: list[int] = []
    for module, at in home.items():
        if not owners or owners[-1] != at:
            owners.append(at)
            parts.append([])
        parts[-1].append(module)
    names = placement.problem.cluster.device_name
    stages = np.asarray(stage)
    document = {
        "module_fqns_per_model_part": parts,
        "devices": [names[int(plan.device[np.flatnonzero(stages == at)[0]])] for at in owners],
    }
    lost = _list_lost(placement, home, stages, len(owners) - len(set(owners)))
    return Exported((json.dumps(document, indent=2) + "\n").encode(), tuple(lost))


def _stage_of_modules(graph: Graph, stage: "np.ndarray[tuple[int], np.dtype[np.int32]]") -> dict[str, int]:
    """The stage of every movable module, in the order in which they first run."""
    leaves: dict[str, Counter[int]] = {}
    for op in np.flatnonzero((graph.phase == Phase.FORWARD) | (graph.phase == Phase.PARAM)).tolist():
        path = graph.module[op]
        if graph.phase[op] == Phase.PARAM and not path:
            path = graph.op_name[op].rpartition(".")[0]
        if path and path != _LOSS and graph.op_kind[op] != "constant":
            leaves.setdefault(_movable(path), Counter())[int(stage[op])] += 1
    first = {
        module: at for at, module in enumerate(dict.fromkeys(_movable(path) for path in _run_order(graph)))
    }
    ordered = sorted(leaves, key=lambda module: first.get(module, len(first)))
    return {module: leaves[module].most_common(1)[0][0] for module in ordered}


def _run_order(graph: Graph) -> list[str]:
    return [
        graph.module[op] for op in np.flatnonzero(graph.phase == Phase.FORWARD).tolist() if graph.module[op]
    ]


def _movable(path: str) -> str:
    """A numbered layer with its list ('layers.3'), or the module above all numbers' level."""
    words = path.split(".")
    for depth, word in enumerate(words):
        if word.isdecimal():
            return ".".join(words[: depth + 1])
    return (
        words[0]
        if len(words) == 1 or words[0] in ("wte", "wpe")
        else ".".join(words[:2])
        if len(words) > 2
        else path
    )


def _list_lost(
    placement: Placement,
    home: dict[str, int],
    stage: "np.ndarray[tuple[int], np.dtype[np.int32]]",
    returns: int,
) -> list[str]:
    graph = placement.problem.graph
    lost = ["which device a stage gets is not part of the lists: stage i goes to rank i"]
    torn = set()
    for op in np.flatnonzero(graph.phase == Phase.FORWARD).tolist():
        module = _movable(graph.module[op]) if graph.module[op] else ""
        if module in home and home[module] != stage[op]:
            torn.add(module)
    if torn:
        some = ", ".join(sorted(torn)[:4])
        lost.append(
            f"{len(torn)} modules are split between devices in the plan ({some}): each goes whole to"
            " the stage of"
            " most of its ops"
        )
    if returns > 0:
        lost.append(
            f"the plan comes back to a device it has left, {returns} times: these parts need a schedule"
            " that gives a"
            " rank several of them (Interleaved1F1B); plan with --pipeline 1f1b:N for one part a device"
        )
    return lost
