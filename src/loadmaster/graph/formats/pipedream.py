"""PipeDream's text profiles, mirrored into a training step.

    node4 -- Linear(8, 2) -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=64.0,
        parameter_size=72.000    (all on one line)
    <tab>node3 -- node4

A profile (Narayanan et al., SOSP 2019) lists forward layers with both times in milliseconds.
Each becomes up to four ops of one group:

    weight ──┬──────────┬───────────┐
             v          v           v          activations go to the consumers' forward ops and,
    x ──► forward ──► backward ──► update      as saved inputs, to their backward ops
"""

import math
import re
from dataclasses import dataclass, replace

from loadmaster.core.errors import FormatError, GraphError
from loadmaster.core.graph import Graph, Phase
from loadmaster.core.problem import Workload
from loadmaster.graph.build import GraphBuilder
from loadmaster.graph.formats._records import REF_FLOPS_PER_S, whole_bytes

MOST_BYTES = 2**56  # every sum of sizes stays far inside int64
_BEGINNING = re.compile(rb"\s*node\d+ -- ")
_EDGE = re.compile(r"\s*node(\d+) -- node(\d+)\s*")
_NODE = re.compile(
    r"\s*node(\d+) -- (.*) -- forward_compute_time=([^,]*), backward_compute_time=([^,]*),"
    r" activation_size=([^,]*), parameter_size=([^,\s]*)(?: -- stage_id=\d+)?\s*"
)
_NUMBER = re.compile(r"[-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?")
_SECONDS_PER_MS = 1e-3
_EXAMPLE = (
    "'node1 -- Linear(8, 2) -- forward_compute_time=1.0, backward_compute_time=2.0,"
    " activation_size=64.0, parameter_size=72.0' or '<tab>node1 -- node2'"
)


@dataclass(frozen=True, slots=True)
class _Layer:
    """One node line."""

    name: str
    kind: str
    forward_ms: float
    backward_ms: float
    activation_bytes: int
    parameter_bytes: int


@dataclass(frozen=True, slots=True)
class _Profile:
    """The layers and the edges between them, as rows."""

    layers: list[_Layer]
    edges: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _Ops:
    """What one layer became: builder indices."""

    forward: int
    backward: int
    output: int  # tensor


def recognises(data: bytes) -> bool:
    """Whether the first line with text starts with 'node<ID> -- '."""
    return _BEGINNING.match(data) is not None


def read(data: bytes, name: str) -> Workload:
    """The training step of a profile, with the reference cluster and plain SGD."""
    from loadmaster.graph.generate import with_benchmark_cluster

    profile = _sort_layers(_parse_profile(data), name)
    return replace(with_benchmark_cluster(_build_graph(profile, name)), optimizer="sgd")


def _parse_profile(data: bytes) -> _Profile:
    try:
        text = data.decode()
    except UnicodeDecodeError as problem:
        raise FormatError(f"not a PipeDream profile: {problem}") from None
    layers: list[_Layer] = []
    row_of: dict[str, tuple[int, int]] = {}  # id -> row, line
    arrows: list[tuple[str, str, int]] = []
    for line, content in enumerate(text.split("\n"), start=1):
        edge = _EDGE.fullmatch(content)
        if edge is not None:
            arrows.append((str(int(edge[1])), str(int(edge[2])), line))
        elif content.strip():
            own_id, layer = _parse_layer(content, line)
            if own_id in row_of:
                raise GraphError(f"line {line}: duplicate id node{own_id}, first on line {row_of[own_id][1]}")
            row_of[own_id] = (len(layers), line)
            layers.append(layer)
    if not layers:
        raise GraphError("the PipeDream profile has 0 nodes; nothing can be placed")
    total = sum(layer.activation_bytes + layer.parameter_bytes for layer in layers)
    if total > MOST_BYTES:
        raise GraphError(f"the profile's sizes add up to {total} bytes; the limit is {MOST_BYTES}")
    return _Profile(layers, _list_edges(arrows, row_of))


def _list_edges(
    arrows: list[tuple[str, str, int]], row_of: dict[str, tuple[int, int]]
) -> list[tuple[int, int]]:
    """Distinct edges as rows, in file order."""
    rows: dict[tuple[int, int], None] = {}
    for source, target, line in arrows:
        for end in (source, target):
            if end not in row_of:
                text = f"line {line}: edge node{source} -> node{target} names node{end}, which does not exist"
                raise GraphError(f"{text}; add it or drop the edge")
        rows[(row_of[source][0], row_of[target][0])] = None
    return list(rows)


