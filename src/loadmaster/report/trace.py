"""Chrome traces of timelines and of studies: they open in Perfetto and in chrome://tracing.

A timeline has one process per device with its ops, and one for the links with a thread per pair of devices.
Transfers of a pair that overlap (links without contention) get lanes of their own, since slices of a thread
must nest. A study has one process per device, with a thread for each of its lanes (compute, up, down, ...).
Times are whole nanoseconds, so that slices which touch do not overlap by a rounding error.
"""

import heapq
import json
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import msgspec
import numpy as np

from loadmaster.core.arrays import Floats, Ints
from loadmaster.core.graph import Graph, Phase
from loadmaster.core.timeline import SpanKind, Timeline


def chrome_trace(timeline: Timeline, graph: Graph) -> bytes:
    """The JSON document of a trace; times in microseconds, op names as data."""
    return _encode_trace(_list_events(timeline, graph), _summarize_timeline(timeline))


def chrome_traces(timelines: Mapping[str, Timeline], graph: Graph | Mapping[str, Graph]) -> bytes:
    """One trace of several timelines, one below the other, each under its title; `graph` is theirs, or each
    one's.
    """
    events: list[dict[str, Any]] = []
    first = 0
    for title, timeline in timelines.items():
        own = graph if isinstance(graph, Graph) else graph[title]
        for event in _list_events(timeline, own):
            moved = {**event, "pid": event["pid"] + first}
            if event["name"] == "process_name":
                moved["args"] = {"name": f"{title}: {event['args']['name']}"}
            events.append(moved)
        first += len(timeline.device_name) + 1
    return _encode_trace(
        events, {title: _summarize_timeline(timeline) for title, timeline in timelines.items()}
    )


class StudySpan(Protocol):
    """Something that a device did for a trial."""

    @property
    def device(self) -> str:
        """Its name."""

    @property
    def lane(self) -> str:
        """compute, up, down, host, ..."""

    @property
    def name(self) -> str:
        """What was done."""

    @property
    def trial(self) -> str:
        """For whom."""

    @property
    def start_s(self) -> float:
        """Since the study began."""

    @property
    def end_s(self) -> float:
        """Since the study began."""


def study_trace(spans: Iterable[StudySpan]) -> bytes:
    """The JSON document of a study's trace; the trial stands in every slice."""
    rows = list(spans)
    pids = {device: pid for pid, device in enumerate(dict.fromkeys(row.device for row in rows))}
    tids = {lane: tid for tid, lane in enumerate(dict.fromkeys((row.device, row.lane) for row in rows))}
    events = [_name_event("process_name", pid, 0, device) for device, pid in pids.items()]
    events += [_name_event("thread_name", pids[device], tid, lane) for (device, lane), tid in tids.items()]
    for row in rows:
        pid, tid, end_s = pids[row.device], tids[row.device, row.lane], max(row.start_s, row.end_s)
        event = _slice_event(f"{row.trial}: {row.name}", row.lane, pid, tid, row.start_s, end_s)
        events.append({**event, "args": {"trial": row.trial}})
    return _encode_trace(events)


def _list_events(timeline: Timeline, graph: Graph) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    num = len(timeline.device_name)
    for d, name in enumerate(timeline.device_name):
        events.append(_name_event("process_name", d, 0, name))
        events.append(_name_event("thread_name", d, 0, "ops"))
    events.append(_name_event("process_name", num, 0, "links"))
    events.extend(_op_events(timeline, graph))
    events.extend(_transfer_events(timeline, graph, num))
    return events


def _summarize_timeline(timeline: Timeline) -> dict[str, Any]:
    peak = {name: int(p) for name, p in zip(timeline.device_name, timeline.peak_bytes, strict=True)}
    return {"origin": timeline.origin, "step_s": timeline.step_s, "peak_bytes": peak}


def _encode_trace(events: list[dict[str, Any]], other: dict[str, Any] | None = None) -> bytes:
    document: dict[str, Any] = {"traceEvents": events, "displayTimeUnit": "ms"}
    if other is not None:
        document["otherData"] = other
    try:
        return msgspec.json.encode(document)
    except UnicodeEncodeError:  # half a surrogate pair in a name: the slower encoder escapes it
        return json.dumps(document).encode()


def _name_event(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _slice_event(
    name: str, category: str, pid: int, tid: int, start_s: float, end_s: float
) -> dict[str, Any]:
    start_ns, end_ns = round(start_s * 1e9), round(end_s * 1e9)
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": pid,
        "tid": tid,
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
    }


def _op_events(timeline: Timeline, graph: Graph) -> list[dict[str, Any]]:
    events = []
    for span in np.flatnonzero(timeline.kind == SpanKind.COMPUTE).tolist():
        op, device = int(timeline.item[span]), int(timeline.resource[span])
        phase = Phase(int(graph.phase[op])).name.lower()
        start, end = float(timeline.start_s[span]), float(timeline.end_s[span])
        event = _slice_event(graph.op_name[op], phase, device, 0, start, end)
        event["args"] = {"kind": graph.op_kind[op], "module": graph.module[op]}
        events.append(event)
    return events


def _transfer_events(timeline: Timeline, graph: Graph, num: int) -> list[dict[str, Any]]:
    events = []
    moved = np.flatnonzero(timeline.kind != SpanKind.COMPUTE)
    tid = 0
    for pair in np.unique(timeline.resource[moved]).tolist():
        spans = moved[timeline.resource[moved] == pair]
        source, target = timeline.device_name[pair // num], timeline.device_name[pair % num]
        label = f"{source} to host memory" if pair // num == pair % num else f"{source} to {target}"
        lane = assign_lanes(timeline.start_s[spans], timeline.end_s[spans])
        for k in range(int(lane.max()) + 1):
            events.append(_name_event("thread_name", num, tid + k, label))
        for span, k in zip(spans.tolist(), lane.tolist(), strict=True):
            tensor = int(timeline.item[span])
            name = graph.op_name[int(graph.tensor_op[tensor])]
            start, end = float(timeline.start_s[span]), float(timeline.end_s[span])
            event = _slice_event(name, "transfer", num, tid + k, start, end)
            event["args"] = {"bytes": int(graph.tensor_bytes[tensor])}
            events.append(event)
        tid += int(lane.max()) + 1
    return events


def assign_lanes(start_s: Floats, end_s: Floats) -> Ints:
    """The first lane that is free at each span's start."""
    lane = np.zeros(len(start_s), dtype=np.int32)
    taken: list[tuple[float, int]] = []  # (end, lane) of the lanes in use
    free: list[int] = []
    for span in np.lexsort((end_s, start_s)).tolist():
        while taken and taken[0][0] <= start_s[span]:
            heapq.heappush(free, heapq.heappop(taken)[1])
        k = heapq.heappop(free) if free else len(taken)
        heapq.heappush(taken, (float(end_s[span]), k))
        lane[span] = k
    return lane
