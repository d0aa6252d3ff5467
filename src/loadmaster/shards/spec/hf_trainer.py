"""A `transformers.Trainer` as a trial: its model, data, optimizer, schedule and arguments.

What would change the numbers and cannot be carried over is refused by name; what only concerns logging and
files is named in a warning.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from loadmaster.core.errors import InputError

_REFUSED = {  # argument: what to do
    "deepspeed": "the study places weights itself; leave it out",
    "fsdp": "the study places weights itself; leave it out",
    "label_smoothing_factor": "give Trial(loss=...) with F.cross_entropy(..., label_smoothing=...)",
    "neftune_noise_alpha": "add the noise in the model",
    "torch_compile": "the model runs as it is written; leave it out",
    "parallelism_config": "the study places weights itself; leave it out",
    "max_steps_per_epoch": "give max_steps",
}
_IGNORED = -100  # a label that does not count
_OWN = {  # methods that a subclass may have changed: what to give instead
    "compute_loss": "loss",
    "training_step": "loss",
    "compute_loss_context_manager": "precision",
    "autocast_smart_context_manager": "precision",
    "get_train_dataloader": "data",
    "get_batch_samples": "data",
    "_prepare_inputs": "data",
    "_prepare_input": "data",
    "create_optimizer": "optim",
    "create_optimizer_and_scheduler": "optim",
    "create_scheduler": "lr_schedule",
}
_LOOPS = ("train", "_inner_training_loop")
_ASKED = (  # of a subclass as of any trainer
    *("get_decay_parameter_names", "get_optimizer_cls_and_kwargs", "_get_train_sampler"),
    *("_remove_unused_columns", "_get_collator_with_removed_columns"),
)
_LEFT = (  # arguments that do something beside the numbers of training
    *("load_best_model_at_end", "eval_delay", "eval_on_start", "bf16_full_eval", "fp16_full_eval"),
    *("auto_find_batch_size", "full_determinism", "resume_from_checkpoint", "push_to_hub"),
)


def trial_from_trainer(trainer: Any, *, name: str | None, make: Callable[..., Any], **changes: Any) -> Any:
    """The trial; `changes` are fields of it that overrule what the trainer says."""
    args, model = trainer.args, trainer.model
    _refuse(trainer, changes)
    per_step = args.gradient_accumulation_steps
    num_batches = _count_batches(trainer)
    num_steps, epochs, max_steps = _count_steps(args, num_batches, per_step)
    _warn(trainer, per_step)
    evaluate, every = _make_evaluation(trainer, num_batches, per_step, num_steps)
    fields = {
        "name": name or type(model).__name__,
        "build": lambda: trainer.model.to("cpu"),
        "data": lambda: _count_tokens(trainer, make_loader(trainer), per_step),
        "optim": _make_optim(trainer),
        "lr_schedule": _make_schedule(trainer, num_steps),
        "epochs": epochs,
        "max_steps": max_steps,
        "accumulate": per_step,
        "clip_norm": args.max_grad_norm or None,
        "precision": "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        "seed": args.seed,
        "evaluate": evaluate,
        "eval_every": every,
    }
    return make(**(fields | changes))


def make_loader(trainer: Any, *, evaluation: bool = False) -> Any:
    """An epoch's batches as the trainer makes them: its collator, sampler and columns."""
    from torch.utils.data import DataLoader, IterableDataset, RandomSampler

    args = trainer.args
    dataset = trainer.eval_dataset if evaluation else trainer.train_dataset
    collate = trainer.data_collator
    what = "evaluation" if evaluation else "training"
    if type(dataset).__module__.startswith("datasets") and hasattr(dataset, "features"):
        dataset = trainer._remove_unused_columns(dataset, description=what)
    else:
        collate = trainer._get_collator_with_removed_columns(collate, description=what)
    given: dict[str, Any] = {
        "batch_size": args.eval_batch_size if evaluation else args.train_batch_size,
        "collate_fn": collate,
        "num_workers": args.dataloader_num_workers,
    }
    if isinstance(dataset, IterableDataset):
        return DataLoader(dataset, **given)
    given["drop_last"] = args.dataloader_drop_last
    if evaluation:
        return DataLoader(dataset, **given)
    sampler = trainer._get_train_sampler(dataset)
    if sampler is None or isinstance(sampler, RandomSampler):
        return DataLoader(dataset, shuffle=True, **given)  # drawn again for every epoch, and resumable
    return DataLoader(dataset, sampler=sampler, **given)


def _count_tokens(trainer: Any, loader: Any, per_step: int) -> Any:
    """The batches with what the trainer's loss is divided by, where its model takes that."""
    return _Counted(loader, per_step) if getattr(trainer, "model_accepts_loss_kwargs", False) else loader


