"""A trial: one model, its data, its optimizer and how long to train it. Nothing is built here."""

import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from loadmaster.core.errors import InputError, LoadmasterError, RunError, UnknownNameError

Precision = Literal["fp32", "bf16", "fp16"]
COMPUTE_DTYPE = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_CALLABLES = ("build", "data", "optim")
_LIBRARIES = ("site-packages", "dist-packages", "<eval_with_key>", str(Path(__file__).resolve().parents[2]))
_OPTIONAL_CALLABLES = ("loss", "blocks", "lr_schedule", "evaluate")


@dataclass(frozen=True, kw_only=True, eq=False)
class Trial:
    """One model to train. Every field that names something to make is a function that makes it.

    - `build()`: returns the model.
    - `data()`: returns one epoch of (inputs, targets). A tuple of inputs becomes the positional arguments of
      the model, a mapping becomes its keyword arguments. A batch may also be one mapping, as tokenizers and
      collators of transformers return it; without `loss`, the model's output must then hold the loss.
    - `loss(output, target)`: returns one number.
    - `optim(weights)`: returns the optimizer; `lr_schedule(optimizer)` a scheduler, stepped after each step.
    - `blocks(model)`: returns the model as a chain of blocks. Default: found automatically.
    - `evaluate(predict)`: gets the model in eval mode as a function, and returns metrics by name.
    - `verify`: 'first-step' compares the first step with the plain model; False does not.
    - `replay`: record the steps of a group on one frozen backbone as CUDA graphs. Only for models whose
      `forward` does the same in every step.
    - `rng='counter'`: seed random numbers by step, micro-batch and block instead of drawing from one stream.
    """

    name: str
    build: Callable[[], torch.nn.Module]
    loss: Callable[[Any, Any], torch.Tensor] | None = None  # None: the model's output holds it
    data: Callable[[], Iterable[Any]]
    optim: Callable[[Any], torch.optim.Optimizer]
    blocks: Callable[[Any], Sequence[Any]] | None = None
    lr_schedule: Callable[[Any], Any] | None = None
    epochs: int = 1
    max_steps: int | None = None
    accumulate: int = 1
    clip_norm: float | None = None
    precision: Precision = "fp32"
    seed: int = 0
    evaluate: Callable[[Callable[[Any], Any]], Mapping[str, float]] | None = None
    eval_every: int | None = None
    rng: Literal["stream", "counter"] | None = None
    on_nan: Literal["fail", "ignore"] = "fail"
    replay: bool = False
    unused: tuple[str, ...] = ()
    verify: Literal["first-step", False] = "first-step"

    def __post_init__(self) -> None:
        """Refuse what cannot be trained, before anything is built."""
        if not isinstance(self.name, str) or not self.name:
            raise InputError(f"a trial needs a name, not {self.name!r}")
        for field in _CALLABLES:
            self._require_callable(field, optional=False)
        for field in _OPTIONAL_CALLABLES:
            self._require_callable(field, optional=True)
        for field in ("epochs", "accumulate"):
            self._require_count(field)
        for field in ("max_steps", "eval_every"):
            if getattr(self, field) is not None:
                self._require_count(field)
        self._require_choice("precision", tuple(COMPUTE_DTYPE))
        self._require_choice("on_nan", ("fail", "ignore"))
        if self.verify is not False:
            self._require_choice("verify", ("first-step",))
        if self.rng is not None:
            self._require_choice("rng", ("stream", "counter"))
        clip = self.clip_norm
        if clip is not None and not (isinstance(clip, int | float) and math.isfinite(clip) and clip > 0):
            raise InputError(f"trial {self.name!r}: clip_norm must be a number above 0, not {clip!r}")

    @classmethod
    def from_trainer(cls, trainer: Any, *, name: str | None = None, **changes: Any) -> "Trial":
        """The trial of a `transformers.Trainer`: its model, data and arguments.

        Optimizer, schedule, accumulation, clipping, precision, epochs, seed and evaluation come along. What
        would change the numbers and cannot is refused by name. `changes` are fields that overrule.
        """
        from loadmaster.shards.spec.hf_trainer import trial_from_trainer

        found: Trial = trial_from_trainer(trainer, name=name, make=cls, **changes)
        return found

    @property
    def counted_rng(self) -> bool:
        """Whether random numbers are seeded by (step, micro-batch, block), not drawn from one stream."""
        return self.rng == "counter"

    @property
    def deferred(self) -> bool:
        """Whether no parameter may change before every gradient is known."""
        return self.clip_norm is not None or self.precision == "fp16"

    def _require_callable(self, field: str, *, optional: bool) -> None:
        value = getattr(self, field)
        if not callable(value) and not (optional and value is None):
            hint = "; write data=lambda: loader" if field == "data" else ""
            kind = type(value).__name__
            raise InputError(f"trial {self.name!r}: {field} must be a function, not {kind}{hint}")

    def _require_count(self, field: str) -> None:
        value = getattr(self, field)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"trial {self.name!r}: {field} must be a whole number from 1, not {value!r}")

    def _require_choice(self, field: str, known: tuple[str, ...]) -> None:
        if getattr(self, field) not in known:
            raise UnknownNameError(f"{field} of trial {self.name!r}", str(getattr(self, field)), known)


def compute_loss(trial: Trial, output: Any, targets: Any) -> torch.Tensor:
    """The loss of a micro-batch: of the trial's own function, else what the model's output holds."""
    if trial.loss is not None:
        return trial.loss(output, targets)
    if isinstance(output, torch.Tensor):
        return output
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is None and isinstance(output, tuple) and output:
        found = output[0]
    if not isinstance(found, torch.Tensor):
        raise InputError(
            f"trial {trial.name!r} has no loss function, and the output of its model"
            f" ({type(output).__name__}) holds no loss; give Trial(loss=...), or batches with 'labels'"
        )
    return found


def split_batch(batch: Any) -> tuple[Any, Any] | None:
    """Inputs and targets of a batch: a pair as it is; a mapping is both. None: neither."""
    if isinstance(batch, Mapping):
        found = dict(batch)
        return found, found
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    return None


def compute_metrics(trial: Trial, predict: Callable[[Any], Any]) -> dict[str, float]:
    """What a trial's own evaluation says, as numbers by name."""
    found = trial.evaluate(predict) if trial.evaluate is not None else {}
    if not isinstance(found, Mapping):
        raise RunError(
            f"trial {trial.name!r}: evaluate must give numbers by name, such as {{'loss': 0.5}}, not"
            f" {type(found).__name__}"
        )
    return {str(name): float(value) for name, value in found.items()}


@contextmanager
def wrap_user_errors(name: str) -> Iterator[None]:
    """Before anything is trained, an exception of a trial's own functions is bad input: it says where."""
    try:
        yield
    except (LoadmasterError, MemoryError):
        raise
    except Exception as problem:
        frames = traceback.extract_tb(problem.__traceback__)
        own = [f for f in frames if not any(part in f.filename for part in _LIBRARIES)]
        where = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
        notes = "".join(f" ({note})" for note in getattr(problem, "__notes__", ()))
        text = " ".join(str(problem).split())[:400] + notes
        raise InputError(f"trial {name!r} raised {type(problem).__name__}{where}: {text}") from problem