def _parse_layer(content: str, line: int) -> tuple[str, _Layer]:
    """The id and layer of a node line."""
    match = _NODE.fullmatch(content)
    if match is None:
        raise FormatError(f"line {line}: {content[:60]!r} is neither a node nor an edge; write {_EXAMPLE}")
    own_id, kind = str(int(match[1])), match[2].split("(")[0].strip()
    layer = _Layer(
        name=f"{own_id}:{kind}",
        kind=kind.lower(),
        forward_ms=_parse_number(match[3], "forward_compute_time", line),
        backward_ms=_parse_number(match[4], "backward_compute_time", line),
        activation_bytes=_sum_bytes(match[5], "activation_size", line),
        parameter_bytes=_sum_bytes(match[6], "parameter_size", line),
    )
    return own_id, layer


def _parse_number(text: str, field: str, line: int) -> float:
    try:
        value = float(text) if _NUMBER.fullmatch(text.strip()) else math.nan
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise FormatError(f"line {line}: {field} is {text!r}; needs a finite number >= 0")
    return value


def _sum_bytes(text: str, field: str, line: int) -> int:
    """Bytes from a number or from a list '[a; b; c]', which is summed."""
    inner = text.strip()
    parts = inner[1:-1].split(";") if inner[:1] == "[" and inner[-1:] == "]" else [inner]
    total = sum(_parse_number(part, field, line) for part in parts)
    try:
        return whole_bytes(total, field)
    except GraphError as problem:
        raise FormatError(f"line {line}: {problem}") from None


def _sort_layers(profile: _Profile, name: str) -> _Profile:
    """The profile with its layers in topological order, so that backward can run in reverse of it."""
    builder = GraphBuilder(name)
    for layer in profile.layers:
        builder.tensor(builder.op(layer.name), layer.activation_bytes)  # tensor i of op i
    for source, target in profile.edges:
        builder.use(source, target)
    place = {layer: row for row, layer in enumerate(builder.build().op_name)}
    row_of = [place[layer.name] for layer in profile.layers]
    layers = sorted(profile.layers, key=lambda layer: place[layer.name])
    return _Profile(layers, [(row_of[source], row_of[target]) for source, target in profile.edges])


def _build_graph(profile: _Profile, name: str) -> Graph:
    builder = GraphBuilder(name, capture="pipedream profile, mirrored")
    producers: list[list[int]] = [[] for _ in profile.layers]
    for source, target in profile.edges:
        producers[target].append(source)
    ops = _add_layers(builder, profile.layers)
    sinks = set(range(len(ops))) - {source for source, _ in profile.edges}
    for row, own in enumerate(ops):
        for source in producers[row]:
            builder.use(ops[source].output, own.forward, own.backward)
            gradient = builder.tensor(own.backward, profile.layers[source].activation_bytes)
            builder.use(gradient, ops[source].backward)
        if row in sinks:
            builder.use(own.output, own.backward)
    return builder.build()


def _add_layers(builder: GraphBuilder, layers: list[_Layer]) -> list[_Ops]:
    """Weights and forward ops in order, then backward ops and updates in reverse."""
    weights: list[int | None] = []
    forwards, outputs = [], []
    for row, layer in enumerate(layers):
        weight = None
        if layer.parameter_bytes:
            holder = builder.op(
                f"{layer.name} weight",
                kind="param",
                phase=Phase.PARAM,
                group=row,
                resident_bytes=layer.parameter_bytes,
            )
            weight = builder.tensor(holder, layer.parameter_bytes)
        flops = layer.forward_ms * _SECONDS_PER_MS * REF_FLOPS_PER_S
        forward = builder.op(layer.name, kind=layer.kind, group=row, flops=flops)
        forwards.append(forward)
        outputs.append(builder.tensor(forward, layer.activation_bytes))
        weights.append(weight)
    backwards = [0] * len(layers)
    for row in reversed(range(len(layers))):
        backwards[row] = _add_backward(builder, layers[row], forwards[row], weights[row], group=row)
    return [_Ops(*ops) for ops in zip(forwards, backwards, outputs, strict=True)]


def _add_backward(
    builder: GraphBuilder, layer: _Layer, forward: int, weight: int | None, *, group: int
) -> int:
    """The backward op of a layer, and its update where there is a weight."""
    flops = layer.backward_ms * _SECONDS_PER_MS * REF_FLOPS_PER_S
    backward = builder.op(
        f"{layer.name} backward",
        kind=layer.kind,
        phase=Phase.BACKWARD,
        mirror=forward,
        group=group,
        flops=flops,
    )
    if weight is not None:
        update = builder.op(f"{layer.name} update", kind="update", phase=Phase.UPDATE, group=group)
        builder.use(weight, forward, backward, update)
        builder.use(builder.tensor(backward, layer.parameter_bytes), update)
    return backward
