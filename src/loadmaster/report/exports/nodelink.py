"""Node-link JSON, as `networkx.node_link_graph(document, edges="links")` reads it."""

import json

from loadmaster.core.placement import Placement
from loadmaster.core.timeline import Timeline
from loadmaster.report.exports.registry import Exported
from loadmaster.report.exports.rows import edge_rows, lost_of, op_rows


def export(placement: Placement, timeline: Timeline) -> Exported:
    """Nodes are numbered; `name` is the op's name."""
    document = {
        "directed": True,
        "multigraph": False,
        "graph": {
            "name": placement.problem.graph.name,
            "devices": list(placement.problem.cluster.device_name),
            "step_s": timeline.step_s,
        },
        "nodes": [{"id": at, **row} for at, row in enumerate(op_rows(placement, timeline))],
        "links": [
            {"source": source, "target": target, "bytes": size}
            for source, target, size in edge_rows(placement.problem.graph)
        ],
    }
    return Exported(json.dumps(document, allow_nan=False).encode(), lost_of(placement))
