"""Reviews: every figure worked out by hand on tiny plans, or added up to what the simulator says."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadmaster import api
from loadmaster.core.graph import Phase
from loadmaster.core.placement import Placement
from loadmaster.core.problem import Objective
from loadmaster.core.timeline import SpanKind
from loadmaster.review.look import put_off, review_measured, review_plan
from loadmaster.review.waiting import list_waits
from tests.builders import chain, diamond, graph_of, loose_ops, plan_on, problem_of, star_cluster
from tests.strategies import plans, problems


def placed(graph: object, cluster: object, times: object, *device: int) -> Placement:
    return api.plan(problem_of(graph, cluster, times), algorithm=plan_on(device))  # type: ignore[arg-type]


def test_a_device_waits_for_the_op_then_for_the_transfer() -> None:
    # gpu0: |op0|        gpu1:      ....|===|op1|      1 s each, 2 bytes at 1 byte a second
    review = review_plan(placed(chain(2), star_cluster(2), 1.0, 0, 1))
    waits = [(w.device, w.kind, w.cause, w.source, w.seconds) for w in review.waits]
    assert waits == [
        (0, "end", "", -1, 3.0),
        (1, "transfer", "op0", 0, 2.0),
        (1, "op", "op0", 0, 1.0),
    ]


def test_a_transfer_that_queues_for_its_port_is_told_apart() -> None:
    # op0 sends 2 bytes to gpu1 and 2 bytes to gpu2: the second waits 2 s for the port of gpu0
    graph = graph_of({"makes": [2, 2]}, {"uses": [0]}, {"uses": [1]})
    review = review_plan(placed(graph, star_cluster(3), 1.0, 0, 1, 2))
    mine = {w.kind: w.seconds for w in review.waits if w.device == 2}
    assert mine == {"op": 1.0, "queue": 2.0, "transfer": 2.0}


def test_two_parts_of_a_chip_wait_for_each_other_only_while_the_other_computes() -> None:
    # one engine: op0 1 s on part 0, op1 2 s on part 1, op2 on part 0; nothing flows between them
    cluster = replace(star_cluster(2), engine=np.zeros(2, dtype=np.int32))
    problem = problem_of(loose_ops(3), cluster, [[1.0], [2.0], [1.0]])
    answer = api.plan(problem, algorithm=plan_on([0, 1, 0], [0, 1, 2]))
    assert answer.plan is not None
    timeline = review_plan(answer).timeline
    waits = [(w.device, w.kind, w.seconds) for w in list_waits(problem, timeline)]
    assert sorted(waits) == [(0, "engine", 2.0), (1, "end", 1.0), (1, "engine", 1.0)]
    shift = np.array([0.0, 0.0, 5.0])
    later = replace(timeline, start_s=timeline.start_s + shift, end_s=timeline.end_s + shift)
    assert [(w.kind, w.seconds) for w in list_waits(problem, later) if w.device == 0] == [
        ("launch", 5.0),
        ("engine", 2.0),
    ]


def test_a_device_without_ops_waits_for_nothing() -> None:
    review = review_plan(placed(chain(2), star_cluster(2), 1.0, 0, 0))
    assert [(w.kind, w.seconds) for w in review.waits] == [("empty", 2.0)]


def test_the_critical_path_takes_the_slow_side_of_a_diamond() -> None:
    review = review_plan(placed(diamond(), star_cluster(2), [[1.0], [1.0], [9.0], [1.0]], 0, 0, 1, 0))
    spans = [(int(review.timeline.kind[s]), int(review.timeline.item[s])) for s in review.critical_ops]
    compute, transfer = int(SpanKind.COMPUTE), int(SpanKind.TRANSFER)
    assert spans == [(compute, 0), (transfer, 0), (compute, 2), (transfer, 2), (compute, 3)]
    assert "ref1" in review.limit


def test_memory_is_told_apart_by_kind() -> None:
    graph = graph_of(
        {"phase": 3, "kind": "param", "resident_bytes": 30, "makes": [{"num_bytes": 10, "storage": -1}]},
        {"uses": [0], "makes": [4], "workspace_bytes": 7},
        {"uses": [1]},
    )
    review = review_plan(placed(graph, star_cluster(1), [[0.0], [1.0], [1.0]], 0, 0, 0))
    (curve,) = review.memory
    assert curve.peak_bytes == 30 + 4 + 7
    top = curve.held_bytes[curve.held_bytes.sum(axis=1).argmax()].tolist()
    assert top == [10, 0, 20, 4, 7, 0, 0]  # of 30 resident bytes 10 are the weight itself


def test_links_carry_what_crosses_them() -> None:
    review = review_plan(placed(chain(3, 5), star_cluster(2), 1.0, 0, 1, 0))
    assert {(link.name, link.num_bytes, link.busy_s) for link in review.links} == {
        ("ref0 up", 5, 5.0),
        ("ref1 down", 5, 5.0),
        ("ref1 up", 5, 5.0),
        ("ref0 down", 5, 5.0),
    }


def test_modules_stand_in_the_order_in_which_they_run_not_in_that_of_their_weights() -> None:
    graph = graph_of(
        {"module": "first", "phase": Phase.PARAM, "makes": [4]},
        {"module": "last", "phase": Phase.PARAM, "makes": [4]},
        {"module": "first", "uses": [0], "makes": [1]},
        {"module": "middle", "uses": [2], "makes": [1]},
        {"module": "last", "uses": [1, 3]},
    )
    review = review_plan(placed(graph, star_cluster(1), 1.0, *[0] * 5))
    assert [module.path for module in review.modules] == ["", "first", "middle", "last"]


def test_a_plan_that_trains_more_slowly_than_it_says_is_told_of_steps_alone() -> None:
    # torch runs the backward pass of op1 first; the plan that of op0, whose output gpu1 waits for
    graph = graph_of(
        {"makes": [1]},
        {"makes": [1]},
        {"phase": Phase.BACKWARD, "mirror": 1, "uses": [1]},
        {"phase": Phase.BACKWARD, "mirror": 0, "uses": [0], "makes": [1]},
        {"uses": [2]},
    )
    problem = problem_of(replace(graph, capture="joint"), star_cluster(2), 1.0)
    answer = api.plan(problem, algorithm=plan_on([0, 0, 0, 0, 1], [0, 1, 3, 2, 4]))
    assert answer.score_s == 5.0
    assert put_off(answer) == ["delays some gradients, and torch does not: in training this step takes 6 s"]
    assert "in training this step takes 6 s" in " ".join(review_plan(answer).notes)
    passes = replace(answer, problem=replace(problem, objective=Objective.THROUGHPUT))
    assert put_off(passes) == []
    assert put_off(api.plan(problem, algorithm=plan_on([0, 0, 0, 0, 1], [0, 1, 2, 3, 4]))) == []


def test_modules_add_up_to_the_whole() -> None:
    graph = graph_of({"module": "a.b"}, {"module": "a"}, {"module": "c"}, {})
    answer = placed(graph, star_cluster(2), [[1.0], [2.0], [4.0], [8.0]], 0, 1, 1, 0)
    rows = {row.path: row for row in review_plan(answer).modules}
    assert rows[""].seconds == (9.0, 6.0)
    assert rows["a"].seconds == (1.0, 2.0)
    assert rows["a.b"].depth == 2
    assert [*rows] == ["", "a", "a.b", "c"]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_busy_and_idle_fill_the_step_and_memory_peaks_where_the_simulator_says(data: st.DataObject) -> None:
    problem = data.draw(problems())
    plan = data.draw(plans(problem))
    answer = api.plan(problem, algorithm=plan)
    if answer.plan is None:
        return
    review = review_plan(answer)
    timeline = review.timeline
    eps = max(timeline.step_s * 1e-6, 1e-9)
    for device in range(len(timeline.device_name)):
        idle = sum(wait.seconds for wait in review.waits if wait.device == device)
        spans = (timeline.kind == SpanKind.COMPUTE) & (timeline.resource == device)
        busy = _union(timeline.start_s[spans], timeline.end_s[spans])
        assert busy + idle == pytest.approx(timeline.step_s, abs=eps * (1 + len(timeline.kind)))
        assert review.memory[device].peak_bytes == timeline.peak_bytes[device]
        assert review.memory[device].held_bytes.min() >= 0
        assert review.memory[device].held_bytes.sum(axis=1).max() == timeline.peak_bytes[device]
    path = np.array(review.critical_ops)
    if len(path):
        assert timeline.end_s[path[-1]] == timeline.step_s
        assert (timeline.start_s[path[1:]] >= timeline.end_s[path[:-1]] - eps).all()


def _union(
    start: "np.ndarray[tuple[int], np.dtype[np.float64]]", end: "np.ndarray[tuple[int], np.dtype[np.float64]]"
) -> float:
    total, free = 0.0, 0.0
    for at in np.argsort(start, kind="stable"):
        total += max(0.0, float(end[at]) - max(free, float(start[at])))
        free = max(free, float(end[at]))
    return total


def test_the_timeline_of_another_plan_is_refused() -> None:
    one = placed(chain(2), star_cluster(2), 1.0, 0, 1)
    other = placed(chain(5), star_cluster(2), 1.0, 0, 1, 0, 1, 0)
    assert one.plan is not None
    assert other.plan is not None
    with pytest.raises(Exception, match="of which there are 2"):
        review_measured(one.problem, one.plan, api.simulate(other.problem, other.plan))
