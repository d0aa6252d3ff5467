"""networkx node-link JSON, in and out.

    {"directed": true, "multigraph": false, "graph": {"name": "tiny"},
     "nodes": [{"id": "a", "flops": 1e9, "outputs": [{"bytes": 8}]}, {"id": "b", "time_us": 5}],
     "links": [{"source": "a", "target": "b", "output": 0}]}

`write` loses nothing: reading its output gives a graph of the same digest. Tensors are numbered
op by op as the nodes stand, unless every output says its number in `tensor`; `storage` names such
a number, -1 for memory counted elsewhere. Links without `output` share one tensor per source and
size. A time becomes flops at 1 TFLOP/s.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import msgspec
import numpy as np

from loadmaster.core.errors import FormatError, GraphError, UnknownNameError
from loadmaster.core.graph import NO_GROUP, NO_MIRROR, NO_SIGNATURE, NO_STORAGE, Graph
from loadmaster.core.problem import Workload
from loadmaster.graph.build import OWN_STORAGE, GraphBuilder
from loadmaster.graph.formats._nodelink import DTYPES, PHASES, Attributes, File, Id, Link, Node, to_document
from loadmaster.graph.formats._records import (
    REF_FLOPS_PER_S,
    decode,
    group_ids,
    top_keys,
    unique_names,
    whole_bytes,
)

E = TypeVar("E")
_OTHER_FORMATS = frozenset({"loadmaster", "maxFPGAs", "maxSizePerFPGA", "maxDevices", "maxMemoryPerDevice"})


def recognises(data: bytes) -> bool:
    """Whether this is a JSON object with nodes and links, and none of the other formats' keys."""
    keys = top_keys(data)
    return "nodes" in keys and bool(keys & {"links", "edges", "directed"}) and not keys & _OTHER_FORMATS


def read(data: bytes, name: str) -> Workload:
    """The graph; a node-link file brings no cluster and no costs."""
    file = decode(data, File, what="node-link JSON")
    if not file.directed:
        raise FormatError("the node-link graph is undirected; ops need an order, so write a DiGraph")
    links = file.links if file.links is not None else file.edges
    if links is None:
        raise FormatError("the node-link graph has neither 'links' nor 'edges'; give one, it may be empty")
    return Workload(_build_graph(file.nodes, links, file.graph, name))


def write(graph: Graph) -> bytes:
    """The graph as node-link JSON, for `networkx.node_link_graph(..., edges="links")` too."""
    try:
        return msgspec.json.encode(to_document(graph))
    except UnicodeEncodeError as problem:
        raise GraphError(f"graph {graph.name!r} has a name that is not Unicode text: {problem}") from None


def _build_graph(nodes: Sequence[Node], links: Sequence[Link], attributes: Attributes, name: str) -> Graph:
    row_of = _rows_by_id(nodes)
    labels = [str(node.id) if node.name is None else node.name for node in nodes]
    names = unique_names(labels, (node.id for node in nodes))
    groups = group_ids([_group_of(node) for node in nodes])
    builder = GraphBuilder(attributes.name or name, capture=attributes.capture)
    for row, node in enumerate(nodes):
        _add_op(builder, node, row, name=names[row], group=groups[row], row_of=row_of)
    _add_links(builder, links, row_of, _add_outputs(builder, nodes))
    return _with_signatures(builder.build(), nodes, names, attributes.signature_table)


def _id_key(own_id: Id) -> bytes:
    """An id as something to look up by: 1 and '1' are two ids, and a list is one too."""
    return msgspec.json.encode(own_id)


def _rows_by_id(nodes: Sequence[Node]) -> dict[bytes, int]:
    row_of: dict[bytes, int] = {}
    for row, node in enumerate(nodes):
        first = row_of.setdefault(_id_key(node.id), row)
        if first != row:
            raise GraphError(f"duplicate id {node.id!r}: nodes[{first}] and nodes[{row}]; ids are unique")
    return row_of


def _group_of(node: Node) -> int | str | None:
    value = node.group if node.group is not None else node.colocation
    return None if value == NO_GROUP else value


def _add_op(
    builder: GraphBuilder, node: Node, row: int, *, name: str, group: int, row_of: dict[bytes, int]
) -> None:
    label = f"nodes[{row}]"
    mirror = NO_MIRROR
    if node.mirror is not None:
        if _id_key(node.mirror) not in row_of:
            raise GraphError(f"{label} mirrors {node.mirror!r}, which does not exist; name a node's id")
        mirror = row_of[_id_key(node.mirror)]
    resident = (node.resident_bytes, node.memory_bytes, node.memory)
    builder.op(
        name,
        kind=node.kind,
        module=node.module,
        phase=_parse_choice(PHASES, node.phase, f"{label}.phase"),
        mirror=mirror,
        group=group,
        dtype=_parse_choice(DTYPES, node.dtype, f"{label}.dtype"),
        flops=_flops_of(node, label),
        bytes_moved=whole_bytes(node.bytes_moved, f"{label}.bytes_moved"),
        resident_bytes=whole_bytes(_first_given(resident), f"{label}.resident_bytes"),
        workspace_bytes=whole_bytes(node.workspace_bytes, f"{label}.workspace_bytes"),
    )


