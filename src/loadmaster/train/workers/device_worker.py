"""The worker of one device: runs turns of trials, saves them, and survives whatever a trial does.

A trial that raises, runs out of memory, gives NaN or cannot read its data fails alone: its runner is closed,
so that its memory is free before the device goes on with the next trial.
"""

import math
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from loadmaster.core.errors import DeviceMemoryError, FileError, VerifyError
from loadmaster.shards.device.host_bytes import free_host_bytes
from loadmaster.shards.model.loaders import LoaderError, is_worker_death
from loadmaster.shards.spec.engine import (
    Engine,
    NotANumberError,
    Runner,
    StepDone,
    TrialPlan,
    make_nan_error,
)
from loadmaster.train.disk import checkpoints
from loadmaster.train.disk.backbone_files import Backbone
from loadmaster.train.disk.background_writer import Writer, copy_snapshot, count_copy_bytes
from loadmaster.train.disk.checkpoints import Snapshot
from loadmaster.train.workers.eviction import Room
from loadmaster.train.workers.messages import (
    CheckpointWritten,
    Event,
    Parcel,
    Release,
    SaveFailed,
    StepEnded,
    Task,
    TrialFailed,
    TrialReleased,
    TurnEnded,
)

_MOST_TEXT = 20_000
_PATIENCE_S = 10.0
_OF_FREE = 0.5  # of the memory that is free: a larger copy is not made


class DamagedCheckpointError(FileError):
    """A committed generation is not what was written."""


class Worker:
    """Holds the runners of trials that run on one device."""

    def __init__(
        self,
        engine: Engine,
        trials: Mapping[str, Any],
        plans: Mapping[str, TrialPlan],
        device_name: str,
        root: Path | None,
        *,
        halted: Callable[[], bool] = lambda: False,
        tell: Callable[[Event], None] | None = None,
    ) -> None:
        self._known: dict[str, Backbone] = {}  # frozen weights on disk
        self._tell, self._writer = tell, Writer()  # events that come between turns, from another thread
        self._engine, self._trials, self._plans = engine, trials, plans
        self._root = root  # None: the coordinator writes
        self._device = engine.open_device(device_name)
        self._halted = halted
        self._room = Room(self._device)
        self.held: dict[str, Runner] = {}

    def work(self, task: Task) -> Iterator[Event]:
        """The events of one turn."""
        try:
            yield from self._turn(task)
        except Exception as problem:
            self._drop(task.trial)
            kind, broken = classify_failure(problem)
            text = "".join(traceback.format_exception(problem))[-_MOST_TEXT:]
            yield TrialFailed(task.trial, task.fence, kind, f"{_format_headline(problem)}\n{text}", broken)

    def _turn(self, task: Task) -> Iterator[Event]:
        runner = self._open_runner(task)
        used_before = self._room.make(task.trial, self.held)
        num_done = 0
        if task.num_steps:
            steps = runner.steps(self._device, task.num_steps, after=self.held.get(task.then or ""))
            while (done := self._take_step(steps)) is not None:
                num_done += 1
                self._require_finite(task.trial, done)
                yield StepEnded(task.trial, task.fence, done)
                if self._halted():
                    break
        halted = num_done < task.num_steps and self._halted()
        short = num_done < task.num_steps and not halted
        finished = short or (num_done > 0 and runner.remaining_s() <= 0)
        kept: dict[str, Any] = {}
        began = time.perf_counter()
        if task.save or finished:
            try:
                kept = self._save(runner, task, finished=finished)
            except FileError as problem:
                yield SaveFailed(task.trial, task.fence, problem)
                return
        save_s = time.perf_counter() - began
        self._room.note_turn(task.trial, used_before)
        wanted = task.evaluate or finished
        metrics = None
        if wanted and not halted and self._trials[task.trial].evaluate is not None:
            try:
                metrics = {str(name): float(value) for name, value in runner.evaluate(self._device).items()}
            except Exception as problem:
                if not (self._halted() and is_worker_death(problem)):
                    raise
                finished = False  # it is at its end, but for these numbers: the next call asks for them
        if task.close or (finished and "saving" not in kept):
            self._drop(task.trial)
        yield TurnEnded(
            trial=task.trial,
            fence=task.fence,
            step=runner.step,
            finished=finished,
            metrics=metrics,
            save_s=save_s,
            verified=getattr(runner, "verified", ""),
            **kept,
        )

    def _take_step(self, steps: Iterator[StepDone]) -> StepDone | None:
        """The next step; None where there is none, or where its data ended with everything else.

        A batch system tells all processes of a job to end at once, those of loaders, too. The trial is well:
        it stands where its last step ended, and is saved there.
        """
        try:
            return next(steps, None)
        except Exception as problem:
            if not (self._halted() and is_worker_death(problem)):
                raise
            return None

    def _open_runner(self, task: Task) -> Runner:
        runner = self.held.get(task.trial)
        if runner is not None and not (task.fresh or task.restore or task.parcel):
            return runner
        self._drop(task.trial)
        trial = self._trials[task.trial]
        if task.parcel is not None and hasattr(task.parcel.content, "steps"):
            runner = task.parcel.content  # handed over within this process
        else:
            runner = self._engine.open_runner(trial, self._device, self._plans.get(task.trial))
            self.held[task.trial] = runner
            if task.parcel is not None:
                self.unpack(runner, task.parcel)
            elif task.restore is not None:
                assert self._root is not None, "without a folder the state comes as a parcel"
                _restore(runner, _load_checkpoint(self._root, task.restore))
        self.held[task.trial] = runner
        return runner

    def _save(self, runner: Runner, task: Task, *, finished: bool) -> dict[str, Any]:
        """Write a checkpoint, or begin to; what a turn tells of it."""
        snapshot = take_snapshot(runner)
        if self._root is None:
            return {"snapshot": snapshot}
        if self._tell is None or not task.beside:
            return {"saved": self._write_checkpoint(snapshot, task)}
        if not finished:  # else it stays as it is, until it is told to go
            if count_copy_bytes(snapshot) > _OF_FREE * free_host_bytes():
                return {"saved": self._write_checkpoint(snapshot, task)}
            self._writer.wait()  # one copy at a time
            snapshot = copy_snapshot(snapshot)
        self._writer.begin(lambda: self._write_in_background(snapshot, task))
        return {"saving": True}

    def _write_checkpoint(self, snapshot: Snapshot, task: Task) -> checkpoints.SavedCheckpoint:
        assert self._root is not None, "the coordinator writes"
        return checkpoints.save(
            self._root,
            snapshot,
            trial=task.trial,
            generation=task.generation,
            fence=task.fence,
            known=self._known,
        )

    def _write_in_background(self, snapshot: Snapshot, task: Task) -> None:
        assert self._tell is not None, "else nobody would know"
        try:
            event = CheckpointWritten(task.trial, task.fence, self._write_checkpoint(snapshot, task))
        except Exception as problem:
            event = CheckpointWritten(task.trial, task.fence, None, problem)
        self._tell(event)

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._writer.busy

    def _require_finite(self, trial: str, done: StepDone) -> None:
        if not math.isfinite(done.loss) and getattr(self._trials[trial], "on_nan", "fail") == "fail":
            raise make_nan_error(trial, done.loss, done.step)

    def release(self, message: Release) -> TrialReleased | None:
        """Give a trial up for another device, or for good."""
        if message.drop:
            self._drop(message.trial)
            return None
        return TrialReleased(message.trial, message.fence, self.pack(self.held.pop(message.trial)))

    def pack(self, runner: Runner) -> Parcel:
        """A trial's state for another worker of this process: the runner itself, where it may go anywhere."""
        if not getattr(runner, "is_of_device", False):
            return Parcel(runner)
        snapshot = take_snapshot(runner)  # its tensors are its own: they outlive the runner
        runner.close()
        return Parcel(snapshot)

    def unpack(self, runner: Runner, parcel: Parcel) -> None:
        """Put what another worker packed into a fresh runner."""
        _restore(runner, parcel.content)

    def _drop(self, trial: str) -> None:
        runner = self.held.pop(trial, None)
        if runner is not None:
            with suppress(Exception):  # of a trial that failed; there is nothing more to do for it
                runner.close()
        self._room.reclaim(self.held)

    def close(self) -> None:
        """Let go of every trial, and of the device."""
        self._writer.wait(_PATIENCE_S)
        for trial in list(self.held):
            self._drop(trial)
        close = getattr(self._device, "close", None)
        if close is not None:
            close()


