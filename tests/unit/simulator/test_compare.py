"""compare: a prediction beside a measurement, every error worked out by hand."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from loadmaster.core.errors import PlanError
from loadmaster.core.timeline import SpanKind, Timeline, TimelineOrigin
from loadmaster.simulator.compare import compare

C, T, S = SpanKind.COMPUTE, SpanKind.TRANSFER, SpanKind.SPILL


def timeline(
    *spans: tuple[SpanKind, int, int, float, float],
    peak: Sequence[int] = (0, 0),
    names: Sequence[str] = ("gpu0", "gpu1"),
) -> Timeline:
    """Spans as kind, resource, item, start, end."""
    kind, resource, item, start, end = zip(*spans, strict=True) if spans else ([], [], [], [], [])
    return Timeline(
        origin=TimelineOrigin.MEASURED,
        device_name=tuple(names),
        kind=np.array(kind, dtype=np.int8),
        resource=np.array(resource, dtype=np.int32),
        item=np.array(item, dtype=np.int32),
        microbatch=np.zeros(len(kind), dtype=np.int32),
        start_s=np.array(start, dtype=np.float64),
        end_s=np.array(end, dtype=np.float64),
        peak_bytes=np.array(peak, dtype=np.int64),
    )


# gpu0: op 0 for 2 s; then its tensor travels for 1 s; gpu1: op 1 for 4 s.
PREDICTED = timeline((C, 0, 0, 0, 2), (T, 1, 0, 2, 3), (C, 1, 1, 3, 7), peak=(90, 40))
# The same, op 0 in 4 s, the transfer in 2 s, op 1 in 4 s.
MEASURED = timeline((C, 0, 0, 0, 4), (T, 1, 0, 4, 6), (C, 1, 1, 6, 10), peak=(100, 20))


def test_errors_are_relative_to_what_was_measured() -> None:
    found = compare(PREDICTED, MEASURED)
    assert found.step_error == pytest.approx(7 / 10 - 1)
    assert found.busy_error.tolist() == pytest.approx([2 / 4 - 1, 4 / 4 - 1])
    assert found.transfer_error == pytest.approx(1 / 2 - 1)
    assert found.peak_error.tolist() == pytest.approx([90 / 100 - 1, 40 / 20 - 1])


def test_ops_are_set_side_by_side_by_index() -> None:
    found = compare(PREDICTED, MEASURED)
    assert found.common_ops.tolist() == [0, 1]
    assert found.op_error.tolist() == pytest.approx([-0.5, 0.0])
    assert found.median_op_error == pytest.approx(0.25)
    assert found.missing_ops.tolist() == []


def test_a_timeline_beside_itself_has_no_error() -> None:
    found = compare(MEASURED, MEASURED)
    assert found.step_error == found.transfer_error == found.median_op_error == 0
    assert not found.busy_error.any()
    assert not found.peak_error.any()


def test_an_op_that_was_not_measured_is_named() -> None:
    found = compare(PREDICTED, timeline((C, 0, 0, 0, 2), (C, 0, 5, 2, 3)))
    assert found.common_ops.tolist() == [0]
    assert found.missing_ops.tolist() == [1]


def test_an_op_measured_several_times_counts_with_its_mean() -> None:
    repeated = timeline((C, 0, 0, 0, 1), (C, 0, 0, 5, 8), (C, 1, 1, 8, 12))
    assert compare(PREDICTED, repeated).op_error.tolist() == pytest.approx([2 / 2 - 1, 0])


def test_writes_to_host_memory_are_transfers() -> None:
    spilt = timeline((S, 0, 0, 0, 3), (T, 1, 0, 3, 4))
    assert compare(PREDICTED, spilt).transfer_error == pytest.approx(1 / 4 - 1)


def test_nothing_beside_nothing_is_right_and_something_beside_nothing_infinitely_wrong() -> None:
    empty = timeline()
    assert compare(empty, empty).step_error == 0
    found = compare(PREDICTED, empty)
    assert found.step_error == math.inf
    assert found.busy_error.tolist() == [math.inf, math.inf]
    assert found.missing_ops.tolist() == [0, 1]
    assert found.median_op_error == 0
    assert compare(empty, PREDICTED).step_error == -1


def test_an_op_measured_to_take_no_time_does_not_spoil_the_median() -> None:
    instant = timeline((C, 0, 0, 0, 0), (C, 1, 1, 0, 2))
    found = compare(PREDICTED, instant)
    assert found.op_error.tolist() == [math.inf, 1.0]
    assert found.median_op_error == 1.0


def test_other_devices_are_refused() -> None:
    with pytest.raises(PlanError, match="gpu0, gpu1 and gpu0, cpu0"):
        compare(PREDICTED, timeline(names=("gpu0", "cpu0")))
