"""Callbacks and loggers: what a study reports while it runs.

A callback has any of the methods of `Callback`; a method it does not have is not called. Loggers are
callbacks that write files. They run in the coordinating process, between steps; one that raises ends the
study cleanly: what was trained is saved first. A logger (`is_logger = True`) that raises is told nothing
more, with a warning, and training goes on.
"""

import csv
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from loadmaster.core.errors import InputError, RunError


class Callback(Protocol):
    """Methods that a study calls while it trains. Define the ones you need."""

    def on_start(self, trials: Sequence[str]) -> None:
        """The study starts or continues."""

    def on_step(self, trial: str, done: Any) -> None:
        """An optimizer step is done. `done` has step, epoch, loss, num_tokens, seconds and bytes moved."""

    def on_device(self, device: str, trial: str, done: Any) -> None:
        """The same as on_step, with the device that ran it."""

    def on_report(self, trial: str, step: int, metrics: Mapping[str, float], decision: str) -> None:
        """A trial was evaluated. `decision` says whether it continues."""

    def on_checkpoint(self, trial: str, step: int) -> None:
        """A checkpoint is complete and valid."""

    def on_trial_end(self, trial: str, status: str, error: str) -> None:
        """A trial is done, was stopped, or failed."""

    def on_end(self, result: Any) -> None:
        """All trials have ended."""

    def on_close(self) -> None:
        """The call of `fit` ends, whether it succeeded or not."""


HOOKS = (
    "on_start",
    "on_step",
    "on_device",
    "on_report",
    "on_checkpoint",
    "on_trial_end",
    "on_end",
    "on_close",
)


class CallbackList:
    """All callbacks of a study, told in order."""

    def __init__(self, callbacks: Sequence[Any]) -> None:
        for each in callbacks:
            if not any(callable(getattr(each, hook, None)) for hook in HOOKS):
                raise InputError(f"callback {each!r} has none of the methods {', '.join(HOOKS)}")
        self._callbacks = list(callbacks)
        self.problem: BaseException | None = None  # what the first callback that failed raised

    def tell(self, hook: str, *facts: Any) -> None:
        """Call one method of all callbacks; who raises is not called again, but to close."""
        for each in list(self._callbacks):
            act = getattr(each, hook, None)
            if act is None:
                continue
            try:
                try:
                    act(*facts)
                except Exception as problem:
                    self._drop(each)
                    self._judge(each, hook, problem)
            except (SecondInterrupt, GeneratorExit):
                raise
            except BaseException as problem:  # SystemExit and KeyboardInterrupt wait for the saving, too
                self.problem = self.problem or problem

    def _judge(self, callback: Any, hook: str, problem: Exception) -> None:
        text = f"{type(callback).__name__}.{hook} raised {type(problem).__name__}: {problem}"
        if not getattr(callback, "is_logger", False):
            raise RunError(f"callback {text}") from problem
        warnings.warn(f"logger {text}; it is disabled, and training continues", RuntimeWarning, stacklevel=4)

    def _drop(self, callback: Any) -> None:
        self._callbacks = [each for each in self._callbacks if each is not callback]
        with suppress(Exception):  # it has failed already
            getattr(callback, "on_close", lambda: None)()

    def raise_problem(self) -> None:
        """Raise what a callback raised."""
        if self.problem is not None:
            raise self.problem


class SecondInterrupt(KeyboardInterrupt):
    """A Ctrl-C after the first one: nothing is waited for."""


_COLUMNS = ("trial", "kind", "step", "epoch", "loss", "num_tokens", "seconds", "bytes_up", "bytes_down")


class _FileLogger:
    """Opens its file when the first row comes, to append: a resumed study goes on in the same file."""

    is_logger = True

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: Any = None

    def _open_file(self) -> Any:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a", encoding="utf-8", newline="")  # noqa: SIM115
        return self._file

    def on_close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class JsonlLogger(_FileLogger):
    """Writes one JSON object per line: steps, reports, ends."""

    def on_step(self, trial: str, done: Any) -> None:
        """Write a line for a step."""
        self._write({"trial": trial, "kind": "step"} | {c: getattr(done, c) for c in _COLUMNS[2:]})

    def on_report(self, trial: str, step: int, metrics: Mapping[str, float], decision: str) -> None:
        """Write a line for a report."""
        facts = {"trial": trial, "kind": "report", "step": step}
        self._write(facts | {"metrics": dict(metrics), "decision": decision})

    def on_trial_end(self, trial: str, status: str, error: str) -> None:
        """Write a line for the end of a trial."""
        self._write({"trial": trial, "kind": "end", "status": status, "error": error})

    def _write(self, row: Mapping[str, Any]) -> None:
        print(json.dumps(replace_nonfinite(row)), file=self._open_file(), flush=True)


class CsvLogger(_FileLogger):
    """Writes one CSV row per step."""

    def on_step(self, trial: str, done: Any) -> None:
        """Write a row."""
        file = self._open_file()
        table = csv.writer(file)
        if file.tell() == 0:
            table.writerow(_COLUMNS)
        table.writerow([trial, "step", *(getattr(done, column) for column in _COLUMNS[2:])])
        file.flush()


class TensorBoardLogger:
    """Writes loss and metrics for TensorBoard, one run per trial. Needs the package `tensorboard`."""

    is_logger = True

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise InputError(
                "TensorBoardLogger needs TensorBoard; install it: pip install tensorboard"
            ) from None
        self._folder, self._make = Path(folder), SummaryWriter
        self._writers: dict[str, Any] = {}

    def on_step(self, trial: str, done: Any) -> None:
        """The training loss."""
        self._writer(trial).add_scalar("train/loss", done.loss, done.step)

    def on_report(self, trial: str, step: int, metrics: Mapping[str, float], decision: str) -> None:
        """Every metric."""
        for name, value in metrics.items():
            self._writer(trial).add_scalar(f"eval/{name}", value, step)

    def on_close(self) -> None:
        """Write out everything."""
        for writer in self._writers.values():
            writer.close()
        self._writers = {}

    def _writer(self, trial: str) -> Any:
        from loadmaster.train.disk.checkpoints import folder_name

        if trial not in self._writers:
            self._writers[trial] = self._make(str(self._folder / folder_name(trial)))
        return self._writers[trial]


def replace_nonfinite(value: Any) -> Any:
    """The value with null where JSON has no number."""
    if isinstance(value, Mapping):
        return {str(key): replace_nonfinite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [replace_nonfinite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
