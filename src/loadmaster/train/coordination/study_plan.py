"""What a study will need, checked before it starts: memory, pinned memory, disk, time. Trains nothing."""

import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadmaster.core.errors import InputError
from loadmaster.core.units import format_bytes, format_seconds
from loadmaster.shards.device.host_bytes import free_host_bytes, lockable_bytes
from loadmaster.shards.spec.engine import TrialPlan
from loadmaster.train.coordination.scheduler import TrialStanding, lower_bound_s
from loadmaster.train.coordination.study_forecast import forecast_study
from loadmaster.train.disk.checkpoints import KEPT, folder_name

_HOST_SHARE = 0.9  # of the memory that is free, where no cap is given


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyPlan:
    """The plans of all trials, and what they come to."""

    trials: tuple[TrialPlan, ...]
    devices: tuple[str, ...]
    memory_cap_bytes: int | None
    host_cap_bytes: int
    lockable_bytes: int | None  # memory that may be pinned; None: as much as there is
    disk_free_bytes: int
    disk_need_bytes: int
    makespan_s: float  # by the scheduler, on a virtual clock
    bound_s: float  # no schedule is faster

    @property
    def problems(self) -> tuple[str, ...]:
        """Why it cannot start."""
        found = [problem for each in self.trials for problem in self.problems_of(each)]
        need, free = format_bytes(self.disk_need_bytes), format_bytes(self.disk_free_bytes)
        if self.disk_need_bytes > self.disk_free_bytes:
            found.append(
                f"checkpoints need {need} of {free} free on disk; free some room, or give another dir"
            )
        return tuple(found)

    def problems_of(self, each: TrialPlan) -> list[str]:
        """Why one trial cannot run here, whatever the others do."""
        found = []
        if each.host_bytes > self.host_cap_bytes:
            found.append(
                f"trial {each.trial!r} needs {format_bytes(each.host_bytes)} of host memory of"
                f" {format_bytes(self.host_cap_bytes)}; raise host_cap, or use a leaner optimizer"
            )
        if self.memory_cap_bytes is not None and each.peak_bytes > self.memory_cap_bytes:
            found.append(
                f"trial {each.trial!r} needs {format_bytes(each.peak_bytes)} on a device of"
                f" {format_bytes(self.memory_cap_bytes)}; raise memory_cap, or use a smaller batch"
            )
        if self.lockable_bytes is not None and each.host_bytes > self.lockable_bytes:
            found.append(
                f"trial {each.trial!r} pins {format_bytes(each.host_bytes)} where"
                f" {format_bytes(self.lockable_bytes)} may be locked; raise it: ulimit -l unlimited"
            )
        return found

    def require_feasible(self) -> None:
        """Refuse a study that cannot run."""
        if self.problems:
            raise InputError("; ".join(self.problems))

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON."""
        rows = [
            {name: getattr(each, name) for name in TrialPlan.__dataclass_fields__ if name != "detail"}
            for each in self.trials
        ]
        own = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "trials"}
        return {**own, "devices": list(self.devices), "problems": list(self.problems), "trials": rows}

    def _origin(self) -> str:
        """Where the rates come from."""
        known = all(each.is_measured for each in self.trials if not each.ended)
        return "measured on this machine" if known else "of a typical device"

    def _describe_sharing(self) -> list[str]:
        most = max((each.num_together for each in self.trials), default=1)
        if most == 1:
            return []
        return [f"up to {most} trials share a frozen backbone on a device: bytes and times are shares of it"]

    def __str__(self) -> str:
        """A table, then what it comes to."""
        head = ("trial", "steps", "shards", "device peak", "host", "up/step", "down/step", "step", "bound by")
        rows = [head, *(_format_row(each) for each in self.trials)]
        widths = [max(len(row[at]) for row in rows) for at in range(len(head))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
        ]
        host, cap = sum(each.host_bytes for each in self.trials), format_bytes(self.host_cap_bytes)
        pinned = "no limit" if self.lockable_bytes is None else format_bytes(self.lockable_bytes)
        need, free = format_bytes(self.disk_need_bytes), format_bytes(self.disk_free_bytes)
        lines += [
            "",
            f"devices: {', '.join(self.devices)}"
            + (f", at most {format_bytes(self.memory_cap_bytes)} each" if self.memory_cap_bytes else ""),
            f"host memory: {format_bytes(host)} for all trials at once, of {cap}"
            + ("" if host <= self.host_cap_bytes or self.problems else "; trials wait for free memory"),
            f"pinned memory: {pinned}",
            f"disk: {need} for checkpoints, {free} free",
            f"time: {format_seconds(self.makespan_s)} predicted, from rates {self._origin()};"
            f" no schedule is faster than {format_seconds(self.bound_s)}",
            *self._describe_sharing(),
            *(f"{each.trial}: {each.note}" for each in self.trials if each.note),
            *(f"cannot start: {problem}" for problem in self.problems),
        ]
        return "\n".join(line.rstrip() for line in lines)


def make_study_plan(
    trials: Sequence[TrialPlan],
    devices: Sequence[str],
    *,
    folder: Path,
    memory_cap_bytes: int | None,
    host_cap_bytes: int | None,
) -> StudyPlan:
    """Put the plans of all trials together; those that have ended neither run nor write any more."""
    left = [each for each in trials if not each.ended]
    standings = [
        TrialStanding(trial=at, num_left=max(each.num_steps, 1), step_s=each.step_s, load_s=each.load_s)
        for at, each in enumerate(left)
    ]
    works = [each.num_steps * each.step_s for each in left]
    return StudyPlan(
        trials=tuple(trials),
        devices=tuple(devices),
        memory_cap_bytes=memory_cap_bytes,
        host_cap_bytes=host_cap_bytes if host_cap_bytes is not None else int(_HOST_SHARE * free_host_bytes()),
        lockable_bytes=lockable_bytes() if any(name.startswith("cuda") for name in devices) else None,
        disk_free_bytes=shutil.disk_usage(_find_existing_parent(folder)).free,
        disk_need_bytes=_estimate_disk_bytes(left, len(devices), folder / "checkpoints"),
        makespan_s=forecast_study(standings, num_devices=len(devices)).makespan_s,
        bound_s=lower_bound_s(works, len(devices)),
    )


def _estimate_disk_bytes(trials: Sequence[TrialPlan], num_devices: int, folder: Path) -> int:
    """The generations that are kept, less those that are there, and one being written on every device."""
    writing = sorted((each.state_bytes for each in trials), reverse=True)[:num_devices]
    kept = sum(
        max(0, KEPT * each.state_bytes - _held_bytes(folder / folder_name(each.trial))) for each in trials
    )
    return kept + sum(writing)


def _held_bytes(folder: Path) -> int:
    """Of all generations; one that somebody deletes meanwhile does not count."""
    found = 0
    for path in folder.glob("*/*"):
        with suppress(OSError):
            found += path.stat().st_size
    return found


def _find_existing_parent(folder: Path) -> Path:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def _format_row(each: TrialPlan) -> tuple[str, ...]:
    if each.ended:
        return (each.trial, str(each.num_steps), *("-",) * 6, each.ended)
    return (
        each.trial,
        str(each.num_steps),
        str(each.num_shards),
        format_bytes(each.peak_bytes),
        format_bytes(each.host_bytes),
        format_bytes(each.bytes_up),
        format_bytes(each.bytes_down),
        format_seconds(each.step_s),
        each.bound_by or "-",
    )
