"""Profiler traces: a Chrome trace of `torch.profiler` (Kineto), or one of our own, as a measured timeline of
a plan.

An own trace names ops, so it is read as it is. A profiler's trace names kernels of the framework:

    cpu_op 'aten::addmm' (sequence number 7)     forward ops, in order, matched to the plan's by kind
    'autograd::engine::evaluate_function: ...'   backward work; the same sequence number names its forward op
    kernel, memcpy (External id / correlation)   time on a GPU, counted to the op that launched it

Forward ops are matched by aligning the two orders of kinds, so that ops which only one side knows do not
shift the rest. What is not matched is counted and told, and never guessed at.
"""

import bisect
import difflib
import os
import re
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from loadmaster.core import files, io
from loadmaster.core.errors import FormatError, PlanError
from loadmaster.core.files import MAX_BYTES
from loadmaster.core.graph import NO_MIRROR, Graph, Phase
from loadmaster.core.placement import Placement
from loadmaster.core.timeline import SpanKind, Timeline, TimelineOrigin
from loadmaster.graph.formats import own
from loadmaster.review.look import shown_plan

_BACKWARD = "autograd::engine::evaluate_function"
_ACCUMULATION = "AccumulateGrad"
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_STEP = re.compile(r"ProfilerStep#[0-9]+")
_PAIR = re.compile(r"(.*?) (?:to|→) (.*)")


@dataclass(frozen=True, slots=True)
class _Event:
    name: str
    start_s: float
    end_s: float
    sequence: int = -1
    external: int = -1


@dataclass(slots=True)
class _Spans:
    """Columns of a timeline that grows."""

    kind: list[int] = field(default_factory=list)
    resource: list[int] = field(default_factory=list)
    item: list[int] = field(default_factory=list)
    start_s: list[float] = field(default_factory=list)
    end_s: list[float] = field(default_factory=list)

    def add(self, kind: SpanKind, resource: int, item: int, start_s: float, end_s: float) -> None:
        self.kind.append(kind)
        self.resource.append(resource)
        self.item.append(item)
        self.start_s.append(start_s)
        self.end_s.append(max(start_s, end_s))


def read_measured(
    path: str | os.PathLike[str], placement: Placement, *, max_bytes: int = MAX_BYTES
) -> Timeline:
    """The measured timeline in a file, whichever of the three it is."""
    data = files.read_bytes(path, max_bytes=max_bytes)
    if own.recognises(data):
        noun = io.decode(data, where=str(path))
        if not isinstance(noun, Timeline):
            raise PlanError(f"{path} holds a {type(noun).__name__.lower()}; a measured timeline is needed")
        return noun
    return read_trace(data, placement, where=str(path))[0]


def read_trace(data: bytes, placement: Placement, *, where: str = "trace") -> tuple[Timeline, list[str]]:
    """A Chrome trace matched to a plan, and what could not be matched, in words."""
    events = _parse_events(data, where)
    if any(event.get("cat") in ("cpu_op", *_KERNELS) for event in events):
        spans, notes = _match_profile(events, placement)
    else:
        spans, notes = _match_own(events, placement)
    if not spans.kind:
        raise FormatError(
            f"{where} has no event that belongs to an op of graph {placement.problem.graph.name!r};"
            " record the step that this plan is for"
        )
    start = np.array(spans.start_s)
    first = float(start.min())
    num = placement.problem.cluster.num_devices
    timeline = Timeline(
        origin=TimelineOrigin.MEASURED,
        device_name=placement.problem.cluster.device_name,
        kind=np.array(spans.kind, dtype=np.int8),
        resource=np.array(spans.resource, dtype=np.int32),
        item=np.array(spans.item, dtype=np.int32),
        microbatch=np.zeros(len(start), dtype=np.int32),
        start_s=start - first,
        end_s=np.array(spans.end_s) - first,
        peak_bytes=np.zeros(num, dtype=np.int64),
    )
    return timeline, notes


def _parse_events(data: bytes, where: str) -> list[dict[str, Any]]:
    if data[:2] == b"\x1f\x8b":
        raise FormatError(f"{where} is compressed; name it so that it ends in .gz")
    try:
        document = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise FormatError(f"{where} is neither a timeline nor a Chrome trace: {problem}") from None
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise FormatError(f"{where} is not a Chrome trace: it has no list 'traceEvents'")
    return [event for event in events if isinstance(event, dict)]


def _times(event: dict[str, Any]) -> tuple[float, float] | None:
    start, took = event.get("ts"), event.get("dur", 0)
    if isinstance(start, bool) or not isinstance(start, int | float) or not isinstance(took, int | float):
        return None
    if not (abs(start) < 1e18 and 0 <= took < 1e18):
        return None
    return start / 1e6, (start + took) / 1e6


# ---- our own traces