def _parse_choice(known: Mapping[str, E], value: str, label: str) -> E:
    if value not in known:
        raise UnknownNameError(label, value, known)
    return known[value]


def _first_given(values: Iterable[int | float | None]) -> int | float:
    """The first number given, or 0."""
    return next((value for value in values if value is not None), 0)


def _flops_of(node: Node, label: str) -> float:
    times = ((node.time_s, 1.0), (node.time_ms, 1e-3), (node.time_us, 1e-6))
    from_time = (None if time is None else time * unit * REF_FLOPS_PER_S for time, unit in times)
    flops = float(_first_given((node.flops, *from_time)))
    if not 0 <= flops < math.inf:
        raise GraphError(f"{label}: flops or time come to {flops} flops; needs a finite number >= 0")
    return flops


def _add_outputs(builder: GraphBuilder, nodes: Sequence[Node]) -> list[list[tuple[int, int]]]:
    """The declared outputs of each node as (tensor, bytes); tensors are added by their number."""
    given = [(row, at) for row, node in enumerate(nodes) for at in range(len(node.outputs))]
    numbers = [nodes[row].outputs[at].tensor for row, at in given]
    if all(number is None for number in numbers):
        numbers = list(range(len(given)))
    order = dict(zip(numbers, given, strict=True))
    result = [[(0, 0)] * len(node.outputs) for node in nodes]
    for number in range(len(given)):
        if number not in order:
            raise GraphError(
                f"tensor {number} is missing; outputs number theirs 0..{len(given) - 1} or not at all"
            )
        row, at = order[number]
        label, output = f"nodes[{row}].outputs[{at}]", nodes[row].outputs[at]
        storage = OWN_STORAGE if output.storage is None else output.storage
        if output.storage is not None and not NO_STORAGE <= storage < len(given):
            raise GraphError(f"{label}.storage is {storage}; needs a tensor 0..{len(given) - 1}, or -1")
        size = whole_bytes(output.bytes, f"{label}.bytes")
        result[row][at] = builder.tensor(row, size, storage=storage, keep=output.keep), size
    return result


def _add_links(
    builder: GraphBuilder,
    links: Sequence[Link],
    row_of: dict[bytes, int],
    declared: list[list[tuple[int, int]]],
) -> None:
    shared: dict[tuple[int, int], int] = {}  # (row, bytes) -> tensor of the links that name no output
    for at, link in enumerate(links):
        label = f"links[{at}] ({link.source!r} -> {link.target!r})"
        for end in (link.source, link.target):
            if _id_key(end) not in row_of:
                raise GraphError(
                    f"{label} names {end!r}, which does not exist; add the node or drop the link"
                )
        row = row_of[_id_key(link.source)]
        tensor = _find_declared_output(link, declared[row], label)
        if tensor is None:
            size = whole_bytes(_first_given((link.bytes, link.weight, link.size)), f"{label}.bytes")
            if (row, size) not in shared:
                shared[(row, size)] = builder.tensor(row, size)
            tensor = shared[(row, size)]
        builder.use(tensor, row_of[_id_key(link.target)])


def _find_declared_output(link: Link, outputs: list[tuple[int, int]], label: str) -> int | None:
    """The declared output a link carries, or None where its source declares none."""
    if not outputs and link.output is None:
        return None
    if link.output is not None and not 0 <= link.output < len(outputs):
        raise GraphError(f"{label}.output is {link.output}, its source has {len(outputs)} outputs")
    wanted = outputs if link.output is None else [outputs[link.output]]
    size = next((s for s in (link.bytes, link.weight, link.size) if s is not None), None)
    fitting = [tensor for tensor, have in wanted if size is None or have == math.ceil(size)]
    if not fitting or (size is None and len(wanted) > 1):
        have = ", ".join(str(num_bytes) for _, num_bytes in wanted)
        raise GraphError(
            f"{label} carries {size} bytes, its source's outputs {have}; give output and bytes that agree"
        )
    return fitting[0]


def _with_signatures(
    graph: Graph, nodes: Sequence[Node], names: Sequence[str], given: Sequence[str]
) -> Graph:
    """The graph with its signatures, the given table kept row by row."""
    table = list(given)
    first = {text: at for at, text in reversed(list(enumerate(given)))}
    row_of: dict[str, int] = {}
    for at, (name, node) in enumerate(zip(names, nodes, strict=True)):
        row = NO_SIGNATURE if node.signature is None else node.signature
        if isinstance(row, str):
            if row not in first:
                first[row] = len(table)
                table.append(row)
            row = first[row]
        if not NO_SIGNATURE <= row < len(table):
            raise GraphError(
                f"nodes[{at}].signature is {row}, the graph's signature_table has {len(table)} rows"
            )
        row_of[name] = row
    if not table:
        return graph
    signature = np.array([row_of[name] for name in graph.op_name], dtype=np.int32)
    return replace(graph, signature=signature, signature_table=tuple(table))
