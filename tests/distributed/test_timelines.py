"""Times of links: from what ranks sent and what they waited for."""

from typing import Any

import pytest

from loadmaster.cluster.parse import parse_cluster
from loadmaster.runtime.distributed.pipeline.layout import PipelineLayout
from loadmaster.runtime.distributed.pipeline_run import link_times

LAYOUT = PipelineLayout(2, 2, (3,), (), ((0, 1),), "1f1b", frozenset())


def report(**given: Any) -> dict[str, Any]:
    return {"spans": [], "arrivals": [], "sent": [], **given}


def test_a_transfer_is_measured_where_the_receiver_waited_for_it() -> None:
    sends = [("SEND_F", 0, batch, begin, begin) for batch, begin in enumerate((1.0, 2.0, 3.0))]
    waits = [
        ("RECV_F", 1, 0, 0.5, 1.25),
        ("RECV_F", 1, 1, 1.5, 2.75),
        ("RECV_F", 1, 2, 9.0, 9.1),  # it lay there since nobody knows when
    ]
    reports = [report(spans=sends, sent=[("SEND_F", 0, 125_000_000)]), report(arrivals=waits)]
    cluster = parse_cluster("cpu#0-1GB | cpu#0-1GB ; inter=1gbit")
    (found,) = link_times(reports, LAYOUT, cluster)
    assert (found.stage, found.to_stage, found.rank, found.to_rank) == (0, 1, 0, 1)
    assert found.measured_s == pytest.approx(0.5)  # the median of 0.25 and 0.75
    assert found.predicted_s == pytest.approx(1.0, rel=0.01)


def test_a_transfer_that_nobody_waited_for_has_no_time() -> None:
    sent = report(spans=[("SEND_B", 1, 0, 1.0, 1.0)], sent=[("SEND_B", 1, 10)])
    came = report(arrivals=[("RECV_B", 0, 0, 2.0, 2.1)])
    (found,) = link_times([came, sent], LAYOUT, parse_cluster("cpu#0-1GB, cpu#1-1GB"))
    assert (found.rank, found.to_rank, found.measured_s) == (1, 0, None)
