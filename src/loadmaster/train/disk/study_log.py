"""Study log: the journal of a folder read for the page. Nothing is written, and no lock is taken: a study
may run."""

from pathlib import Path
from typing import Any

from loadmaster.core.answers.study_log import StudyLog, TrialLog, TurnLog
from loadmaster.core.errors import FileError
from loadmaster.train.disk.journal import Record, read_journal


def read_study_log(folder: Path) -> StudyLog:
    """What happened in the study of a folder, as far as its journal was written."""
    path = folder / "journal"
    if not path.is_file():
        inside = sorted(each.parent.name for each in folder.glob("*/journal"))[:4] if folder.is_dir() else []
        there = ", ".join(str(folder / name) for name in inside)
        what = f"name one of those in it: {there}" if inside else "name the study's `dir`"
        raise FileError(f"{folder} is not a study's folder: it has no journal; {what}")
    records = read_journal(path).records
    turns = [record for record in records if record["kind"] == "turn"]
    timed = [record for record in turns if _number(record, "ended_at") > 0 and record.get("device")]
    first = min((_number(r, "ended_at") - _number(r, "took_s") for r in timed), default=0.0)
    logs = tuple(_read_turn(record, first) for record in timed)
    names = [str(record["trial"]) for record in records if record["kind"] == "trial"]
    trials = tuple(_read_trial(name, [r for r in records if r.get("trial") == name]) for name in names)
    notes = [] if len(timed) == len(turns) else [_OLD.format(len(turns) - len(timed))]
    wall_s = max((log.end_s for log in logs), default=sum(trial.seconds for trial in trials))
    return StudyLog(folder.name or str(folder), trials, logs, wall_s, tuple(notes))


_OLD = (
    "{} turns were written down by an older version, without device and time: they are left out of"
    " the pictures."
)


def _number(record: Record, name: str) -> float:
    value: Any = record.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0


def _read_turn(record: Record, first: float) -> TurnLog:
    end = _number(record, "ended_at") - first
    loss = record.get("loss")
    return TurnLog(
        trial=str(record["trial"]),
        device=str(record.get("device")),
        step=int(_number(record, "step")),
        loss=float(loss) if isinstance(loss, int | float) else None,
        start_s=max(0.0, end - _number(record, "took_s")),
        end_s=end,
        seconds=_number(record, "seconds"),
        bytes_up=int(_number(record, "bytes_up")),
        bytes_down=int(_number(record, "bytes_down")),
    )


def _read_trial(name: str, records: list[Record]) -> TrialLog:
    turns = [record for record in records if record["kind"] == "turn"]
    status, error, metrics, step = "running" if turns else "waiting", "", dict[str, float](), 0
    num_steps = 0
    for record in records:
        kind = record["kind"]
        step = max(step, int(_number(record, "step")))
        if kind == "trial":
            num_steps = int(_number(record, "num_steps"))
        elif kind == "done":
            status = str(record.get("status"))
        elif kind == "fail":
            status, error = "failed", str(record.get("error", ""))
        elif kind == "retry":
            status, error = "running", ""
        elif kind == "report" and isinstance(record.get("metrics"), dict):
            found = record["metrics"].items()
            metrics = {str(key): float(value) for key, value in found if isinstance(value, int | float)}
    losses = [(int(_number(t, "step")), t["loss"]) for t in turns if isinstance(t.get("loss"), int | float)]
    return TrialLog(
        name=name,
        status=status,
        step=step,
        num_steps=num_steps,
        seconds=sum(_number(turn, "seconds") for turn in turns),
        num_tokens=int(sum(_number(turn, "num_tokens") for turn in turns)),
        losses=tuple(losses),
        metrics=metrics,
        bytes_up=int(sum(_number(turn, "bytes_up") for turn in turns)),
        bytes_down=int(sum(_number(turn, "bytes_down") for turn in turns)),
        error=error,
    )