def _match_own(events: list[dict[str, Any]], placement: Placement) -> tuple[_Spans, list[str]]:
    """Slices named after ops, in processes named after devices; of several timelines the measured one."""
    graph, names = placement.problem.graph, placement.problem.cluster.device_name
    process, thread = dict[Any, str](), dict[Any, str]()
    for event in events:
        said = event.get("args", {}).get("name") if isinstance(event.get("args"), dict) else None
        if event.get("ph") == "M" and isinstance(said, str):
            if event.get("name") == "process_name":
                process[event.get("pid")] = said
            elif event.get("name") == "thread_name":
                thread[event.get("pid"), event.get("tid")] = said
    measured = any(name.startswith("measured: ") for name in process.values())
    op_at = {name: op for op, name in enumerate(graph.op_name)}
    tensors: dict[int, list[int]] = defaultdict(list)
    for tensor, op in enumerate(graph.tensor_op.tolist()):
        tensors[op].append(tensor)
    spans, lost = _Spans(), 0
    for event in events:
        times, name = _times(event), event.get("name")
        if event.get("ph") != "X" or times is None or not isinstance(name, str):
            continue
        where = process.get(event.get("pid"), "")
        if measured and not where.startswith("measured: "):
            continue
        where, op = where.removeprefix("measured: "), op_at.get(name, -1)
        pair = _PAIR.fullmatch(thread.get((event.get("pid"), event.get("tid")), ""))
        if op >= 0 and where in names:
            spans.add(SpanKind.COMPUTE, names.index(where), op, *times)
        elif op >= 0 and pair is not None and pair[1] in names and pair[2] in names and tensors[op]:
            asked = event.get("args", {}).get("bytes") if isinstance(event.get("args"), dict) else None
            sent = next((t for t in tensors[op] if int(graph.tensor_bytes[t]) == asked), tensors[op][0])
            at = names.index(pair[1]) * len(names) + names.index(pair[2])
            spans.add(SpanKind.TRANSFER, at, sent, *times)
        else:
            lost += 1
    return spans, [f"{lost} events belong to no op and no device of the plan"] if lost else []


# ---- traces of torch.profiler


def _match_profile(events: list[dict[str, Any]], placement: Placement) -> tuple[_Spans, list[str]]:
    graph = placement.problem.graph
    begin, end = _choose_step(events)
    ops, kernels = _collect_ops(events, begin, end)
    planned = [
        op for op in range(graph.num_ops) if graph.phase[op] == Phase.FORWARD and _base(graph.op_kind[op])
    ]
    backward = [event for event in ops if event.name.startswith(_BACKWARD)]
    last_s = max((event.start_s for event in backward), default=np.inf)  # updates come after it
    forward = [event for event in ops if not event.name.startswith(_BACKWARD) and event.start_s < last_s]
    inside = _outermost(forward, backward, {_base(graph.op_kind[op]) for op in planned})
    pairs = _align([_base(graph.op_kind[op]) for op in planned], [_base(event.name) for event in inside])
    spans, device = _Spans(), shown_plan(placement).device.tolist()
    by_sequence: dict[int, int] = {}
    for mine, theirs in pairs:
        event, op = inside[theirs], planned[mine]
        for each in _inside(ops, event):  # a backward node is made by the op itself or by one inside of it
            if each.sequence >= 0:
                by_sequence.setdefault(each.sequence, op)
        spans.add(SpanKind.COMPUTE, device[op], op, *_extent(event, kernels))
    found = len(spans.kind)
    lost = _match_backward(graph, ops, kernels, by_sequence, spans, device)
    total = sum(1 for op in range(graph.num_ops) if graph.phase[op] in (Phase.FORWARD, Phase.BACKWARD))
    notes = [
        f"{len(spans.kind)} of {total} ops were found in the trace ({found} forward,"
        f" {len(spans.kind) - found} backward); {len(inside) - found} events of the forward pass and"
        f" {lost} of"
        " the backward pass belong to none; updates of weights are not matched"
    ]
    return spans, notes


def _choose_step(events: list[dict[str, Any]]) -> tuple[float, float]:
    """The last whole step that the profiler marked, or everything."""
    steps = [
        times
        for event in events
        if _STEP.fullmatch(str(event.get("name"))) and event.get("cat") != "gpu_user_annotation"
        if (times := _times(event)) is not None
    ]
    return max(steps) if steps else (-np.inf, np.inf)