class _Counted:
    """Adds `num_items_in_batch`: labels that count, of all micro-batches of a step.

    A step divides each loss by its number of micro-batches, so each is told its share.
    """

    def __init__(self, loader: Any, per_step: int) -> None:
        self._loader, self._per_step = loader, per_step
        if hasattr(type(loader), "__len__"):
            self.__class__ = _CountedSized

    def __iter__(self) -> Iterator[Any]:
        """Batches, a step's at a time."""
        waiting: list[Any] = []
        for batch in self._loader:
            waiting.append(batch)
            if len(waiting) == self._per_step:
                yield from self._tell_token_counts(waiting)
                waiting = []
        yield from self._tell_token_counts(waiting)

    @staticmethod
    def _tell_token_counts(batches: list[Any]) -> Iterator[Any]:
        if not batches or not all("labels" in each for each in batches):
            yield from batches
            return
        count = sum(int((each["labels"] != _IGNORED).sum()) for each in batches)
        share = count if len(batches) == 1 else count / len(batches)
        for each in batches:
            yield {**each, "num_items_in_batch": share}


class _CountedSized(_Counted):
    """One whose length is known."""

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self._loader)


def _refuse(trainer: Any, changes: Mapping[str, Any]) -> None:
    """What would change the numbers; a field in `changes` is given otherwise."""
    args = trainer.args
    for field, instead in _REFUSED.items():
        value = getattr(args, field, None)
        if value not in (None, False, 0, 0.0, "", [], {}):
            raise InputError(f"the trainer's {field}={value!r} cannot be carried over: {instead}")
    if args.world_size > 1:
        raise InputError(
            f"the trainer is one of {args.world_size} processes, which cannot be carried over: start one, and"
            " give the study its devices"
        )
    own = _list_own_methods(trainer)
    if trainer.compute_loss_func is not None:
        own = ["compute_loss_func", *own]
    for method in own:
        wanted = "loss" if method == "compute_loss_func" else _OWN.get(method)
        if method in _LOOPS:
            raise InputError(f"the trainer's own {method} cannot be carried over: a study has its own loop")
        if wanted is not None and wanted not in changes:
            raise InputError(
                f"the trainer's own {method} cannot be carried over: give from_trainer(trainer, {wanted}=...)"
            )
    if trainer.lr_scheduler is not None and "lr_schedule" not in changes:
        raise InputError(
            f"the trainer's own lr_scheduler ({type(trainer.lr_scheduler).__name__}) is bound to its"
            " optimizer and cannot be carried over: give from_trainer(trainer, lr_schedule=...), a function"
            " from an optimizer to a scheduler"
        )
    if trainer.optimizer is not None and trainer.optimizer.state and "optim" not in changes:
        raise InputError(
            "the trainer's optimizer has been stepped, and its state cannot be carried over: make the trial"
            " of a trainer that has not trained yet"
        )
    if trainer.train_dataset is None and "data" not in changes:
        raise InputError("the trainer has no train_dataset")


def _list_own_methods(trainer: Any) -> list[str]:
    """Methods of the Trainer that a class of the user's, or this very object, has changed."""
    kinds = type(trainer).__mro__
    home = next(each for each in kinds if each.__module__ == "transformers.trainer")
    own = [each for each in kinds[: kinds.index(home)] if not each.__module__.startswith("transformers.")]
    tables = [vars(trainer), *map(vars, own)]
    names = {name for table in tables for name, value in table.items() if callable(value)}
    return sorted(name for name in names if callable(getattr(home, name, None)) and name != "__init__")


def _warn(trainer: Any, per_step: int) -> None:
    """Name what is left behind."""
    usual = {"DefaultFlowCallback", "PrinterCallback", "ProgressCallback", "NotebookProgressCallback"}
    left = [
        f"callback {type(each).__name__}"
        for each in trainer.callback_handler.callbacks
        if type(each).__name__ not in usual
    ]
    known = {*_OWN, *_ASKED, *_LOOPS}
    left += [f"its own {each}" for each in _list_own_methods(trainer) if each not in known]
    left += [
        field
        for field in ("compute_metrics", "preprocess_logits_for_metrics")
        if getattr(trainer, field, None) is not None
    ]
    left += [field for field in _LEFT if getattr(trainer.args, field, None)]
    if per_step > 1 and not getattr(trainer, "model_accepts_loss_kwargs", False):
        left.append("averaging of the loss over the tokens of all micro-batches (each counts alike)")
    if left:
        warnings.warn(f"not carried over from the trainer: {', '.join(left)}", UserWarning, stacklevel=5)


def _count_batches(trainer: Any) -> int | None:
    try:
        return len(make_loader(trainer))
    except TypeError:
        return None


