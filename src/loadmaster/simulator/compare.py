"""compare: how far a predicted timeline is from a measured one, op by op and device by device."""

from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Floats, Ints
from loadmaster.core.errors import PlanError
from loadmaster.core.timeline import SpanKind, Timeline


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """Errors are predicted / measured - 1: negative means the prediction was too fast or too small."""

    step_error: float
    busy_error: Floats  # [D]
    transfer_error: float  # of total transfer time
    peak_error: Floats  # [D]
    common_ops: Ints  # ops in both
    op_error: Floats  # [len(common_ops)] of each op's time
    median_op_error: float  # of absolute values
    missing_ops: Ints  # predicted but not measured


def compare(predicted: Timeline, measured: Timeline) -> Comparison:
    """Set a prediction beside a measurement (any two timelines of the same devices)."""
    if predicted.device_name != measured.device_name:
        raise PlanError(
            f"timelines of different devices: {', '.join(predicted.device_name)} and"
            f" {', '.join(measured.device_name)}"
        )
    ours, our_s = _op_seconds(predicted)
    theirs, their_s = _op_seconds(measured)
    common, at, there = np.intersect1d(ours, theirs, return_indices=True)
    op_error = _relative_error(our_s[at], their_s[there])
    finite = np.abs(op_error[np.isfinite(op_error)])
    return Comparison(
        step_error=float(_relative_error(np.array([predicted.step_s]), np.array([measured.step_s]))[0]),
        busy_error=_relative_error(predicted.busy_s, measured.busy_s),
        transfer_error=float(_relative_error(_transfer_s(predicted), _transfer_s(measured))[0]),
        peak_error=_relative_error(
            predicted.peak_bytes.astype(np.float64), measured.peak_bytes.astype(np.float64)
        ),
        common_ops=common.astype(np.int32),
        op_error=op_error,
        median_op_error=float(np.median(finite)) if len(finite) else 0.0,
        missing_ops=np.setdiff1d(ours, theirs).astype(np.int32),
    )


def _op_seconds(timeline: Timeline) -> tuple[Ints, Floats]:
    """Ops that ran and the mean seconds of each over its spans (micro-batches, repetitions)."""
    compute = timeline.kind == SpanKind.COMPUTE
    ops, inverse, count = np.unique(timeline.item[compute], return_inverse=True, return_counts=True)
    total = np.zeros(len(ops))
    np.add.at(total, inverse, (timeline.end_s - timeline.start_s)[compute])
    return ops, total / np.maximum(count, 1)


def _transfer_s(timeline: Timeline) -> Floats:
    moved = timeline.kind != SpanKind.COMPUTE
    return np.array([(timeline.end_s - timeline.start_s)[moved].sum()])


def _relative_error(ours: Floats, theirs: Floats) -> Floats:
    """ours / theirs - 1; 0 where both are 0, infinite where only theirs is."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = ours / theirs - 1.0
    return np.where((ours == 0) & (theirs == 0), 0.0, ratio)