def _collect_ops(
    events: list[dict[str, Any]], begin: float, end: float
) -> tuple[list[_Event], dict[int, list[tuple[float, float]]]]:
    """Ops on the host in order, and the times of kernels by the op that launched them."""
    found: list[_Event] = []
    kernels: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        times = _times(event)
        if event.get("ph") != "X" or times is None or not isinstance(event.get("name"), str):
            continue
        facts = event.get("args") if isinstance(event.get("args"), dict) else {}
        assert isinstance(facts, dict)
        number = {key: value for key, value in facts.items() if isinstance(value, int)}
        external = number.get("External id", -1)
        if event.get("cat") in _KERNELS:
            kernels[external].append(times)
        elif event.get("cat") == "cpu_op" and begin <= times[0] <= end:
            found.append(_Event(event["name"], *times, number.get("Sequence number", -1), external))
    return sorted(found, key=lambda event: (event.start_s, -event.end_s)), kernels


def _inside(ops: list[_Event], event: _Event) -> list[_Event]:
    """The event and all that happened within it; `ops` stand in the order of their starts."""
    low = bisect.bisect_left(ops, event.start_s, key=lambda each: each.start_s)
    high = bisect.bisect_right(ops, event.end_s, key=lambda each: each.start_s)
    return [each for each in ops[low:high] if each.end_s <= event.end_s]


def _outermost(forward: list[_Event], backward: list[_Event], kinds: Collection[str] = ()) -> list[_Event]:
    """Ops that stand inside of no other op, and in no backward pass.

    An op that is of none of the `kinds` and has ops of them within stands for those: a cross_entropy_loss for
    its log_softmax and nll_loss.
    """
    found: list[_Event] = []
    free_s = -np.inf
    spans = sorted((event.start_s, event.end_s) for event in backward)
    at = 0
    for event in forward:
        while at < len(spans) and spans[at][1] < event.start_s:
            at += 1
        if at < len(spans) and spans[at][0] <= event.start_s:
            continue
        if event.start_s < free_s or not event.name.startswith("aten::"):
            continue
        if event.end_s > free_s:
            within = _inside(forward, event) if kinds and _base(event.name) not in kinds else []
            if any(_base(each.name) in kinds for each in within if each.name.startswith("aten::")):
                continue
            found.append(event)
            free_s = event.end_s
    return found


def _base(kind: str) -> str:
    """'aten::addmm', 'addmm.default' and 'addmm' are one kind."""
    text = kind.removeprefix("aten::").removeprefix("aten.").partition(".")[0].lstrip("_")
    return _SAME.get(text, text)


_SAME = {
    "linear": "addmm",
    "t": "transpose",
    "scaled_dot_product_flash_attention": "scaled_dot_product_attention",
    "scaled_dot_product_flash_attention_for_cpu": "scaled_dot_product_attention",
    "scaled_dot_product_efficient_attention": "scaled_dot_product_attention",
    "scaled_dot_product_attention_math": "scaled_dot_product_attention",
    "native_layer_norm": "layer_norm",
    "native_dropout": "dropout",
    "unsafe_view": "view",
    "reshape": "view",
    "mm": "matmul",
    "bmm": "matmul",
}


def _align(mine: list[str], theirs: list[str]) -> list[tuple[int, int]]:
    """Pairs of the longest matching runs of two orders."""
    matcher = difflib.SequenceMatcher(None, mine, theirs, autojunk=False)
    return [
        (block.a + at, block.b + at) for block in matcher.get_matching_blocks() for at in range(block.size)
    ]


def _extent(event: _Event, kernels: dict[int, list[tuple[float, float]]]) -> tuple[float, float]:
    """From the first to the last kernel that an op launched; without kernels, its own time on the host."""
    mine = kernels.get(event.external) if event.external >= 0 else None
    if not mine:
        return event.start_s, event.end_s
    return min(start for start, _ in mine), max(end for _, end in mine)


def _match_backward(
    graph: Graph,
    ops: list[_Event],
    kernels: dict[int, list[tuple[float, float]]],
    by_sequence: dict[int, int],
    spans: _Spans,
    device: list[int],
) -> int:
    """Give the backward op of each forward op its time; says how many events found no op."""
    mirrored: dict[int, list[int]] = defaultdict(list)
    for op in np.flatnonzero(graph.mirror != NO_MIRROR).tolist():
        mirrored[int(graph.mirror[op])].append(op)
    lost, found = 0, dict[int, list[_Event]]()
    for event in ops:
        if not event.name.startswith(_BACKWARD):
            continue
        forward = by_sequence.get(event.sequence, -1)
        if not mirrored.get(forward):
            lost += _ACCUMULATION not in event.name  # adding to a weight's gradient is no op of a plan
            continue
        known = {_base(graph.op_kind[op]) for op in mirrored[forward]}
        found.setdefault(forward, []).extend(_outermost(_inside(ops, event), [], known))
    for forward, events in found.items():
        backward = mirrored[forward]
        kinds = [_base(graph.op_kind[op]) for op in backward]
        for mine, theirs in _align(kinds, [_base(each.name) for each in events]):
            spans.add(
                SpanKind.COMPUTE, device[backward[mine]], backward[mine], *_extent(events[theirs], kernels)
            )
    return lost
