"""What a study cannot train or could not resume; refused before anything is trained."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from loadmaster.core.errors import InputError
from loadmaster.shards.spec.trial import Trial

_OF_VALUES = ("DataDependentOutputException", "DynamicOutputShapeException", "UnsupportedOperatorException")
_WRAPPERS = {
    "OptimizedModule": "the module before torch.compile",
    "DataParallel": "its .module: trials are spread over devices by the study",
    "DistributedDataParallel": "its .module: trials are spread over devices by the study",
    "FullyShardedDataParallel": "the module before it is wrapped",
    "FSDPModule": "the module before fully_shard",
    "ScriptModule": "the module it was scripted or traced from",
}
_QUANTISED = (
    "bitsandbytes.",
    "torch.ao.nn.quantized",
    "torch.nn.quantized",
    "torchao.",
    "auto_gptq.",
    "gptqmodel.",
)
_PLAIN = (int, float, bool, str, type(None))


def check_not_lazy(trial: Trial, model: nn.Module) -> None:
    """A parameter without a shape can be neither planned nor laid out."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise InputError(
                f"trial {trial.name!r}: parameter {name!r} has no shape yet (a lazy module); let build run"
                " the model once on a batch before it returns it"
            )


def check_not_wrapped(trial: Trial, model: nn.Module) -> None:
    """A wrapper decides itself how its module runs; shards are run one by one."""
    for name, module in model.named_modules():
        kind = next((each.__name__ for each in type(module).__mro__ if each.__name__ in _WRAPPERS), "")
        if kind:
            raise InputError(
                f"trial {trial.name!r}: {f'module {name!r}' if name else 'its model'} is wrapped in {kind};"
                f" give {_WRAPPERS[kind]}"
            )


def check_not_quantised(trial: Trial, model: nn.Module) -> None:
    """Quantised weights keep their scales beside the tensor, and no shard carries those."""
    for name, module in model.named_modules():
        kinds = [type(module), *(type(parameter) for parameter in module.parameters(recurse=False))]
        odd = next((each for each in kinds if each.__module__.startswith(_QUANTISED)), None)
        if odd is not None:
            raise InputError(
                f"trial {trial.name!r}: module {name or 'itself'!r} has quantised weights"
                f" ({odd.__module__.partition('.')[0]}, {odd.__name__}), whose scales shards do not carry;"
                " load the model without quantization_config, frozen weights in bf16 come nearest"
            )


def check_dense_grads(trial: Trial, model: nn.Module) -> None:
    """Gradients travel as they lie in memory."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise InputError(
                f"trial {trial.name!r}: module {name or 'itself'!r} ({type(module).__name__}) gives sparse"
                " gradients, which do not go shard by shard; make it with sparse=False"
            )


def check_extra_state(trial: Trial, model: nn.Module) -> None:
    """A module's own kind of state is no tensor by a name: checkpoints would not hold it."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise InputError(
                f"trial {trial.name!r}: module {name or 'itself'!r} ({type(module).__name__}) keeps a state"
                " of its own (get_extra_state), which checkpoints of tensors do not hold; keep it in buffers"
            )


def _check_schedule(trial: Trial, made: Any) -> None:
    """A schedule is stepped with the optimizer and told nothing."""
    if isinstance(made, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise InputError(
            f"trial {trial.name!r}: ReduceLROnPlateau needs a metric in each step, and a schedule here gets"
            " none; use one that counts steps (CosineAnnealingLR, LambdaLR, ...), or stop trials that"
            " stand still with a searcher"
        )
    if not callable(getattr(made, "step", None)) or not hasattr(made, "state_dict"):
        raise InputError(
            f"trial {trial.name!r}: lr_schedule gave {type(made).__name__}; give a function from an"
            " optimizer to a scheduler of torch.optim.lr_scheduler, or one with step and state_dict"
        )


def describe_options(trial: Trial, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Optimizer and schedule by kind and options, as facts: a trial that has begun goes on with them.

    Makes the schedule, which changes the optimizer's options, and refuses one that cannot be stepped.
    """
    groups = optimizer.param_groups
    found: dict[str, Any] = {"optim": type(optimizer).__name__, "optim.num_groups": len(groups)}
    for at, group in enumerate(groups):
        begins = "optim" if len(groups) == 1 else f"optim[{at}]"
        found |= _select_plain_options(group, begins)
    if trial.lr_schedule is None:
        return found | {"lr_schedule": None}
    schedule = trial.lr_schedule(optimizer)
    _check_schedule(trial, schedule)
    return found | _describe_schedule(schedule, "lr_schedule")


def _describe_schedule(schedule: Any, begins: str) -> dict[str, Any]:
    """A schedule by kind and options, and those that it is made of."""
    moves = ("_", "last_epoch")  # where it stands
    options = {k: v for k, v in schedule.state_dict().items() if not k.startswith(moves)}
    if hasattr(schedule, "_milestones"):  # of SequentialLR
        options["milestones"] = schedule._milestones
    found = {begins: type(schedule).__name__, **_select_plain_options(options, begins)}
    for at, part in enumerate(getattr(schedule, "_schedulers", ())):
        found |= _describe_schedule(part, f"{begins}[{at}]")
    return found


def _select_plain_options(options: Mapping[str, Any], begins: str) -> dict[str, Any]:
    """Those options that are numbers and texts, or lists of them."""
    found = {}
    for key, value in options.items():
        number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        number = list(number.elements()) if isinstance(number, Counter) else number
        number = list(number) if isinstance(number, tuple) else number
        if isinstance(number, _PLAIN) or (
            isinstance(number, list) and all(isinstance(each, _PLAIN) for each in number)
        ):
            found[f"{begins}.{key}"] = number
    return found


def refuse_writes(trial: Trial, names: list[str]) -> NoReturn:
    """Weights come to the device as copies: what a forward writes into one would be lost."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    raise InputError(
        f"trial {trial.name!r}: its forward or loss writes parameter {names[0]!r}{more} in place (as an"
        " embedding with max_norm or a clamp does), which is lost when the shard leaves the"
        " device; write it in an optimizer step, or make it a buffer"
    )


class ValueReadError(InputError):
    """A model looked at values where there were none."""


@contextmanager
def refuse_value_reads(trial: Trial) -> Iterator[None]:
    """While a model runs on tensors without values: one that looks at them is told why it cannot."""
    try:
        yield
    except Exception as problem:
        if type(problem).__name__ not in _OF_VALUES:
            raise
        what = " ".join(str(getattr(problem, "func", problem)).split())[:100]
        raise ValueReadError(
            f"trial {trial.name!r}: its forward or loss looks at values of tensors ({what}), and memory is"
            " planned before there are any; shapes and Python numbers must not depend on them (masks instead"
            " of nonzero or x[mask], torch.where instead of if, BatchNorm with a momentum)"
        ) from problem