def take_snapshot(runner: Runner) -> Snapshot:
    """The state of a runner at a step boundary."""
    tensors, facts = runner.snapshot()
    frozen: frozenset[str] = getattr(runner, "frozen", frozenset())
    return Snapshot(runner.step, runner.state_dict(), tensors, facts, frozen)


def _load_checkpoint(root: Path, saved: checkpoints.SavedCheckpoint) -> Snapshot:
    try:
        return checkpoints.load(root, saved)
    except FileError as problem:
        raise DamagedCheckpointError(str(problem)) from problem


def _restore(runner: Runner, snapshot: Snapshot) -> None:
    runner.restore(snapshot.tensors, snapshot.facts)


def classify_failure(problem: Exception) -> tuple[str, bool]:
    """What failed, and whether the device is lost with it."""
    if isinstance(problem, NotANumberError):
        return "nan", False
    if isinstance(problem, DamagedCheckpointError):
        return "checkpoint", False
    if isinstance(problem, LoaderError) or is_worker_death(problem):
        return "loader", False
    if isinstance(problem, VerifyError):
        return "verify", False
    if isinstance(problem, MemoryError | DeviceMemoryError | torch.OutOfMemoryError):
        return "memory", False
    if isinstance(problem, RuntimeError) and "DefaultCPUAllocator" in str(problem):
        return "memory", False
    sticky = "CUDA error" in str(problem) or type(problem).__name__ == "AcceleratorError"
    return "exception", sticky


def _format_headline(problem: Exception) -> str:
    return f"{type(problem).__name__}: {' '.join(str(problem).split())[:500]}"
