"""OpenVINO: the device of every operation, for the HETERO plugin's manual mode.

{"device": "HETERO:GPU.0,CPU", "affinities": {"conv1": "GPU.0", "relu1": "CPU"}}

for op in model.get_ordered_ops():
    name = op.get_friendly_name()
    if name not in affinities:  # a Result goes with what it returns
        name = op.input_value(0).get_node().get_friendly_name()
    op.get_rt_info()["affinity"] = affinities[name]
core.compile_model(model, document["device"])
"""

import json
import re

from loadmaster.core.errors import PlanError
from loadmaster.core.graph import Phase
from loadmaster.core.placement import Placement
from loadmaster.core.timeline import Timeline
from loadmaster.report.exports.registry import Exported

_GPU = re.compile(r"(?:.*/)?(?:gpu|cuda:)([0-9]+)(?:#.*)?")


def export(placement: Placement, timeline: Timeline) -> Exported:
    """Affinities of the forward ops of a plan that fits."""
    plan, problem = placement.plan, placement.problem
    if plan is None:
        raise PlanError(f"no plan was found ({placement.status.value}), so there are no affinities")
    graph, cluster = problem.graph, problem.cluster
    names = [
        _openvino_name(name, host=bool(cluster.on_host[cluster.kind[at]]))
        for at, name in enumerate(cluster.device_name)
    ]
    forward = [op for op in range(graph.num_ops) if graph.phase[op] in (Phase.FORWARD, Phase.PARAM)]
    used = sorted({int(plan.device[op]) for op in forward}, key=lambda at: (names[at] == "CPU", at))
    document = {
        "device": "HETERO:" + ",".join(dict.fromkeys(names[at] for at in used)),
        "affinities": {graph.op_name[op]: names[plan.device[op]] for op in forward},
    }
    lost = [
        "the order of ops and the times are not part of affinities",
        "Result nodes have no entry: give each the device of what it returns (docs/report.md)",
    ]
    left = graph.num_ops - len(forward)
    if left:
        lost.append(f"OpenVINO does not train: {left} ops of the backward pass and of updates are left out")
    merged = len({int(d) for d in plan.device}) - len({names[at] for at in used})
    if merged > 0:
        lost.append("several devices of the plan are one device to OpenVINO (parts of a chip, CPUs)")
    return Exported((json.dumps(document, indent=2) + "\n").encode(), tuple(lost))


def _openvino_name(name: str, *, host: bool) -> str:
    if host:
        return "CPU"
    match = _GPU.fullmatch(name)
    return f"GPU.{match[1]}" if match else name.upper()
