"""Registry: the formats that a plan can be taken to, by name."""

from dataclasses import dataclass
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
    return made
