"""Files of jobs (TOML) and of states (JSON): data from elsewhere, checked, never evaluated."""

import json
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loadmaster.advisor.jobs.curve import measured_curve
from loadmaster.advisor.jobs.job import Job
from loadmaster.advisor.jobs.state import ClusterState, Layout
from loadmaster.core.errors import FileError, FormatError, InputError
from loadmaster.core.units import parse_seconds

_MAX_BYTES = 16 * 2**20
_JOB_KEYS = {
    "name",
    "source",
    "steps",
    "batch",
    "seq",
    "deadline",
    "value",
    "requested",
    "objective",
    "times",
}
_STATE_KEYS = {"now_s", "busy", "price", "period_s", "coming"}
_BUSY_KEYS = {"devices", "until_s"}
_COMING_KEYS = {"mean_gap_s", "jobs"}
_COMING_JOB_KEYS = {"name", "times", "deadline_s", "value"}


@dataclass(frozen=True, slots=True)
class JobFile:
    """What a job file says."""

    name: str
    source: str | None
    times: dict[int, float]
    steps: float
    batch: int | None
    seq: int | None
    deadline_s: float | None
    value: float
    requested: int
    objective: str


def read_job(path: str | Path) -> JobFile:
    """A job: a source with steps, or measured times by number of devices."""
    document = _parse(path, lambda text: tomllib.loads(text))
    job = document.get("job", document)
    if not isinstance(job, dict):
        raise FormatError(f"{path}: [job] is not a table")
    _refuse_unknown(path, job, _JOB_KEYS)
    times = job.get("times", {})
    if not isinstance(times, dict) or ("source" in job) == bool(times):
        raise FormatError(f"{path}: give either source (with steps) or [times] by number of devices")
    found = _times(path, times)
    deadline = job.get("deadline")
    return JobFile(
        name=str(job.get("name", Path(path).stem)),
        source=str(job["source"]) if "source" in job else None,
        times=found,
        steps=_number(path, "steps", job.get("steps", 1)),
        batch=_whole(path, "batch", job.get("batch")),
        seq=_whole(path, "seq", job.get("seq")),
        deadline_s=None if deadline is None else _seconds(path, "deadline", deadline),
        value=_number(path, "value", job.get("value", 1.0)),
        requested=_whole(path, "requested", job.get("requested", 1)) or 1,
        objective=str(job.get("objective", "throughput")),
    )


def _times(path: str | Path, times: Any) -> dict[int, float]:
    if not isinstance(times, dict):
        raise FormatError(f"{path}: times is not a map from numbers of devices to seconds")
    found: dict[int, float] = {}
    for count, time in times.items():
        if not str(count).isdecimal() or int(count) < 1:
            raise FormatError(f"{path}: {count!r} is not a number of devices >= 1")
        what = f"the time on {count} device{'s' * (int(count) > 1)}"
        found[int(count)] = _seconds(path, what, time)
        if not found[int(count)]:
            raise FormatError(f"{path}: {what} is {str(time)[:60]!r}; give a time > 0")
    return found


def read_state(path: str | Path, layout: Layout) -> ClusterState:
    """Which devices are busy until when: `{"now_s": 0, "busy": [{"devices": ["gpu0", 1], "until_s":
    60}]}`."""
    document = _parse(path, json.loads)
    _refuse_unknown(path, document, _STATE_KEYS)
    free_at = np.zeros(layout.num_devices)
    told: set[int] = set()
    busy = document.get("busy", [])
    if not isinstance(busy, list):
        raise FormatError(f"{path}: busy is not a list")
    for row in busy:
        if not isinstance(row, dict) or not isinstance(row.get("devices"), list):
            raise FormatError(f'{path}: {str(row)[:80]} is not {{"devices": [...], "until_s": seconds}}')
        _refuse_unknown(path, row, _BUSY_KEYS)
        until = math.inf if row.get("until_s") is None else _number(path, "until_s", row["until_s"])
        for device in row["devices"]:
            index = _device_index(path, device, layout)
            if index in told:
                raise FormatError(f"{path}: device {device!r} is given twice")
            told.add(index)
            free_at[index] = until
    numbers = {name: _number(path, name, document.get(name, 0.0)) for name in ("now_s", "price", "period_s")}
    return ClusterState(layout, free_at, numbers["now_s"], numbers["price"], numbers["period_s"])


def read_coming(path: str | Path) -> tuple[tuple[Job, ...], float]:
    """Jobs that may come and the mean time between them, of a state file.

    `"coming": {"mean_gap_s": 600, "jobs": [{"times": {"1": 4000, "2": 2100}, "deadline_s": 5000}]}`.
    """
    document = _parse(path, json.loads)
    coming = document.get("coming", {"mean_gap_s": 0, "jobs": []})
    if not isinstance(coming, dict) or not isinstance(coming.get("jobs"), list):
        raise FormatError(f'{path}: coming is not {{"mean_gap_s": seconds, "jobs": [...]}}')
    _refuse_unknown(path, coming, _COMING_KEYS)
    jobs = []
    for row in coming["jobs"]:
        if not isinstance(row, dict):
            raise FormatError(f"{path}: {str(row)[:80]} is not a job that may come")
        _refuse_unknown(path, row, _COMING_JOB_KEYS)
        times = _times(path, row.get("times"))
        limit = math.inf if row.get("deadline_s") is None else _number(path, "deadline_s", row["deadline_s"])
        value = _number(path, "value", row.get("value", 1.0))
        jobs.append(Job(str(row.get("name", "coming")), measured_curve(times), limit, value))
    return tuple(jobs), _number(path, "mean_gap_s", coming.get("mean_gap_s", 0))


def _device_index(path: str | Path, device: Any, layout: Layout) -> int:
    if isinstance(device, str) and device in layout.name:
        return layout.name.index(device)
    if isinstance(device, int) and not isinstance(device, bool) and 0 <= device < layout.num_devices:
        return device
    raise FormatError(
        f"{path}: device {str(device)[:60]!r} is not in the cluster of {layout.num_devices} devices"
        f" ({', '.join(layout.name[:4])}, ...)"
    )


def _parse(path: str | Path, parse: Any) -> dict[str, Any]:
    file = Path(path)
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise FileError(f"{path} is larger than {_MAX_BYTES} bytes")
        document = parse(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as trouble:
        raise FileError(f"cannot read {path}: {trouble}") from None
    except (ValueError, RecursionError) as trouble:
        raise FormatError(f"{path}: {trouble}") from None
    if not isinstance(document, dict):
        raise FormatError(f"{path} is not a table of names and values")
    return document


def _refuse_unknown(path: str | Path, document: dict[str, Any], known: set[str]) -> None:
    unknown = sorted(set(document) - known)
    if unknown:
        raise FormatError(f"{path}: unknown field {unknown[0]!r}; known: {', '.join(sorted(known))}")


def _number(path: str | Path, what: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise FormatError(f"{path}: {what} is {str(value)[:60]!r}; give a number >= 0")
    return float(value)


def _whole(path: str | Path, what: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise FormatError(f"{path}: {what} is {str(value)[:60]!r}; give a whole number >= 1")
    return value


def _seconds(path: str | Path, what: str, value: Any) -> float:
    if isinstance(value, str):
        try:
            return parse_seconds(value)
        except InputError as trouble:
            raise FormatError(f"{path}: {what}: {trouble}") from None
    return _number(path, what, value)
