"""The reference simulator against timelines drawn by hand.

One column of a drawing is one second; a capital marks the op that runs, a digit the tensor that travels,
a dot an idle second. Links move one byte in one second.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from loadmaster.core.cluster import Cluster
from loadmaster.core.errors import PlanError, ProblemError
from loadmaster.core.graph import Graph
from loadmaster.core.problem import Links, Load
from tests.builders import (
    chain,
    cluster_of,
    fan_out,
    graph_of,
    host_cluster,
    loose_ops,
    plan_on,
    problem_of,
    star_cluster,
    two_ops,
)
from tests.reference import NEVER, Result, simulate, throughput

GPU, CPU = 0, 1  # devices of host_cluster(1)


def run(
    graph: Graph,
    cluster: Cluster,
    times: Any,
    device: Sequence[int],
    *,
    priority: Sequence[int] | None = None,
    dispatch: str = "in_order",
    links: str = "shared",
    **costs: Any,
) -> Result:
    problem = problem_of(graph, cluster, times, **costs)
    return simulate(problem, plan_on(device, priority), dispatch=dispatch, links=links)


class TestTransfers:
    def test_consumer_elsewhere_waits_for_the_transfer(self) -> None:
        """
        d0      AAA
        d0->d1  ...00
        d1      .....B
        """
        result = run(two_ops(num_bytes=2), star_cluster(2), [3, 1], [0, 1])
        assert result.op_start == [0, 5]
        assert result.op_end == [3, 6]
        assert result.transfers == [(0, 0, 1, 3, 5)]
        assert result.step_s == 6
        assert result.stuck == []

    def test_tensor_used_twice_on_a_device_is_sent_once(self) -> None:
        """
        d0      A
        d0->d1  .00
        d1      ...BBCC
        """
        result = run(fan_out(2, num_bytes=2), star_cluster(2), [1, 2, 2], [0, 1, 1])
        assert result.transfers == [(0, 0, 1, 1, 3)]
        assert result.op_start == [0, 3, 5]
        assert result.step_s == 7

    def test_two_transfers_take_turns_on_a_shared_link(self) -> None:
        """
        d0      A
        d0 up   .0000
        d1      ...B
        d2      .....C
        """
        result = run(fan_out(2, num_bytes=2), star_cluster(3), 1, [0, 1, 2])
        assert result.transfers == [(0, 0, 1, 1, 3), (0, 0, 2, 3, 5)]
        assert result.op_start == [0, 3, 5]

    def test_parallel_links_do_not_contend(self) -> None:
        """
        d0      A
        d0->d1  .00
        d0->d2  .00
        d1, d2  ...B and ...C
        """
        result = run(fan_out(2, num_bytes=2), star_cluster(3), 1, [0, 1, 2], links="parallel")
        assert result.transfers == [(0, 0, 1, 1, 3), (0, 0, 2, 1, 3)]
        assert result.op_start == [0, 3, 3]

    def test_destinations_are_served_in_order_of_their_first_consumer(self) -> None:
        """
        d0      A
        d0 up   .0000     to d2 (first user), then to d1
        d2      ...BD
        d1      .....C
        """
        result = run(fan_out(3, num_bytes=2), star_cluster(3), 1, [0, 2, 1, 2])
        assert result.transfers == [(0, 0, 2, 1, 3), (0, 0, 1, 3, 5)]
        assert result.op_start == [0, 3, 5, 4]

    def test_ops_that_end_together_book_in_order_of_their_index(self) -> None:
        """
        d0       A
        d1       B
        d2 down  .0011    op 0 books first, whatever its priority
        d2       ...CD
        """
        graph = graph_of({"makes": [2]}, {"makes": [2]}, {"uses": [0]}, {"uses": [1]})
        result = run(graph, star_cluster(3), 1, [0, 1, 2, 2], priority=[1, 0, 2, 3])
        assert result.transfers == [(0, 0, 2, 1, 3), (1, 1, 2, 3, 5)]
        assert result.op_start == [0, 0, 3, 5]

    def test_a_booking_is_never_overtaken(self) -> None:
        """
        d0       A
        d1       BB
        d2 down  .000011    tensor 1 waits for tensor 0,
        d1 up    .....1122  and tensor 2 behind it, over links that are idle till then
        """
        graph = graph_of({"makes": [4]}, {"makes": [2, 2]}, {"uses": [0]}, {"uses": [1]}, {"uses": [2]})
        result = run(graph, star_cluster(4), [1, 2, 1, 1, 1], [0, 1, 2, 2, 3])
        assert result.transfers == [(0, 0, 2, 1, 5), (1, 1, 2, 5, 7), (2, 1, 3, 7, 9)]

    def test_a_route_costs_all_its_latencies_and_its_slowest_link(self) -> None:
        """
        d0 --(0.5 s, 4 B/s)-- --(0.25 s, 2 B/s)-- d1     8 bytes: 0.75 + 8 / 2 = 4.75 s
        """
        cluster = cluster_of({(0, 1): [0, 1], (1, 0): [1]}, kind=[0, 0], rate=[4.0, 2.0], latency=[0.5, 0.25])
        result = run(two_ops(num_bytes=8), cluster, 1, [0, 1])
        assert result.transfers == [(0, 0, 1, 1, 5.75)]

    def test_a_given_transfer_time_replaces_bytes_and_links(self) -> None:
        """
        d0      A
        d0->d1  .0000000
        """
        result = run(two_ops(num_bytes=2), star_cluster(2), 1, [0, 1], transfer_s=7.0)
        assert result.transfers == [(0, 0, 1, 1, 8)]

    @pytest.mark.parametrize(("links", "second"), [("shared", 1), ("half-duplex", 3)])
    def test_half_duplex_lets_a_device_send_or_receive(self, links: str, second: float) -> None:
        """
        d0      A          half-duplex: the second waits until both devices are free
        d1      B
        d0->d1  .00
        d1->d0  ...11      (shared: .11, the two directions are two links)
        """
        graph = graph_of({"makes": [2]}, {"makes": [2]}, {"uses": [1]}, {"uses": [0]})
        result = run(graph, star_cluster(2), 1, [0, 1, 0, 1], links=links)
        assert result.transfers == [(0, 0, 1, 1, 3), (1, 1, 0, second, second + 2)]
        assert result.op_start == [0, 0, second + 2, 3]


class TestHostLinks:
    def test_one_write_then_reads_over_each_readers_port(self) -> None:
        """
        acc0        A
        port 0      .00          one write for three readers
        port 1      ...00
        port 2      ...00
        cpu (3)     ...C         has it when the write ends
        acc1, acc2  .....B and .....D
        """
        result = run(fan_out(3, num_bytes=2), host_cluster(3), 1, [0, 1, 3, 2], links="host")
        assert result.transfers == [(0, 0, 0, 1, 3), (0, 0, 1, 3, 5), (0, 0, 3, 3, 3), (0, 0, 2, 3, 5)]
        assert result.op_start == [0, 5, 3, 5]

    def test_a_port_is_one_resource_for_reads_and_writes(self) -> None:
        """
        acc0    A
        acc1    BB
        port 0  .00...1111    write of 0; read of 1 from its write's end on
        port 1  ..111100      write of 1; read of 0 asked for at 3, when the port is busy
        """
        graph = graph_of({"makes": [2]}, {"makes": [4]}, {"uses": [0]}, {"uses": [1]})
        result = run(graph, host_cluster(2), [1, 2, 1, 1], [0, 1, 1, 0], links="host")
        assert result.transfers == [(0, 0, 0, 1, 3), (1, 1, 1, 2, 6), (0, 0, 1, 6, 8), (1, 1, 0, 6, 10)]
        assert result.op_start == [0, 0, 8, 10]

    def test_a_cpu_writes_nothing_and_is_read_at_once(self) -> None:
        """
        cpu0 (1)  A
        port 0    .00
        acc0      ...B
        cpu1 (2)  .C
        """
        result = run(fan_out(2, num_bytes=2), host_cluster(1, 2), 1, [1, 0, 2], links="host")
        assert result.transfers == [(0, 1, 0, 1, 3), (0, 1, 2, 1, 1)]
        assert result.op_start == [0, 3, 1]

    def test_a_tensor_used_at_home_only_is_not_written(self) -> None:
        """
        acc0  AB
        """
        result = run(two_ops(), host_cluster(1), 1, [0, 0], links="host")
        assert result.transfers == []
        assert result.step_s == 2

    def test_without_a_host_device_every_time_must_be_given(self) -> None:
        graph, cluster = two_ops(), star_cluster(2)
        with pytest.raises(ProblemError, match="give every transfer time"):
            run(graph, cluster, 1, [0, 1], links="host")
        assert run(graph, cluster, 1, [0, 1], links="host", transfer_s=2.0).step_s == 6


class TestDispatch:
    def test_in_order_waits_though_a_later_op_is_ready(self) -> None:
        """
        d0  AAA
        d1  ...00BC    in_order: B is before C, C waits
        d1  C....B     ready
        """
        graph = graph_of({"makes": [2]}, {"uses": [0]}, {})
        ordered = run(graph, star_cluster(2), [3, 1, 1], [0, 1, 1], priority=[0, 1, 2])
        ready = run(graph, star_cluster(2), [3, 1, 1], [0, 1, 1], priority=[0, 1, 2], dispatch="ready")
        assert ordered.op_start == [0, 5, 6]
        assert ready.op_start == [0, 5, 0]

    def test_in_order_breaks_ties_by_index(self) -> None:
        """
        d0  ABC
        """
        assert run(loose_ops(3), star_cluster(1), 1, [0, 0, 0]).op_start == [0, 1, 2]

    def test_an_order_against_the_data_is_stuck(self) -> None:
        """
        d0  (B waits for A, A for its turn after B)
        d1  CC
        """
        graph = graph_of({"makes": [2]}, {"uses": [0]}, {})
        result = run(graph, star_cluster(2), 2, [0, 0, 1], priority=[1, 0, 0])
        assert result.stuck == [0, 1]
        assert result.op_start == [NEVER, NEVER, 0]
        assert result.step_s == 2

    def test_two_devices_that_wait_for_each_other_are_stuck(self) -> None:
        """
        d0  D before A, D needs B
        d1  C before B, C needs A
        """
        graph = graph_of({"makes": [1]}, {"makes": [1]}, {"uses": [0]}, {"uses": [1]})
        result = run(graph, star_cluster(2), 1, [0, 1, 1, 0], priority=[1, 1, 0, 0])
        assert result.stuck == [0, 1, 2, 3]
        assert result.step_s == 0

    def test_ready_runs_the_lowest_priority_first(self) -> None:
        """
        d0  BCA
        """
        result = run(loose_ops(3), star_cluster(1), 1, [0] * 3, priority=[2, 0, 1], dispatch="ready")
        assert result.op_start == [2, 0, 1]

    def test_ready_breaks_ties_by_earlier_ready_then_index(self) -> None:
        """
        d1  A
        d0  BBBECD     E is ready at 2 (from A), C and D at 3 (from B)
        """
        graph = graph_of({"makes": [1]}, {"makes": [1]}, {"uses": [1]}, {"uses": [1]}, {"uses": [0]})
        result = run(graph, star_cluster(2), [1, 3, 1, 1, 1], [1, 0, 0, 0, 0], dispatch="ready")
        assert result.op_start == [0, 0, 4, 5, 3]

    def test_ready_does_not_wait_for_a_better_op(self) -> None:
        """
        d1  A
        d0  CCCB      B has the lower priority number but arrives at 2
        """
        graph = graph_of({"makes": [1]}, {"uses": [0]}, {})
        result = run(graph, star_cluster(2), [1, 1, 3], [1, 0, 0], priority=[0, 0, 1], dispatch="ready")
        assert result.op_start == [0, 3, 0]

    def test_ops_of_no_duration_run_in_rounds_of_one_instant(self) -> None:
        """
        d0  ABC, all at 0
        """
        result = run(chain(3), star_cluster(1), 0, [0, 0, 0])
        assert (result.op_start, result.op_end, result.step_s) == ([0, 0, 0], [0, 0, 0], 0)

    def test_what_a_round_makes_ready_waits_for_the_next_round(self) -> None:
        """
        d1  A           A takes no time, nor does its transfer
        d0  CCCB        B is better than C but ready one round later: C has started
        """
        graph = graph_of({"makes": [1]}, {"uses": [0]}, {})
        result = run(
            graph, star_cluster(2), [0, 1, 3], [1, 0, 0], priority=[0, 0, 1], dispatch="ready", transfer_s=0.0
        )
        assert result.transfers == [(0, 1, 0, 0, 0)]
        assert result.op_start == [0, 3, 0]

    @pytest.mark.parametrize("dispatch", ["in_order", "ready"])
    def test_devices_of_one_engine_run_one_op_at_a_time(self, dispatch: str) -> None:
        """
        d0  AA
        d1  ..BBB    the same chip
        d2  C
        """
        routes = {(i, j): [0] for i in range(3) for j in range(3) if i != j}
        cluster = cluster_of(routes, kind=[0, 0, 0], engine=[7, 7, 8])
        result = run(loose_ops(3), cluster, [2, 3, 1], [0, 1, 2], dispatch=dispatch)
        assert result.op_start == [0, 2, 0]

    def test_an_op_takes_the_time_of_its_devices_kind(self) -> None:
        """
        gpu  A
        cpu  BBBB
        """
        result = run(loose_ops(2), host_cluster(1), [[1, 4], [1, 4]], [GPU, CPU])
        assert result.op_end == [1, 4]

    def test_an_op_where_it_cannot_run_is_refused(self) -> None:
        with pytest.raises(PlanError, match="op 1 cannot run on device 1"):
            run(loose_ops(2), host_cluster(1), [[1, 1], [1, NEVER]], [GPU, CPU])


class TestIssue:
    def test_a_step_of_short_ops_is_bound_by_their_issue(self) -> None:
        """
        thread  aabbcc
        d0      ..A.B.C
        """
        result = run(loose_ops(3), star_cluster(1), 1, [0, 0, 0], issue_s=2.0)
        assert result.op_start == [2, 4, 6]
        assert result.step_s == 7

    def test_long_ops_hide_their_issue(self) -> None:
        """
        thread  abc
        d0      .AAABBBCCC
        """
        assert run(loose_ops(3), star_cluster(1), 3, [0, 0, 0], issue_s=1.0).op_start == [1, 4, 7]

    def test_one_thread_issues_for_all_devices_by_priority(self) -> None:
        """
        thread  bbaa
        d1      ..B
        d0      ....A
        """
        result = run(loose_ops(2), star_cluster(2), 1, [0, 1], priority=[1, 0], issue_s=2.0)
        assert result.op_start == [4, 2]

    def test_an_op_on_the_host_blocks_the_issuing_thread(self) -> None:
        """
        thread  abBBBc
        cpu     ..BBB
        gpu     .A....C
        """
        result = run(loose_ops(3), host_cluster(1), [1, 3, 1], [GPU, CPU, GPU], issue_s=1.0)
        assert result.op_start == [1, 2, 6]

    def test_host_ops_do_not_block_where_issue_is_ignored(self) -> None:
        """
        cpu  BBB
        gpu  AC
        """
        device = [GPU, CPU, GPU]
        free = run(loose_ops(3), host_cluster(1), [1, 3, 1], device)
        ready = run(loose_ops(3), host_cluster(1), [1, 3, 1], device, issue_s=1.0, dispatch="ready")
        assert free.op_start == ready.op_start == [0, 0, 1]

    def test_an_op_without_issue_time_is_issued_with_the_one_before(self) -> None:
        """
        thread  aa
        d0      ..A
        d1      ..B
        """
        assert run(loose_ops(2), star_cluster(2), 1, [0, 1], issue_s=[2.0, 0.0]).op_start == [2, 2]


class TestThroughput:
    """
    acc0: A (3 s) makes tensor 0 (2 s to move), used by B and C on acc1 and by D on the cpu
    acc1: B, C (1 s each); C makes tensor 1 (5 s to move), used by D
    acc0: compute 3, out 2;  acc1: compute 2, in 2 (once), out 5;  cpu: compute 8
    """

    @pytest.mark.parametrize(
        ("load", "cpu_s", "expected"),
        [
            (Load.SUM, 1.0, 9.0),  # acc1: 2 + 2 + 5
            (Load.MAX2, 1.0, 7.0),  # acc1: max(2, 2 + 5)
            (Load.MAX3, 1.0, 5.0),  # acc1: max(2, 2, 5)
            (Load.SUM, 20.0, 20.0),  # the cpu, which pays no transfers
        ],
    )
    def test_the_busiest_device_sets_the_pace(self, load: Load, cpu_s: float, expected: float) -> None:
        graph = graph_of({"makes": [1]}, {"uses": [0]}, {"uses": [0], "makes": [1]}, {"uses": [0, 1]})
        problem = problem_of(
            graph, host_cluster(2), [3, 1, 1, cpu_s], transfer_s=[2.0, 5.0], links=Links.HOST, load=load
        )
        assert throughput(problem, plan_on([0, 1, 1, 2])) == expected

    def test_it_is_defined_through_host_memory_only(self) -> None:
        with pytest.raises(ProblemError, match="links 'host'"):
            throughput(problem_of(two_ops(), host_cluster(1), 1), plan_on([0, 0]))
