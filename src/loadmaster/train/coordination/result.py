"""What a study found: every trial with its end, the best one, a table, a trace."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from loadmaster.core.errors import InputError, UnknownNameError
from loadmaster.core.files import write_bytes
from loadmaster.core.units import format_seconds
from loadmaster.modules.tensor_files import write_tensors
from loadmaster.report.trace import study_trace
from loadmaster.train.coordination.callbacks import replace_nonfinite
from loadmaster.train.coordination.searchers import metric_value
from loadmaster.train.disk import checkpoints
from loadmaster.train.disk.journal import make_write_error

_HEADS = {"tokens_per_s": "tokens/s", "seconds": "time"}  # of the table, where they differ from the rows'


class TrialStatus(StrEnum):
    """How a trial stands."""

    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPED = "stopped"  # by the searcher
    FAILED = "failed"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class TrialResult:
    """One trial at the end."""

    name: str
    status: TrialStatus
    step: int
    loss: float | None  # of the last step
    metrics: Mapping[str, float]  # of the last report
    seconds: float  # of its steps
    num_tokens: int
    error: str = ""  # where it failed: kind, message and traceback
    error_kind: str = ""  # exception, memory, nan, loader, verify
    durable_step: int = 0
    folder: Path | None = None  # its last committed checkpoint
    is_evaluated: bool = True  # False: it has no `evaluate`, and its metrics are a loss of its steps
    verified: str = ""  # what the comparison of its first step with the plain model said; '' = none
    best_step: int | None = None  # of its best report, with `keep_best`
    best_metrics: Mapping[str, float] = field(default_factory=dict)
    best_folder: Path | None = None

    def __str__(self) -> str:
        """What one model's training came to, in a few lines."""
        loss = "" if self.loss is None else f", loss {self.loss:.4g}"
        lines = [f"{self.name}: {self.status} after {self.step} steps{loss}, {format_seconds(self.seconds)}"]
        lines += [self.verified] if self.verified else []
        lines += [f"checkpoint: {self.folder}"] if self.folder is not None else []
        return "\n".join([*lines, self.error] if self.error else lines)

    @property
    def best(self) -> "TrialResult":
        """The trial where its best report was: other weights, step and metrics; wants `keep_best`."""
        if self.best_folder is None or self.best_step is None:
            raise InputError(
                f"no best checkpoint of trial {self.name!r} was kept; give Study(..., keep_best=True) and an"
                " evaluation or a searcher that reports"
            )
        return replace(self, step=self.best_step, metrics=self.best_metrics, folder=self.best_folder)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The weights of its last checkpoint, as the plain model loads them."""
        if self.folder is None:
            raise InputError(
                f"trial {self.name!r} has no checkpoint: it is {self.status} at step {self.step}"
            )
        return checkpoints.read_model(self.folder)

    def save_model(self, path: str | Path) -> None:
        """Write all its weights into one safetensors file."""
        state = self.state_dict()
        try:
            write_tensors(Path(path), state)
        except OSError as problem:
            raise make_write_error(Path(path), problem) from None

    def save_pretrained(self, folder: str | Path, model: Any) -> None:
        """Write its weights as `model.save_pretrained` does: `from_pretrained` of transformers reads them.

        `model` is one of the same configuration (its own weights do not matter), of transformers or peft.
        """
        if not callable(getattr(model, "save_pretrained", None)):
            raise InputError(
                f"{type(model).__name__} has no save_pretrained; write plain weights with save_model(path)"
            )
        Path(folder).mkdir(parents=True, exist_ok=True)
        model.save_pretrained(str(folder), state_dict=self.state_dict())


@dataclass(frozen=True, slots=True)
class Span:
    """Something that a device did, for the trace; times since the study began."""

    device: str
    lane: str  # compute, up, down, host, ...
    name: str
    trial: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Result:
    """The trials of a study, in the order they were given."""

    trials: tuple[TrialResult, ...]
    metric: str | None = None
    mode: str = "min"
    wall_s: float = 0.0
    spans: Sequence[Span] = field(default=(), repr=False)

    def __iter__(self) -> Iterator[TrialResult]:
        """Every trial, in order."""
        return iter(self.trials)

    def __len__(self) -> int:
        """How many trials."""
        return len(self.trials)

    def __getitem__(self, name: str) -> TrialResult:
        """One trial by its name."""
        if not isinstance(name, str):
            first = self.trials[0].name
            raise InputError(f"{name!r} is not the name of a trial; pass a name, such as {first!r}")
        for each in self.trials:
            if each.name == name:
                return each
        raise UnknownNameError("trial", name, [each.name for each in self.trials])

    @property
    def best(self) -> TrialResult:
        """The trial with the best metric, without those that were stopped or failed."""
        ended = [each for each in self.trials if each.status == TrialStatus.DONE]
        if not ended:
            states = ", ".join(f"{each.name}: {each.status}" for each in self.trials)
            raise InputError(f"no trial is done ({states})")
        sign = 1 if self.mode == "min" else -1
        scored = [(sign * self.value(each), at) for at, each in enumerate(ended)]
        return ended[min(scored, key=lambda pair: (pair[0] != pair[0], pair[0], pair[1]))[1]]

    def value(self, trial: TrialResult) -> float:
        """The value that a trial is compared by. Without an evaluation, its last loss."""
        if not trial.metrics and self.metric in (None, "loss"):
            return float("nan") if trial.loss is None else trial.loss
        return metric_value(trial.metrics, self.metric)

    def rows(self) -> list[dict[str, Any]]:
        """One dict per trial."""
        return [
            {
                "trial": each.name,
                "status": str(each.status),
                "step": each.step,
                "loss": each.loss,
                **{f"eval {name}": value for name, value in each.metrics.items() if each.is_evaluated},
                "tokens_per_s": each.num_tokens / each.seconds if each.seconds else None,
                "seconds": each.seconds,
                "checked": _format_check(each),
                "error": each.error.strip().splitlines()[0] if each.error else "",
            }
            for each in self.trials
        ]

    def table(self) -> str:
        """The trials as text, one per line."""
        rows = self.rows()
        longest = max(
            rows, key=len, default={}
        )  # a trial that failed has no metrics, and its error goes last
        columns = list(dict.fromkeys([*longest, *(name for row in rows for name in row)]))
        columns.sort(key=lambda name: name == "error")
        columns = [name for name in columns if name != "error" or any(row["error"] for row in rows)]
        heads = [_HEADS.get(name, name) for name in columns]
        cells = [heads, *([_format_cell(name, row.get(name)) for name in columns] for row in rows)]
        widths = [max(len(row[at]) for row in cells) for at in range(len(columns))]
        lines = (
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in cells
        )
        return "\n".join(line.rstrip() for line in lines)

    def to_json(self) -> dict[str, Any]:
        """Everything except spans and weights, as JSON."""
        done = [each for each in self.trials if each.status == TrialStatus.DONE]
        document = {
            "best": self.best.name if done else None,
            "wall_s": self.wall_s,
            "metric": self.metric,
            "mode": self.mode,
            "trials": [
                row
                | {"error_kind": each.error_kind, "verified": each.verified}
                | {"checkpoint": str(each.folder) if each.folder else None}
                | _describe_best(each)
                for row, each in zip(self.rows(), self.trials, strict=True)
            ],
        }
        found = replace_nonfinite(document)
        assert isinstance(found, dict)
        return found

    def trace(self, path: str | Path) -> None:
        """Write a Chrome trace of what the devices did. It opens in Perfetto."""
        write_bytes(study_trace(self.spans), path)


def _describe_best(trial: TrialResult) -> dict[str, Any]:
    if trial.best_folder is None:
        return {}
    return {"best_step": trial.best_step, "best_checkpoint": str(trial.best_folder)}


def _format_check(trial: TrialResult) -> str:
    if trial.error_kind == "verify":
        return "differs"
    return {"": "-", "not": "no"}.get(trial.verified.partition(" ")[0], "yes")


def _format_cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name == "seconds":
        return format_seconds(value)
    if name == "tokens_per_s":
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
