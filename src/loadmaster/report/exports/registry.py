"""Registry: the formats that a plan can be taken to, by name."""

from dataclasses import dataclass, replace
from importlib import import_module

from loadmaster.core.errors import UnknownNameError
from loadmaster.core.placement import Placement
from loadmaster.core.timeline import Timeline

FORMATS = {
    "device_map": "Hugging Face's device_map: modules and devices (accelerate, transformers)",
    "torchtitan": "module names of every stage (torchtitan: module_fqns_per_model_part)",
    "openvino": "the device of every operation (OpenVINO's HETERO plugin: affinity)",
    "chrome": "the timeline as a Chrome trace (Perfetto, chrome://tracing)",
    "graphml": "the graph with devices, times and bytes (Gephi, yEd, networkx)",
    "nodelink": "the same as node-link JSON (networkx, D3)",
    "csv": "a row for each op (spreadsheets, pandas)",
}


@dataclass(frozen=True, slots=True)
class Exported:
    """A file, and what it does not say of the plan."""

    content: bytes
    lost: tuple[str, ...]


def export_plan(placement: Placement, timeline: Timeline, to: str) -> Exported:
    """The plan in one of FORMATS."""
    if to not in FORMATS:
        raise UnknownNameError("format", to, FORMATS)
    made: Exported = import_module(f"loadmaster.report.exports.{to}").export(placement, timeline)
    return replace(made, lost=(*made.lost, *_list_lost_of_pipeline(placement, to)))


def _list_lost_of_pipeline(placement: Placement, to: str) -> list[str]:
    """What only the timeline says of a pipeline: its replicas; and what torchtitan is told elsewhere."""
    plan = placement.plan or placement.least_overflow_plan
    if plan is None or plan.pipeline is None or to == "chrome":
        return []
    pipeline, names, lost = plan.pipeline, placement.problem.cluster.device_name, []
    if to == "torchtitan":
        again = ", and which stages are recomputed" if plan.recompute.any() else ""
        lost.append(
            f"the schedule ({pipeline.schedule}, {pipeline.num_microbatches} micro-batches){again}:"
            " torchtitan has options of its own for that"
        )
    if pipeline.num_replicas > 1:
        others = dict.fromkeys(pipeline.devices_of(plan.device)[1:].ravel().tolist())
        where = ", ".join(names[at] for at in others)
        lost.append(f"only the first replica of each stage is written; others of the plan run on {where}")
    return lost
