"""The log of advice and outcomes, one JSON object a line, and the score of the advice."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loadmaster.core.errors import FileError, FormatError

COVERAGE_TO_ACT = 0.85
JOBS_TO_ACT = 200
_MAX_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class AdviceEntry:
    """What was advised for one job of a scheduler; seconds from the moment of the advice."""

    job: str
    scheduler: str
    admit: bool
    requested: int
    advised: int
    reason: str
    deadline_s: float | None = None
    finish_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    probability: float | None = None
    action: str = ""  # the line or manifest that would be submitted

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"kind": "advice"} | asdict(self)

    def __str__(self) -> str:
        """What would be submitted, and why."""
        return f"# {self.job}: {self.reason}\n{self.action or '# nothing to change'}"


@dataclass(frozen=True, slots=True)
class OutcomeEntry:
    """What happened: devices the job really had, and when it ended, from the moment of the advice."""

    job: str
    devices: int
    finish_s: float


@dataclass(frozen=True, slots=True)
class LogScore:
    """Advice against outcomes."""

    advised: int
    finished: int
    agreement: float  # of finished jobs, those that had the advised number
    error: float  # median relative error of the predicted end, where they had it
    coverage: float  # of those, the share inside the 90 % interval
    met: int  # finished by their deadline
    promised: float  # sum of the stated probabilities of the same jobs
    ready_to_act: bool

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def rows(self) -> dict[str, object]:
        """For a table."""

        def share(value: float) -> str:
            return "-" if math.isnan(value) else f"{100 * value:.1f} %"

        return {
            "jobs advised": self.advised,
            "jobs finished": self.finished,
            "had the advised number": share(self.agreement),
            "median error of the end": share(self.error),
            "inside the 90 % interval": share(self.coverage),
            "deadlines met": f"{self.met} (promised {self.promised:.1f})",
            "may act": "yes"
            if self.ready_to_act
            else f"no: needs {JOBS_TO_ACT} jobs and {COVERAGE_TO_ACT:.0%} inside",
        }


def append_entry(path: str | Path, entry: AdviceEntry) -> None:
    """Add one line; a log is never rewritten."""
    line = json.dumps(entry.to_json(), allow_nan=False) + "\n"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
    except OSError as trouble:
        raise FileError(f"cannot write {path}: {trouble}") from None


def read_log(
    path: str | Path, *, skip_malformed: bool = False
) -> tuple[list[AdviceEntry | OutcomeEntry], tuple[str, ...]]:
    """All entries; a malformed line stops with its number, or is skipped and told."""
    file = Path(path)
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise FileError(f"{path} is larger than {_MAX_BYTES} bytes")
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as trouble:
        raise FileError(f"cannot read {path}: {trouble}") from None
    entries: list[AdviceEntry | OutcomeEntry] = []
    skipped = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entries.append(_parse(line))
        except (ValueError, TypeError, KeyError, RecursionError) as trouble:
            told = f"line {number}: {str(trouble)[:120] or type(trouble).__name__}"
            if not skip_malformed:
                raise FormatError(
                    f"{path}, {told}; repair it, or skip such lines (--skip-malformed)"
                ) from None
            skipped.append(told)
    return entries, tuple(skipped)


def _parse(line: str) -> AdviceEntry | OutcomeEntry:
    row = json.loads(line)
    if not isinstance(row, dict) or row.get("kind") not in ("advice", "outcome"):
        raise ValueError('neither "kind": "advice" nor "outcome"')
    kind = row.pop("kind")
    if kind == "outcome":
        entry = OutcomeEntry(str(row["job"]), int(row["devices"]), float(row["finish_s"]))
        if entry.devices < 1 or not 0 <= entry.finish_s < math.inf:
            raise ValueError(f"an outcome of {entry.devices} devices and {entry.finish_s} s")
        return entry
    made = AdviceEntry(**row)
    texts = (made.job, made.scheduler, made.reason, made.action)
    if not all(isinstance(text, str) for text in texts) or not isinstance(made.admit, bool):
        raise ValueError("job, scheduler, reason and action are texts, and admit is true or false")
    for name in ("requested", "advised"):
        count = getattr(made, name)
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ValueError(f"{name} is {count!r}, not a whole number >= 0")
    for name in ("deadline_s", "finish_s", "low_s", "high_s", "probability"):
        value = getattr(made, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value < 0):
            raise ValueError(f"{name} is {value!r}, not a number >= 0")
    return made


def residuals_of(entries: Sequence[AdviceEntry | OutcomeEntry]) -> tuple[float, ...]:
    """Measured over predicted ends of jobs that had the advised number of devices."""
    advice = {e.job: e for e in entries if isinstance(e, AdviceEntry)}
    return tuple(
        e.finish_s / predicted
        for e in entries
        if isinstance(e, OutcomeEntry)
        and (told := advice.get(e.job)) is not None
        and told.advised == e.devices
        and (predicted := told.finish_s or 0.0) > 0
        and e.finish_s > 0
    )


def score_log(entries: Sequence[AdviceEntry | OutcomeEntry]) -> LogScore:
    """Join by job; the last advice before counts."""
    advice = {e.job: e for e in entries if isinstance(e, AdviceEntry)}
    pairs = [(advice[e.job], e) for e in entries if isinstance(e, OutcomeEntry) and e.job in advice]
    same = [(a, o) for a, o in pairs if a.admit and a.advised == o.devices and a.finish_s]
    errors = [abs(o.finish_s - a.finish_s) / o.finish_s for a, o in same if a.finish_s and o.finish_s > 0]
    inside = [
        a.low_s <= o.finish_s <= a.high_s for a, o in same if a.low_s is not None and a.high_s is not None
    ]
    due = [(a, o) for a, o in pairs if a.deadline_s is not None]
    met = sum(o.finish_s <= (a.deadline_s or 0.0) for a, o in due)
    promised = sum(a.probability or 0.0 for a, _ in due)
    coverage = float(np.mean(inside)) if inside else math.nan
    spread = math.sqrt(sum((a.probability or 0.0) * (1 - (a.probability or 0.0)) for a, _ in due))
    return LogScore(
        advised=len(advice),
        finished=len(pairs),
        agreement=float(np.mean([a.advised == o.devices for a, o in pairs])) if pairs else math.nan,
        error=float(np.median(errors)) if errors else math.nan,
        coverage=coverage,
        met=met,
        promised=promised,
        ready_to_act=len(same) >= JOBS_TO_ACT
        and coverage >= COVERAGE_TO_ACT
        and met >= promised - 2 * spread,
    )
