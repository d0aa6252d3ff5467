"""The Chrome trace of a timeline: what Perfetto needs, every op once, lanes that nest, names as data."""

import dataclasses
import json
from collections import Counter
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from loadmaster.core.graph import Graph
from loadmaster.core.problem import Links
from loadmaster.core.timeline import SpanKind, Timeline, TimelineOrigin
from loadmaster.report.trace import chrome_trace, study_trace
from loadmaster.simulator.events.engine import simulate
from tests.builders import chain, diamond, fan_out, graph_of, plan_on, problem_of, star_cluster

EVIL = '[bold]x[/bold]\n<script>alert("1")</script>\\\x1b[31m\u202e😀'


class Span(NamedTuple):
    """What a device did, as a study tells it."""

    device: str
    lane: str
    name: str
    trial: str
    start_s: float
    end_s: float


def trace_of(timeline: Timeline, graph: Graph) -> dict[str, Any]:
    trace = json.loads(chrome_trace(timeline, graph))
    assert isinstance(trace, dict)
    return trace


def slices(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def names(trace: dict[str, Any], what: str) -> dict[tuple[int, int], str]:
    """Names of processes or threads by (pid, tid)."""
    events = (event for event in trace["traceEvents"] if event["ph"] == "M" and event["name"] == what)
    return {(event["pid"], event["tid"]): event["args"]["name"] for event in events}


def spans(*rows: tuple[SpanKind, int, int, float, float], devices: int = 2) -> Timeline:
    """A timeline from (kind, resource, item, start, end)."""
    kind, resource, item, start_s, end_s = (list(column) for column in zip(*rows, strict=True))
    return Timeline(
        origin=TimelineOrigin.SIMULATED,
        device_name=tuple(f"d{d}" for d in range(devices)),
        kind=np.array(kind),
        resource=np.array(resource),
        item=np.array(item),
        microbatch=np.zeros(len(kind), dtype=np.int32),
        start_s=np.array(start_s),
        end_s=np.array(end_s),
        peak_bytes=np.arange(devices) + 5,
    )


# top on d0 in 0..1, its 2 bytes to d1 in 1..3, left on d0 in 1..2, right on d1 in 3..4,
# right's 2 bytes back in 4..6, bottom on d0 in 6..7.
#
#     d0   |top |left|              |bottom|
#     d1             |right|
#     link      [top     ][right   ]


def diamond_trace() -> dict[str, Any]:
    graph = diamond()
    problem = problem_of(graph, star_cluster(2), [1.0, 1.0, 1.0, 1.0])
    return trace_of(simulate(problem, plan_on([0, 0, 1, 0])), graph)


def test_the_diamond_is_drawn_as_it_was_worked_out_by_hand() -> None:
    drawn = {(e["name"], e["cat"]): (e["pid"], e["ts"], e["dur"]) for e in slices(diamond_trace())}
    assert drawn == {
        ("top", "forward"): (0, 0.0, 1e6),
        ("left", "forward"): (0, 1e6, 1e6),
        ("right", "forward"): (1, 3e6, 1e6),
        ("bottom", "forward"): (0, 6e6, 1e6),
        ("top", "transfer"): (2, 1e6, 2e6),
        ("right", "transfer"): (2, 4e6, 2e6),
    }


def test_the_document_has_what_perfetto_needs() -> None:
    trace = diamond_trace()
    assert trace["displayTimeUnit"] == "ms"
    assert trace["otherData"] == {
        "origin": "simulated",
        "step_s": 7.0,
        "peak_bytes": {"ref0": 4, "ref1": 4},  # never more than two tensors of 2 bytes at a time
    }
    for event in slices(trace):
        assert {"name", "cat", "pid", "tid", "ts", "dur", "args"} <= event.keys()
        assert event["ts"] >= 0
        assert event["dur"] >= 0
    assert names(trace, "process_name") == {(0, 0): "ref0", (1, 0): "ref1", (2, 0): "links"}
    threads = names(trace, "thread_name")
    assert {threads[e["pid"], e["tid"]] for e in slices(trace)} == {"ops", "ref0 to ref1", "ref1 to ref0"}


def test_every_op_is_drawn_once_on_its_device() -> None:
    graph = chain(50)
    device = [op % 3 for op in range(50)]
    timeline = simulate(problem_of(graph, star_cluster(3), 1.0), plan_on(device))
    ops = [event for event in slices(trace_of(timeline, graph)) if event["cat"] != "transfer"]
    assert Counter(event["name"] for event in ops) == Counter(graph.op_name)
    assert {event["name"]: event["pid"] for event in ops} == dict(zip(graph.op_name, device, strict=True))


def test_transfers_that_overlap_get_lanes_of_their_own() -> None:
    graph = graph_of({"makes": [10, 20, 30]}, {"uses": [0]}, {"uses": [1]}, {"uses": [2]})
    problem = problem_of(graph, star_cluster(2), 1.0, links=Links.PARALLEL)
    moved = [
        event
        for event in slices(trace_of(simulate(problem, plan_on([0, 1, 1, 1])), graph))
        if event["cat"] == "transfer"
    ]
    assert [(event["ts"], event["dur"]) for event in moved] == [(1e6, 1e7), (1e6, 2e7), (1e6, 3e7)]
    assert len({event["tid"] for event in moved}) == 3
    assert [event["args"]["bytes"] for event in moved] == [10, 20, 30]


def test_a_lane_is_used_again_once_it_is_free() -> None:
    rows = [(SpanKind.TRANSFER, 1, 0, start, end) for start, end in ((0, 4), (1, 2), (2, 3), (3, 9), (4, 5))]
    trace = trace_of(spans(*rows), chain(2))
    assert [event["tid"] for event in slices(trace)] == [0, 1, 1, 1, 0]
    assert set(names(trace, "thread_name").values()) == {"ops", "d0 to d1"}


def test_slices_of_a_lane_never_overlap_whatever_the_rounding() -> None:
    ends = np.cumsum(np.full(2000, 0.7e-9))  # a start of 1.4 ns is 1, a length of 0.7 ns would be 1, too
    starts = np.concatenate([[0.0], ends[:-1]])
    rows = [(SpanKind.COMPUTE, 0, 0, s, e) for s, e in zip(starts.tolist(), ends.tolist(), strict=True)]
    drawn = slices(trace_of(spans(*rows), chain(1)))
    whole = [(round(event["ts"] * 1000), round(event["dur"] * 1000)) for event in drawn]
    assert all(start + length <= later for (start, length), (later, _) in pairwise(whole))


def test_a_write_to_host_memory_is_named() -> None:
    trace = trace_of(spans((SpanKind.SPILL, 3, 0, 0.0, 1.0)), chain(2))
    assert "d1 to host memory" in names(trace, "thread_name").values()


def test_names_are_data_whatever_they_hold() -> None:
    graph = dataclasses.replace(fan_out(1), op_name=(EVIL, "user"), module=(EVIL, ""), op_kind=(EVIL, "op"))
    timeline = dataclasses.replace(spans((SpanKind.COMPUTE, 0, 0, 0.0, 1.0)), device_name=(EVIL, "d1"))
    data = chrome_trace(timeline, graph)
    assert b"\n" not in data
    trace = json.loads(data)
    (event,) = slices(trace)
    assert (event["name"], event["args"]["module"], event["args"]["kind"]) == (EVIL, EVIL, EVIL)
    assert names(trace, "process_name")[0, 0] == EVIL
    assert trace["otherData"]["peak_bytes"] == {EVIL: 5, "d1": 6}


def test_a_name_that_is_not_unicode_still_gives_json() -> None:
    graph = dataclasses.replace(chain(1), op_name=("a\udcffb",))
    (event,) = slices(json.loads(chrome_trace(spans((SpanKind.COMPUTE, 0, 0, 0.0, 1.0)), graph)))
    assert event["name"] == "a\udcffb"


def test_lanes_of_a_study_are_threads_and_slices_that_touch_do_not_overlap() -> None:
    first = Span("cpu#0", "up", "unit 1", "a", 0.1, 0.1 + 1.4e-9)
    second = Span("cpu#0", "compute", "unit 1", "b\ud800", 0.1 + 1.4e-9, 0.3)
    third = Span("cpu#1", "up", "unit 2", "a", 0.3, 0.2)  # two clocks may differ by a little
    trace = json.loads(study_trace([first, second, third]))
    named = [e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"]
    assert named == ["cpu#0", "cpu#1", "up", "compute", "up"]
    one, two, three = slices(trace)
    assert (one["pid"], two["pid"], three["pid"]) == (0, 0, 1)
    assert (one["tid"], two["tid"], three["tid"]) == (0, 1, 2)
    assert round(one["ts"] * 1000) + round(one["dur"] * 1000) == round(two["ts"] * 1000)
    assert three["dur"] == 0
    assert (two["name"], two["cat"], two["args"]) == ("b\ud800: unit 1", "compute", {"trial": "b\ud800"})
