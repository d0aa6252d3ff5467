"""The records of node-link JSON, and how a graph becomes them."""

from typing import Any

import msgspec
import numpy as np

from loadmaster.core.arrays import Longs
from loadmaster.core.graph import NO_GROUP, NO_MIRROR, NO_SIGNATURE, Dtype, Graph, Phase

Id = str | int | float | list[str | int | float]  # a list is a tuple of Python's
PHASES = {phase.name.lower(): phase for phase in Phase}
DTYPES = {dtype.name.lower(): dtype for dtype in Dtype}


class Output(msgspec.Struct, omit_defaults=True, gc=False):
    """A tensor an op makes."""

    bytes: int | float = 0
    keep: bool = False
    storage: int | None = None  # None = its own
    tensor: int | None = None


class Node(msgspec.Struct, omit_defaults=True, gc=False):
    """An op."""

    id: Id
    name: str | None = None
    kind: str = "op"
    module: str = ""
    phase: str = "forward"
    dtype: str = "float32"
    mirror: Id | None = None
    group: int | str | None = None
    colocation: int | str | None = None
    signature: int | str | None = None  # a row of the graph's table, or the text itself
    flops: float | None = None
    time_s: float | None = None
    time_ms: float | None = None
    time_us: float | None = None
    bytes_moved: int | float = 0
    resident_bytes: int | float | None = None
    memory: int | float | None = None
    memory_bytes: int | float | None = None
    workspace_bytes: int | float = 0
    outputs: list[Output] = []


class Link(msgspec.Struct, gc=False):
    """A use; its size is said in one of three words."""

    source: Id
    target: Id
    output: int | None = None
    bytes: int | float | None = None
    weight: int | float | None = None
    size: int | float | None = None


class Attributes(msgspec.Struct):
    """What belongs to the whole graph."""

    name: str = ""
    capture: str = "node-link file"
    signature_table: list[str] = []


class File(msgspec.Struct):
    """The document; networkx writes `links` or `edges`."""

    nodes: list[Node]
    links: list[Link] | None = None
    edges: list[Link] | None = None
    graph: Attributes = msgspec.field(default_factory=Attributes)
    directed: bool = True


def to_document(graph: Graph) -> dict[str, Any]:
    """The node-link document of a graph, its op names as ids."""
    by_op = np.argsort(graph.tensor_op, kind="stable")
    position = np.empty(graph.num_tensors, dtype=np.int64)  # of a tensor among the outputs of its op
    position[by_op] = np.arange(graph.num_tensors)
    position -= np.searchsorted(graph.tensor_op[by_op], graph.tensor_op)
    pair = graph.tensor_op[graph.use_tensor].astype(np.int64) * graph.num_ops + graph.use_op
    multigraph = len(np.unique(pair)) != len(pair)
    return {
        "directed": True,
        "multigraph": multigraph,
        "graph": Attributes(graph.name, graph.capture, list(graph.signature_table)),
        "nodes": _write_nodes(graph, by_op),
        "links": _write_links(graph, position, multigraph=multigraph),
    }


def _write_nodes(graph: Graph, by_op: Longs) -> list[Node]:
    """A record per op; `by_op` lists the tensors op by op."""
    nodes = [
        Node(id=name, kind=kind, module=module, flops=flops)
        for name, kind, module, flops in zip(
            graph.op_name, graph.op_kind, graph.module, graph.flops.tolist(), strict=True
        )
    ]
    phases, dtypes = list(PHASES), list(DTYPES)
    for op, node in enumerate(nodes):
        node.phase = phases[graph.phase[op]]
        node.dtype = dtypes[graph.dtype[op]]
    for field, none in (("mirror", NO_MIRROR), ("group", NO_GROUP), ("signature", NO_SIGNATURE)):
        values = getattr(graph, field)
        for op in np.flatnonzero(values != none).tolist():
            value = int(values[op])
            setattr(nodes[op], field, graph.op_name[value] if field == "mirror" else value)
    for field in ("bytes_moved", "resident_bytes", "workspace_bytes"):
        values = getattr(graph, field)
        for op in np.flatnonzero(values).tolist():
            setattr(nodes[op], field, int(values[op]))
    for op, outputs in _write_outputs(graph, by_op).items():
        nodes[op].outputs = outputs
    return nodes


def _write_outputs(graph: Graph, by_op: Longs) -> dict[int, list[Output]]:
    """The outputs of each op that has any."""
    numbered = bool((np.diff(by_op) < 0).any())  # the tensors do not stand op by op
    written: dict[int, list[Output]] = {}
    columns = (graph.tensor_op, graph.tensor_bytes, graph.tensor_storage, graph.keep)
    rows = zip(by_op.tolist(), *(column[by_op].tolist() for column in columns), strict=True)
    for tensor, op, num_bytes, storage, keep in rows:
        output = Output(
            bytes=num_bytes,
            keep=keep,
            storage=None if storage == tensor else storage,
            tensor=tensor if numbered else None,
        )
        written.setdefault(op, []).append(output)
    return written


def _write_links(graph: Graph, position: Longs, *, multigraph: bool) -> list[dict[str, Any]]:
    """A record per use, in order; `bytes` is there for those who read the file elsewhere."""
    links: list[dict[str, Any]] = []
    for tensor, op in zip(graph.use_tensor.tolist(), graph.use_op.tolist(), strict=True):
        output = int(position[tensor])
        links.append(
            {
                "source": graph.op_name[graph.tensor_op[tensor]],
                "target": graph.op_name[op],
                "output": output,
                "bytes": int(graph.tensor_bytes[tensor]),
            }
        )
        if multigraph:
            links[-1]["key"] = output
    return links
