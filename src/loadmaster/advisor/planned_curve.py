"""A job's scaling curve from the planner: one plan for every number of devices, kept on disk.

The default is the time of a micro-batch in a pipeline that is full (`objective="throughput"`); with `step`
it is one step
alone, which seldom gains from more devices. The budget is a count, so the same source gives the same curve.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import loadmaster.api as api
from loadmaster.advisor.jobs.curve import HOST, ScalingCurve
from loadmaster.core.errors import InputError
from loadmaster.core.graph import Graph
from loadmaster.core.problem import Objective
from loadmaster.core.question import Source
from loadmaster.core.run import ignore_progress

MODEL_ERROR = 0.15  # one standard deviation of a simulated step, where nothing was measured
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)
_FORMAT = 1


def planned_curve(
    source: Source,
    kinds: Sequence[str],
    *,
    steps: float = 1.0,
    counts: Sequence[int] = COUNTS,
    objective: str = "throughput",
    budget: str = "60x",
    batch: int | None = None,
    seq: int | None = None,
    folder: Path | None = None,
    progress: Callable[[str, float], None] = ignore_progress,
) -> ScalingCurve:
    """Seconds of all steps of a source on each number of devices of each kind; a number that does not fit
    is left out."""
    if not steps > 0 or not math.isfinite(steps):
        raise InputError(f"a job has {steps!r} steps; give a number > 0")
    path = _cache_path(source, kinds, counts, objective, budget, batch, seq, folder)
    points = _read(path)
    if points is None:
        points = _plan_all(source, kinds, counts, objective, budget, batch, seq, progress)
        _write(path, points)
    if not points:
        raise InputError(
            f"{source!s:.80} fits on none of {', '.join(kinds)}, with {min(counts)} to {max(counts)} devices"
        )
    seconds = {(kind, count, HOST): steps * step_s for kind, count, step_s in points}
    return ScalingCurve(seconds, "simulated", MODEL_ERROR)


def _plan_all(
    source: Source,
    kinds: Sequence[str],
    counts: Sequence[int],
    objective: str,
    budget: str,
    batch: int | None,
    seq: int | None,
    progress: Callable[[str, float], None],
) -> list[tuple[str, int, float]]:
    first = api.problem(source, f"1x{kinds[0]}", batch=batch, seq=seq, progress=progress)
    found = []
    for kind in kinds:
        for i, count in enumerate(counts):
            progress(f"planning on {count} x {kind}", i / len(counts))
            asked = api.problem(first.graph, f"{count}x{kind}", objective=Objective(objective))
            placement = api.plan(asked, budget=budget)
            if placement.fits and placement.score_s is not None:
                found.append((kind, count, float(placement.score_s)))
    return found


def _cache_path(
    source: Source,
    kinds: Sequence[str],
    counts: Sequence[int],
    objective: str,
    budget: str,
    batch: int | None,
    seq: int | None,
    folder: Path | None,
) -> Path | None:
    """Where a curve is kept; None for a source that cannot be told by its name and content."""
    if isinstance(source, Graph):
        told = source.digest
    elif isinstance(source, str | os.PathLike):
        told = str(source)
        file = Path(told.rpartition(":")[0] if ".py:" in told else told)
        if file.is_file():
            told += hashlib.sha256(file.read_bytes()).hexdigest()
    else:
        return None
    key = [_FORMAT, version("loadmaster"), told, list(kinds), list(counts), objective, budget, batch, seq]
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]
    home = folder or Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "loadmaster"
    return home / "curves" / f"{name}.json"


def _read(path: Path | None) -> list[tuple[str, int, float]] | None:
    if path is None:
        return None
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        points = [(str(kind), int(count), float(step)) for kind, count, step in rows]
    except (OSError, ValueError, TypeError):
        return None
    return points if all(count > 0 and 0 < step < math.inf for _, count, step in points) else None


def _write(path: Path | None, points: list[tuple[str, int, float]]) -> None:
    if path is None:
        return
    try:  # without a cache it only takes longer next time
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        partial.write_text(json.dumps(points), encoding="utf-8")
        partial.replace(path)
    except OSError:
        return
