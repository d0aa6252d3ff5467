"""torchtitan: module names of every stage of a pipeline (`parallelism.module_fqns_per_model_part`).

torchtitan copies the model for each stage and deletes what is not named. It looks at the children of the
model alone: one that is a list (ModuleList, ModuleDict) is thinned out to the members that are named
(`layers.3`), any other stays if its own name is there (`norm`) and goes if not. So names are those; where a
model has its layers deeper, they are named as deep as they are, and that is said.

A stage is one of the plan's pipeline, or else a stretch of the forward pass on one device.
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
    stages = np.asarray(stage)
    naming = _Naming(graph)
    home = _stage_of_modules(graph, stages, naming)
    parts: list[list[str]] = []
    owners: list[int] = []
    if plan.pipeline is not None:
        owners = [*range(plan.pipeline.num_stages)]
        parts = [[module for module, at in home.items() if at == s] for s in owners]
    else:
        for module, at in home.items():
            if not owners or owners[-1] != at:
                owners.append(at)
                parts.append([])
            parts[-1].append(module)
    for part in parts:
        part += naming.whole_lists(part)
    names = placement.problem.cluster.device_name
    document = {
        "module_fqns_per_model_part": parts,
        "devices": [names[int(plan.device[np.flatnonzero(stages == at)[0]])] for at in owners],
    }
    on = [int(plan.device[np.flatnonzero(stages == at)[0]]) for at in owners]
    returns = len(on) - len(set(on))
    lost = _list_lost(placement, home, stages, naming, returns)
    empty = [str(at) for at, part in enumerate(parts) if not part]
    if empty:
        lost.append(f"stages without a module of their own have an empty list: {', '.join(empty)}")
    return Exported((json.dumps(document, indent=2) + "\n").encode(), tuple(lost))


class _Naming:
    """What torchtitan can keep or delete, as the paths of a graph show it."""

    def __init__(self, graph: Graph) -> None:
        paths = [path.split(".") for path in dict.fromkeys(graph.module) if path]
        self.flat = any(len(words) > 1 and words[1].isdecimal() for words in paths)
        self.numbered = {words[0] for words in paths if len(words) > 1 and words[1].isdecimal()}
        self.deep = {words[0] for words in paths if not self.flat and any(w.isdecimal() for w in words[2:])}
        self.members: dict[str, set[str]] = {}
        for words in paths:
            if words[0] in self.numbered and len(words) > 1:
                self.members.setdefault(words[0], set()).add(".".join(words[:2]))

    def movable(self, path: str) -> str:
        """The name under which a module moves."""
        words = path.split(".")
        if words[0] in self.numbered:
            return ".".join(words[:2])
        if words[0] in self.deep:
            at = next((depth for depth, word in enumerate(words) if word.isdecimal()), 1)
            return ".".join(words[: at + 1])
        return words[0]

    def whole_lists(self, part: list[str]) -> list[str]:
        """Lists that a stage has all of: a Sequential is no list to torchtitan and stays by its name."""
        return [
            name for name, all_of in self.members.items() if all_of <= set(part) and name not in set(part)
        ]


def _stage_of_modules(
    graph: Graph, stage: "np.ndarray[tuple[int], np.dtype[np.int32]]", naming: _Naming
) -> dict[str, int]:
    """The stage of every movable module, in the order in which they first run."""
    leaves: dict[str, Counter[int]] = {}
    for op in np.flatnonzero((graph.phase == Phase.FORWARD) | (graph.phase == Phase.PARAM)).tolist():
        path = graph.module[op]
        if graph.phase[op] == Phase.PARAM and not path:
            path = graph.op_name[op].rpartition(".")[0]
        if path and path != _LOSS and path not in naming.deep and graph.op_kind[op] != "constant":
            leaves.setdefault(naming.movable(path), Counter())[int(stage[op])] += 1
    order = dict.fromkeys(naming.movable(path) for path in _run_order(graph))
    first = {module: at for at, module in enumerate(order)}
    ordered = sorted(leaves, key=lambda module: first.get(module, len(first)))
    return {module: leaves[module].most_common(1)[0][0] for module in ordered}


def _run_order(graph: Graph) -> list[str]:
    return [
        graph.module[op] for op in np.flatnonzero(graph.phase == Phase.FORWARD).tolist() if graph.module[op]
    ]


def _list_lost(
    placement: Placement,
    home: dict[str, int],
    stage: "np.ndarray[tuple[int], np.dtype[np.int32]]",
    naming: _Naming,
    returns: int,
) -> list[str]:
    graph = placement.problem.graph
    lost = ["which device a stage gets is not part of the lists: stage i goes to rank i"]
    if naming.deep:
        lost.append(
            f"torchtitan cuts children of the model itself; layers in {', '.join(sorted(naming.deep))} lie"
            " deeper, so give it a model that has them as its own"
        )
    elif len(set(home.values())) > 1:
        lost.append("lists must be ModuleList or ModuleDict: torchtitan does not cut a Sequential")
    torn = set()
    for op in np.flatnonzero(graph.phase == Phase.FORWARD).tolist():
        module = naming.movable(graph.module[op]) if graph.module[op] else ""
        if module in home and home[module] != stage[op]:
            torn.add(module)
    if torn:
        some = ", ".join(sorted(torn)[:4])
        are = "modules are" if len(torn) > 1 else "module is"
        lost.append(
            f"{len(torn)} {are} split between devices in the plan ({some}): each goes whole to the stage of"
            " most of its ops"
        )
    if returns > 0:
        times = "times" if returns > 1 else "time"
        lost.append(
            f"the plan comes back to a device it has left, {returns} {times}: these parts need a schedule"
            " that gives a rank several of them (Interleaved1F1B); plan with --pipeline 1f1b:N for one part"
            " a device"
        )
    return lost
