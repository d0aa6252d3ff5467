"""Recorded arrivals and measured scaling curves (the format of Gavel's traces), as streams with deadlines.

A trace line has seven tab-separated fields. The command is never run and nothing in a file is evaluated. A
malformed line is refused with its number, or skipped and reported, as the caller chooses.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loadmaster.core.errors import FileError, FormatError, InputError, UnknownNameError

LEVELS = (1, 2, 4, 8)
DEADLINES = {"default": (0.5, 1.5), "tight": (0.3, 0.8), "loose": (1.0, 3.0)}
_MAX_BYTES = 256 * 2**20
_FIELDS = 7
_KEY = re.compile(r"\('([^'\\]*)', (\d{1,6})\)")  # the text of a tuple; read, never evaluated


@dataclass(frozen=True, slots=True)
class TraceJob:
    """One line."""

    line: int
    type: str
    steps: float
    arrival_s: float
    requested: int


@dataclass(frozen=True, slots=True)
class Trace:
    """The jobs of a file by arrival, and the lines that were skipped with their reasons."""

    name: str
    jobs: tuple[TraceJob, ...]
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Throughputs:
    """Measured steps per second, [kinds, 2 forms (one host, spread), types, LEVELS]; 0 where there is
    none."""

    kinds: tuple[str, ...]
    types: tuple[str, ...]
    rate: NDArray[np.float64]

    def type_index(self, name: str) -> int:
        """The row of a job type."""
        if name not in self.types:
            raise UnknownNameError("job type", name, self.types)
        return self.types.index(name)


@dataclass(frozen=True, slots=True, eq=False)
class TraceStream:
    """J jobs with durations on each kind of device, by arrival."""

    name: str
    kinds: tuple[str, ...]
    arrival_s: NDArray[np.float64]  # [J]
    due_s: NDArray[np.float64]  # [J]
    duration_s: NDArray[np.float64]  # [J, kinds, 2, LEVELS], inf where the count does not exist
    reference: NDArray[
        np.int64
    ]  # [J] index into LEVELS of the requested count, or the largest measured below
    value: NDArray[np.float64]  # [J]


def read_trace(path: str | Path, *, skip_malformed: bool = False) -> Trace:
    """Read a trace; a malformed line stops with its number, or is skipped and told."""
    path = Path(path)
    jobs: list[TraceJob] = []
    skipped: list[str] = []
    for number, line in enumerate(_read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            jobs.append(_parse_line(line, number))
        except FormatError as trouble:
            if not skip_malformed:
                hint = "repair it, or skip such lines (--skip-malformed)"
                raise FormatError(f"{path}, line {number}: {trouble}; {hint}") from None
            skipped.append(f"line {number}: {trouble}")
    if not jobs:
        raise FormatError(f"{path} holds no job")
    jobs.sort(key=lambda job: (job.arrival_s, job.line))
    return Trace(path.name, tuple(jobs), tuple(skipped))


def _read_text(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise FileError(f"{path} has {size} bytes; at most {_MAX_BYTES} are read")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as trouble:
        raise FileError(f"cannot read {path}: {trouble}") from None


def _parse_line(line: str, number: int) -> TraceJob:
    parts = line.split("\t")
    if len(parts) != _FIELDS:
        raise FormatError(f"{len(parts)} fields separated by tabs, not {_FIELDS}")
    kind, _command, _argument, _data, steps, arrival, requested = parts
    if not kind.strip():
        raise FormatError("the job type is empty")
    count = _number(requested, "number of devices")
    if count < 1 or count != int(count):
        raise FormatError(f"number of devices is {requested.strip()[:40]!r}, not a whole number >= 1")
    num_steps = _number(steps, "number of steps")
    if num_steps <= 0:
        raise FormatError(f"number of steps is {steps.strip()[:40]!r}, not positive")
    at = _number(arrival, "arrival time")
    if at < 0:
        raise FormatError(f"arrival time is {arrival.strip()[:40]!r}, which is negative")
    return TraceJob(number, kind, num_steps, at, int(count))


def _number(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise FormatError(f"{what} is {text.strip()[:40]!r}, not a number")
    return value


def read_throughputs(path: str | Path) -> Throughputs:
    """Read measured throughputs; jobs alone only, not the measured pairs."""
    text = _read_text(Path(path))
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as trouble:
        raise FormatError(f"{path} is not JSON: {trouble}") from None
    if not isinstance(document, dict) or not document:
        raise FormatError(f"{path} is not a map from device kinds to job types")
    found: dict[tuple[str, int, str, int], float] = {}
    for label, rows in document.items():
        kind, spread = str(label).removesuffix("_unconsolidated"), str(label).endswith("_unconsolidated")
        if not isinstance(rows, dict):
            raise FormatError(f"{path}: {label!r} is not a map from job types to rates")
        for key, measured in rows.items():
            match = _KEY.fullmatch(key)
            if match is None:
                raise FormatError(f"{path}: {key[:60]!r} is not \"('job type', devices)\"")
            rate = measured.get("null") if isinstance(measured, dict) else None
            if isinstance(rate, int | float) and math.isfinite(rate) and rate > 0:
                found[kind, int(spread), match[1], int(match[2])] = float(rate)
    kinds = tuple(dict.fromkeys(kind for kind, *_ in found))
    types = tuple(dict.fromkeys(name for _, _, name, _ in found))
    table = np.zeros((len(kinds), 2, len(types), len(LEVELS)))
    for (kind, form, name, count), rate in found.items():
        if count in LEVELS:
            table[kinds.index(kind), form, types.index(name), LEVELS.index(count)] = rate
    return Throughputs(kinds, types, table)


def draw_trace_stream(
    trace: Trace,
    throughputs: Throughputs,
    seed: int,
    *,
    kinds: Sequence[str] = ("v100",),
    deadline: str = "default",
    redraw_types: bool = True,
) -> TraceStream:
    """Deadlines and types of a seed: arrival + f * time at the reference count on the first kind.

    A type that is drawn again keeps the time at the reference, so that the load stays what was recorded.
    """
    if deadline not in DEADLINES:
        raise UnknownNameError("deadline range", deadline, DEADLINES)
    for kind in kinds:
        if kind not in throughputs.kinds:
            raise UnknownNameError("device kind", kind, throughputs.kinds)
    rng = np.random.default_rng([seed, list(DEADLINES).index(deadline)])
    rows = [throughputs.kinds.index(kind) for kind in kinds]
    num = len(trace.jobs)
    duration = np.full((num, len(kinds), 2, len(LEVELS)), np.inf)
    reference = np.zeros(num, np.int64)
    seconds = np.zeros(num)
    for j, job in enumerate(trace.jobs):
        if (trouble := _why_unmeasured(job, throughputs, rows[0])) is not None:
            hint = "measure it, or skip such lines (--skip-malformed)"
            raise FormatError(f"{trace.name}, line {job.line}: {trouble}; {hint}")
        recorded = throughputs.type_index(job.type)
        level = _reference_level(throughputs.rate[rows[0], 0, recorded], job.requested, job)
        seconds[j] = job.steps / throughputs.rate[rows[0], 0, recorded, level]
        drawn = int(rng.integers(len(throughputs.types))) if redraw_types else recorded
        reference[j] = _reference_level(throughputs.rate[rows[0], 0, drawn], job.requested, job)
        steps = seconds[j] * throughputs.rate[rows[0], 0, drawn, reference[j]]
        rate = throughputs.rate[rows, :, drawn]
        duration[j] = np.divide(steps, rate, out=np.full_like(rate, np.inf), where=rate > 0)
    low, high = DEADLINES[deadline]
    arrival = np.array([job.arrival_s for job in trace.jobs])
    due = arrival + rng.uniform(low, high, num) * seconds
    return TraceStream(trace.name, tuple(kinds), arrival, due, duration, reference, np.ones(num))


def drop_unmeasured(trace: Trace, throughputs: Throughputs, kind: str) -> Trace:
    """The jobs whose type has a measured rate on a kind of device; the other lines count as skipped."""
    if kind not in throughputs.kinds:
        raise UnknownNameError("device kind", kind, throughputs.kinds)
    row = throughputs.kinds.index(kind)
    why = [_why_unmeasured(job, throughputs, row) for job in trace.jobs]
    kept = tuple(job for job, trouble in zip(trace.jobs, why, strict=True) if trouble is None)
    if not kept:
        raise FormatError(f"{trace.name} holds no job with a measured rate on {kind}")
    told = (f"line {job.line}: {t}" for job, t in zip(trace.jobs, why, strict=True) if t is not None)
    return replace(trace, jobs=kept, skipped=(*trace.skipped, *told))


def _why_unmeasured(job: TraceJob, throughputs: Throughputs, row: int) -> str | None:
    if job.type not in throughputs.types:
        return f"job type {job.type[:60]!r} has no measured rate"
    rates = throughputs.rate[row, 0, throughputs.types.index(job.type)]
    if not any(rates[i] > 0 and count <= job.requested for i, count in enumerate(LEVELS)):
        return f"job type {job.type[:60]!r} has no measured rate for {job.requested} devices"
    return None


def _reference_level(rates: NDArray[np.float64], requested: int, job: TraceJob) -> int:
    usable = [i for i, count in enumerate(LEVELS) if rates[i] > 0 and count <= requested]
    if not usable:
        raise InputError(
            f"line {job.line}: job type {job.type!r} has no measured rate for {requested} devices"
        )
    return usable[-1]