def _count_steps(args: Any, num_batches: int | None, per_step: int) -> tuple[int, int, int | None]:
    """Optimizer steps for the schedule, epochs, and a limit where the epochs are not whole."""
    per_epoch = None if num_batches is None else max(1, math.ceil(num_batches / per_step))
    if args.max_steps > 0:
        epochs = 1 if per_epoch is None else math.ceil(args.max_steps / per_epoch)
        return args.max_steps, epochs, args.max_steps
    if per_epoch is None:
        raise InputError("the trainer's data has no length; give TrainingArguments(max_steps=...)")
    steps = math.ceil(args.num_train_epochs * per_epoch)
    whole = float(args.num_train_epochs).is_integer()
    return steps, math.ceil(args.num_train_epochs), None if whole else steps


def _make_optim(trainer: Any) -> Callable[[Any], torch.optim.Optimizer]:
    """The trainer's kind of optimizer over any parameters, weight decay where it has it."""
    if trainer.optimizer is not None:
        return _copy_optim(trainer.optimizer)
    try:
        kind, options = type(trainer).get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    except ImportError as problem:
        raise InputError(f"the trainer's optimizer {trainer.args.optim}: {problem}") from problem
    for key in ("params", "model", "optimizer_dict"):
        if key in options:
            raise InputError(
                f"the trainer's optimizer {trainer.args.optim} cannot be carried over: it needs {key};"
                " give from_trainer(trainer, optim=...)"
            )
    options = {key: value for key, value in options.items() if key in _list_parameters(kind)}
    decays = set(trainer.get_decay_parameter_names(trainer.model))
    wanted = trainer.args.weight_decay

    def optim(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        given = list(parameters)
        names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
        with_decay = [each for each in given if names.get(id(each), "") in decays or id(each) not in names]
        rest = [each for each in given if not any(each is other for other in with_decay)]
        if not (with_decay and rest):
            return kind(given, **(options | {"weight_decay": wanted if with_decay else 0.0}))
        groups = [
            {"params": with_decay, "weight_decay": wanted},
            {"params": rest, "weight_decay": 0.0},
        ]
        return kind(groups, **options)

    return optim


def _copy_optim(made: torch.optim.Optimizer) -> Callable[[Any], torch.optim.Optimizer]:
    """An optimizer that the trainer was given, with its groups and their options."""
    rows = [
        (
            {id(parameter) for parameter in group["params"]},
            {key: value for key, value in group.items() if key not in ("params", "initial_lr")},
        )
        for group in made.param_groups
    ]
    defaults = {k: v for k, v in made.defaults.items() if k in _list_parameters(type(made))}

    def optim(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        given = list(parameters)
        groups = [
            {"params": [each for each in given if id(each) in members], **options}
            for members, options in rows
        ]
        found: torch.optim.Optimizer = type(made)([each for each in groups if each["params"]], **defaults)
        return found

    return optim


def _list_parameters(kind: Any) -> set[str]:
    import inspect

    return set(inspect.signature(kind.__init__).parameters)


def _make_schedule(trainer: Any, num_steps: int) -> Callable[[Any], Any]:
    from transformers import get_scheduler

    args = trainer.args
    kind = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    if kind in ("reduce_lr_on_plateau", "greedy"):
        raise InputError(
            f"the trainer's lr_scheduler_type={kind!r} cannot be carried over: it depends on metrics"
        )
    warm = args.get_warmup_steps(num_steps)
    more = args.lr_scheduler_kwargs or None
    return lambda optimizer: get_scheduler(
        kind, optimizer, num_warmup_steps=warm, num_training_steps=num_steps, scheduler_specific_kwargs=more
    )


def _make_evaluation(
    trainer: Any, num_batches: int | None, per_step: int, num_steps: int
) -> tuple[Any, int | None]:
    """The mean loss of the evaluation data, as often as the trainer takes it."""
    strategy = str(getattr(trainer.args.eval_strategy, "value", trainer.args.eval_strategy))
    if trainer.eval_dataset is None or strategy == "no":
        return None, None
    if isinstance(trainer.eval_dataset, Mapping):
        raise InputError("the trainer's eval_dataset is a dict of several; give from_trainer(evaluate=...)")

    def evaluate(predict: Callable[[Any], Any]) -> dict[str, float]:
        total, count = 0.0, 0
        for batch in make_loader(trainer, evaluation=True):
            size = len(next(iter(batch.values())))
            total += float(predict(dict(batch))["loss"]) * size
            count += size
        return {"loss": total / max(1, count)}

    if strategy == "steps":
        every = trainer.args.eval_steps or 500
        return evaluate, int(every) if every >= 1 else max(1, math.ceil(every * num_steps))
    return evaluate, None if num_batches is None else max(1, math.ceil(num_batches / per_step))
