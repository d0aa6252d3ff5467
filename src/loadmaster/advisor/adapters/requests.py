"""What every adapter makes of its scheduler: jobs that wait, the state of the cluster, and the entry of an
advice."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadmaster.advisor.adapters.log import AdviceEntry
from loadmaster.advisor.advice import Advice
from loadmaster.advisor.advise import advise, unknown_curve
from loadmaster.advisor.jobs.curve import ScalingCurve, measured_curve
from loadmaster.advisor.jobs.job import Job
from loadmaster.advisor.jobs.state import ClusterState
from loadmaster.core.errors import FileError, FormatError, LoadmasterError

_MAX_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """A job that waits in a scheduler's queue."""

    id: str
    name: str
    requested: int
    deadline_s: float | None  # from now
    raw: Mapping[str, Any]


def read_recorded(path: str | Path) -> dict[str, Any]:
    """A recorded answer of a scheduler, as JSON."""
    file = Path(path)
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise FileError(f"{path} is larger than {_MAX_BYTES} bytes")
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as trouble:
        raise FileError(f"cannot read {path}: {trouble}") from None
    except (ValueError, RecursionError) as trouble:
        raise FormatError(f"{path} is not JSON: {trouble}") from None
    if not isinstance(document, dict):
        raise FormatError(f"{path} is not a JSON object")
    return document


def curve_of(name: str, curves: Any) -> ScalingCurve:
    """The measured curve of a job's name, if one is recorded."""
    found = curves.get(name) if isinstance(curves, Mapping) else None
    if not found:
        return unknown_curve()
    if not isinstance(found, Mapping):
        raise FormatError(f"the curve of {name!r} is not a map from devices to seconds")
    try:
        return measured_curve({int(n): float(t) for n, t in found.items()})
    except (TypeError, ValueError) as trouble:
        raise FormatError(f"the curve of {name!r}: {trouble}") from None


def advise_pending(
    pending: Pending, state: ClusterState, curve: ScalingCurve, scheduler: str
) -> tuple[Advice | None, AdviceEntry]:
    """Advice on one job; what cannot be advised on is an entry too, never a failure of the queue."""
    limit = math.inf if pending.deadline_s is None else pending.deadline_s
    try:
        job = Job(pending.name, curve, limit, requested=pending.requested)
        answer = advise(job, state)
    except LoadmasterError as trouble:
        return None, AdviceEntry(
            pending.id, scheduler, False, pending.requested, 0, str(trouble), pending.deadline_s
        )
    low, high = answer.finish_interval_s or (None, None)
    return answer, AdviceEntry(
        job=pending.id,
        scheduler=scheduler,
        admit=answer.admit,
        requested=pending.requested,
        advised=len(answer.devices),
        reason=answer.reason,
        deadline_s=pending.deadline_s,
        finish_s=answer.finish_s,
        low_s=low,
        high_s=high,
        probability=answer.on_time_probability if answer.finish_s is not None else None,
    )
