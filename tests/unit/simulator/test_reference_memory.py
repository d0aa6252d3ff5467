"""The reference simulator's memory against peaks worked out by hand.

One column of a drawing is one second; a capital marks the op that runs, a digit the tensor that travels,
a dot an idle second. Links move one byte in one second.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from loadmaster.core.cluster import Cluster
from loadmaster.core.graph import Graph, Phase
from loadmaster.graph.build import NO_STORAGE
from tests.builders import cluster_of, diamond, graph_of, host_cluster, plan_on, problem_of, star_cluster
from tests.reference import Result, simulate


def run(
    graph: Graph,
    cluster: Cluster,
    times: Any,
    device: Sequence[int],
    *,
    priority: Sequence[int] | None = None,
    links: str = "shared",
) -> Result:
    problem = problem_of(graph, cluster, times)
    return simulate(problem, plan_on(device, priority), dispatch="in_order", links=links)


def test_a_diamond_peaks_when_three_tensors_live() -> None:
    """
    d0      top  left  right  bottom
    top     ================
    left         ===================
    right              =============
    bytes   2    4     6      4
    """
    assert run(diamond(num_bytes=2), star_cluster(1), 1, [0] * 4).peak_bytes == [6]


def test_workspace_is_held_while_its_op_runs() -> None:
    """
    d0         AB      back to back: A's workspace is freed before B's is taken
    workspace  54
    resident   12, of both, always
    """
    graph = graph_of(
        {"workspace_bytes": 5, "resident_bytes": 10}, {"workspace_bytes": 4, "resident_bytes": 2}
    )
    assert run(graph, star_cluster(2), 1, [0, 0]).peak_bytes == [17, 0]


def test_a_device_that_only_stores_peaks_at_its_residents() -> None:
    graph = graph_of({"resident_bytes": 9, "phase": Phase.PARAM, "makes": [9]}, {})
    assert run(graph, star_cluster(2), [0, 1], [1, 0]).peak_bytes == [0, 9]


@pytest.mark.parametrize(("keep", "peak"), [(False, 5), (True, 7)])
def test_a_kept_tensor_lives_to_the_end(keep: bool, peak: int) -> None:
    """
    d0        ABC
    A: 2      ==(=)    kept or not
    B: 2       ==
    C: 3        =
    bytes     245 or 247
    """
    graph = graph_of(
        {"makes": [{"num_bytes": 2, "keep": keep}]},
        {"uses": [0], "makes": [2]},
        {"uses": [1], "makes": [3]},
    )
    assert run(graph, star_cluster(1), 1, [0] * 3).peak_bytes == [peak]


@pytest.mark.parametrize(("keep", "peaks"), [(False, [5, 5]), (True, [9, 9])])
def test_a_kept_tensor_stays_on_every_device_it_was_sent_to(keep: bool, peaks: list[int]) -> None:
    """
    d0      ACCCCE     E has a workspace of 5 when the transfer has ended
    d0->d1  .0000
    d1      .....BD    B uses the 4 bytes, D has a workspace of 5 after it
    """
    graph = graph_of(
        {"makes": [{"num_bytes": 4, "keep": keep}]},
        {"uses": [0]},
        {},
        {"workspace_bytes": 5},
        {"workspace_bytes": 5},
    )
    result = run(graph, star_cluster(2), [1, 1, 4, 1, 1], [0, 1, 0, 1, 0])
    assert result.op_start == [0, 5, 1, 6, 5]
    assert result.peak_bytes == peaks


def test_a_copy_is_freed_after_its_last_use() -> None:
    """
    d0      A
    d0->d1  .0000
    d1      .....BCD     4 bytes from the start of the transfer to the end of C
    bytes   04444669     B and C have a workspace of 2, D of 9
    """
    graph = graph_of(
        {"makes": [4]},
        {"uses": [0], "workspace_bytes": 2},
        {"uses": [0], "workspace_bytes": 2},
        {"workspace_bytes": 9},
    )
    assert run(graph, star_cluster(2), 1, [0, 1, 1, 1]).peak_bytes == [4, 9]


def test_a_copy_takes_memory_from_the_start_of_its_transfer() -> None:
    """
    d0      A
    d0->d1  .0000
    d1      CC...B      C has a workspace of 3 and ends at 2, when 4 bytes are on their way
    """
    graph = graph_of({"makes": [4]}, {"uses": [0]}, {"workspace_bytes": 3})
    late = run(graph, star_cluster(2), [1, 1, 2], [0, 1, 1], priority=[0, 2, 1])
    early = run(graph, star_cluster(2), [1, 1, 1], [0, 1, 1], priority=[0, 2, 1])
    assert late.peak_bytes == [4, 7]
    assert early.peak_bytes == [4, 4]  # C ends at the instant the transfer starts: frees come first


def test_a_waiting_transfer_takes_memory_at_the_source_only() -> None:
    """
    d0     A
    d0 up  .00111     tensor 1 leaves at 3: 5 bytes at home until then, 3 until 6
    d2     DDD...C    D with a workspace of 9 is over when the 3 bytes start to come
    """
    graph = graph_of({"makes": [2, 3]}, {"uses": [0]}, {"uses": [1]}, {"workspace_bytes": 9})
    result = run(graph, star_cluster(3), [1, 1, 1, 3], [0, 1, 2, 2], priority=[0, 1, 3, 2])
    assert result.transfers == [(0, 0, 1, 1, 3), (1, 0, 2, 3, 6)]
    assert result.peak_bytes == [5, 2, 9]


def test_a_tensor_nobody_uses_is_freed_by_its_producer() -> None:
    """
    d0     AB
    bytes  54
    """
    graph = graph_of({"makes": [5]}, {"makes": [4]})
    assert run(graph, star_cluster(1), 1, [0, 0]).peak_bytes == [5]


def test_a_view_prolongs_its_base() -> None:
    """
    d0    ABCD      B views the 4 bytes of A, D uses the view
    base  ====
    C: 3    =       7 bytes while C runs
    """
    graph = graph_of(
        {"makes": [4]},
        {"uses": [0], "makes": [{"num_bytes": 4, "storage": 0}]},
        {"makes": [3]},
        {"uses": [1]},
    )
    assert run(graph, star_cluster(1), 1, [0] * 4).peak_bytes == [7]


def test_a_view_made_elsewhere_lives_in_the_copy() -> None:
    """
    d0      AFFFFE     4 bytes at home until the transfer ends at 5; E has a workspace of 6
    d0->d1  .0000
    d1      .....BCD   B views the copy, C has a workspace of 3, D uses the view: 4 + 3
    """
    graph = graph_of(
        {"makes": [4]},
        {"uses": [0], "makes": [{"num_bytes": 4, "storage": 0}]},
        {"workspace_bytes": 3},
        {"uses": [1]},
        {"workspace_bytes": 6},
        {},
    )
    times = [1, 1, 1, 1, 1, 4]
    result = run(graph, star_cluster(2), times, [0, 1, 1, 1, 0, 0], priority=[0, 1, 2, 3, 5, 4])
    assert result.op_start == [0, 5, 6, 7, 5, 1]
    assert result.peak_bytes == [6, 7]


def test_a_view_sent_elsewhere_is_a_copy_of_its_own_size() -> None:
    """
    d0      AB          B views one byte of A's four
    d0->d1  ..1
    d1      ...C        1 byte
    d0      ..DDD       4 + 2: the base lives until the view has left
    """
    graph = graph_of(
        {"makes": [4]},
        {"uses": [0], "makes": [{"num_bytes": 1, "storage": 0}]},
        {"uses": [1]},
        {"workspace_bytes": 2},
    )
    result = run(graph, star_cluster(2), [1, 1, 1, 3], [0, 0, 1, 0])
    assert result.transfers == [(1, 0, 1, 2, 3)]
    assert result.peak_bytes == [6, 1]


def test_a_kept_view_keeps_the_memory_it_lives_in() -> None:
    """
    d0    ABC       C takes 3 beside A's 4, which B's kept view holds
    """
    graph = graph_of(
        {"makes": [4]},
        {"uses": [0], "makes": [{"num_bytes": 1, "storage": 0, "keep": True}]},
        {"makes": [3]},
    )
    assert run(graph, star_cluster(1), 1, [0] * 3).peak_bytes == [7]


def test_a_weight_is_resident_at_home_and_a_copy_elsewhere() -> None:
    """
    d0      P           8 bytes resident (weight and optimizer state), the weight takes no more
    d0->d1  0000
    d1      ....B       a copy of 4
    """
    graph = graph_of({"phase": Phase.PARAM, "resident_bytes": 8, "makes": [4]}, {"uses": [0]})
    result = run(graph, star_cluster(2), [0, 1], [0, 1])
    assert result.transfers == [(0, 0, 1, 0, 4)]
    assert result.peak_bytes == [8, 4]


def test_a_tensor_without_storage_takes_nothing_anywhere() -> None:
    """
    d0      A
    d0->d1  .0000
    d1      .....B
    """
    graph = graph_of({"makes": [{"num_bytes": 4, "storage": NO_STORAGE}]}, {"uses": [0]})
    result = run(graph, star_cluster(2), 1, [0, 1])
    assert result.step_s == 6
    assert result.peak_bytes == [0, 0]


def test_devices_of_one_engine_keep_their_memory_apart() -> None:
    """
    d0  A       4 bytes, then the transfer
    d1  .....B  the copy of 4, workspace 1
    """
    cluster = cluster_of({(0, 1): [0], (1, 0): [0]}, kind=[0, 0], engine=[0, 0])
    graph = graph_of({"makes": [4]}, {"uses": [0], "workspace_bytes": 1})
    assert run(graph, cluster, 1, [0, 1]).peak_bytes == [4, 5]


@pytest.mark.parametrize(("busy_s", "start", "peak"), [(1, 2, 7), (4, 5, 4)])
def test_through_host_memory_the_source_is_free_at_the_end_of_its_write(
    busy_s: float, start: float, peak: int
) -> None:
    """
    acc0           ACCCCD     D has a workspace of 3, beside A's 4 bytes or after them
    port 0         .0000
    ports 1 and 2  .....0000
    acc1, acc2     .........B and .........E
    """
    graph = graph_of({"makes": [4]}, {"uses": [0]}, {}, {"workspace_bytes": 3}, {"uses": [0]})
    result = run(graph, host_cluster(3), [1, 1, busy_s, 1, 1], [0, 1, 0, 0, 2], links="host")
    assert result.op_start == [0, 9, 1, start, 9]
    assert result.peak_bytes == [peak, 4, 4, 0]


def test_reads_from_host_memory_free_nothing_at_the_source() -> None:
    """
    acc0    ACCCCCCCCCD    D uses A's 4 bytes at home, after the read, with a workspace of 3
    port 0  .0000
    port 1  .....0000
    """
    graph = graph_of({"makes": [4]}, {"uses": [0]}, {}, {"uses": [0], "workspace_bytes": 3})
    result = run(graph, host_cluster(2), [1, 1, 9, 1], [0, 1, 0, 0], links="host")
    assert result.op_start == [0, 9, 1, 10]
    assert result.peak_bytes == [7, 4, 0]


@pytest.mark.parametrize(("busy_s", "start", "peak"), [(1, 2, 7), (4, 5, 4)])
def test_a_cpu_holds_its_tensor_until_it_has_been_read(busy_s: float, start: float, peak: int) -> None:
    """
    cpu     ACCCCD     D has a workspace of 3, beside A's 4 bytes or after them
    port 0  .0000
    acc0    .....B
    """
    graph = graph_of({"makes": [4]}, {"uses": [0]}, {}, {"workspace_bytes": 3})
    result = run(graph, host_cluster(1), [1, 1, busy_s, 1], [1, 0, 1, 1], links="host")
    assert result.op_start == [0, 5, 1, start]
    assert result.peak_bytes == [4, peak]
