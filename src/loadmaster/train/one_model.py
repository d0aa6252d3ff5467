"""One line for one model: `lt.train(model, data, memory_cap="8GiB")`.

The model is trained where it stands: afterwards its parameters hold what was trained. Its checkpoints lie in
`runs/NAME`; the same line again goes on where it was left, or gives what was trained if it had ended.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from loadmaster.core.errors import InputError, RunError
from loadmaster.shards.spec.trial import Precision, Trial
from loadmaster.train.coordination.result import TrialResult, TrialStatus
from loadmaster.train.coordination.searchers import Searcher
from loadmaster.train.study import Study

_NARROW = "this GPU computes in bf16 several times faster: precision='bf16' trains fp32 weights with it"


def train(
    model: nn.Module | Callable[[], nn.Module],
    data: Any,
    *,
    memory_cap: str | int | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    optim: Callable[[Any], torch.optim.Optimizer] | None = None,
    lr: float = 5e-5,
    epochs: int = 1,
    max_steps: int | None = None,
    batch_size: int = 8,
    precision: Precision = "fp32",
    name: str | None = None,
    dir: str | os.PathLike[str] | None = None,
    device: str | None = None,
    seed: int = 0,
    progress: bool | str = "auto",
    callbacks: Sequence[Any] = (),
    searcher: Searcher | None = None,
    keep_best: bool = False,
    **options: Any,
) -> TrialResult:
    """Train one model under a cap on device memory. AdamW is used unless `optim` is given.

    - `data`: a DataLoader, a list of batches, a function that returns one of these for each epoch, or a
      dataset, from which shuffled batches of `batch_size` are drawn. A batch is a mapping of the model's
      keyword arguments (then the model's output holds the loss), or (inputs, targets) together with `loss`.
    - `searcher`: may stop the training early (`lt.Patience`).
    - `keep_best`: keep the weights of the best report, and leave them in the model.
    - `options`: other options of `lt.Trial`.

    Returns the result of the trial. The model then holds the trained weights.
    """
    given = model if isinstance(model, nn.Module) else None
    if given is not None and any(parameter.is_cuda for parameter in given.parameters()):
        given.to("cpu")  # its weights live in host memory, and come to the device as they are needed
    called = name or _name_of(model)
    trial = Trial(
        name=called,
        build=model if given is None else lambda: given,
        data=make_epochs(data, batch_size=batch_size),
        loss=loss,
        optim=optim or (lambda parameters: torch.optim.AdamW(parameters, lr=lr)),
        epochs=epochs,
        max_steps=max_steps,
        precision=precision,
        seed=seed,
        **options,
    )
    where = device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    study = Study(
        trial,
        dir=Path("runs") / called if dir is None else dir,
        devices=where,
        memory_cap=memory_cap,
        callbacks=callbacks,
        searcher=searcher,
        keep_best=keep_best,
        launcher="inline",
    )
    note = (
        _NARROW if precision == "fp32" and where.startswith("cuda") and torch.cuda.is_bf16_supported() else ""
    )
    found = study.fit(progress=progress, note=note)[called]
    if found.status == TrialStatus.FAILED:
        raise RunError(f"training of {called!r} failed at step {found.step}: {found.error.strip()}")
    if given is not None and found.folder is not None:
        chosen = found if found.best_folder is None else found.best
        given.load_state_dict(chosen.state_dict())
    return found


def make_epochs(data: Any, *, batch_size: int = 8) -> Callable[[], Iterable[Any]]:
    """A function that gives the batches of an epoch, of whatever people have as data."""
    if _is_dataset(data):
        from torch.utils.data import DataLoader

        shaped = data.with_format("torch") if callable(getattr(data, "with_format", None)) else data
        return lambda: DataLoader(shaped, batch_size=batch_size, shuffle=True)
    if isinstance(data, Mapping):
        raise InputError("data is one mapping; give a list of batches, a dataset or a DataLoader")
    if isinstance(data, Iterable):
        if iter(data) is data:
            raise InputError(
                "data is an iterator, which is used up after one pass; give a list of batches, a DataLoader,"
                " or a function that makes one"
            )
        return lambda: data
    if callable(data):

        def make_epoch() -> Iterable[Any]:
            found = data()
            return make_epochs(found, batch_size=batch_size)() if _is_dataset(found) else found

        return make_epoch
    raise InputError(f"data is {type(data).__name__}; give a list of batches, a dataset or a DataLoader")


def _is_dataset(data: Any) -> bool:
    """Whether it gives single samples by number: batches are still to be made."""
    from torch.utils.data import DataLoader, Dataset, IterableDataset

    if isinstance(data, DataLoader | IterableDataset | list | tuple):
        return False
    named = type(data).__module__.startswith("datasets") and hasattr(data, "features")
    return (isinstance(data, Dataset) or named) and hasattr(data, "__getitem__")


def _name_of(model: Any) -> str:
    return (
        type(model).__name__
        if isinstance(model, nn.Module)
        else getattr(model, "__name__", "model").strip("<>")
    )
