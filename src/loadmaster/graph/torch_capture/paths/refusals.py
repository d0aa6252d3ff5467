"""Refusals: models that cannot be captured, each with its name and a remedy."""

from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_leaves

from loadmaster.core.errors import GraphError, InputError

_WRAPPERS = {
    "DistributedDataParallel": "capture model.module; the plan decides how work is distributed",
    "DataParallel": "capture model.module; the plan decides how work is distributed",
    "FullyShardedDataParallel": "capture the model before it is wrapped",
    "FSDPModule": "capture the model before fully_shard",
    "DeepSpeedEngine": "capture engine.module",
    "PipelineStage": "capture the whole model",
}
MOST_MICRO_STEPS = 4096
_QUANTISED_MODULES = (
    "torch.ao.nn.",
    "torch.nn.quantized.",
    "bitsandbytes.",
    "auto_gptq.",
    "awq.",
    "gptqmodel.",
)


def check_model(model: Any) -> None:
    """Raise for what no path can capture."""
    if getattr(model, "__name__", "") == "generate" and isinstance(
        getattr(model, "__self__", None), nn.Module
    ):
        raise InputError(
            "generate() runs the model once for every token, with a cache that grows; capture the model"
            " itself on the inputs of one such run (past_key_values of the length you mean), with train=False"
        )
    if not isinstance(model, nn.Module):
        raise InputError(f"{type(model).__name__} is not a torch.nn.Module; give the model itself")
    for path, module in model.named_modules():
        _check_wrapper(path, module)
        _check_script(path, module)
        _check_quantised(path, module)
    _check_lazy(model)
    _check_devices(model)


def check_inputs(args: Any, kwargs: Any) -> None:
    """Raise for inputs that are no inputs."""
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, nn.Module | torch.optim.Optimizer):
            raise InputError(f"an input is a {type(leaf).__name__}; give tensors and plain values")


def check_options(train: bool, *, autocast: Any, accumulation: Any, grad_scaler: Any) -> None:
    """Raise for options of a training step that make none."""
    if autocast is not None and autocast not in (torch.float16, torch.bfloat16):
        raise InputError(f"autocast is {autocast!r}; give torch.bfloat16, torch.float16 or None")
    whole = isinstance(accumulation, int) and not isinstance(accumulation, bool)
    if not whole or not 1 <= accumulation <= MOST_MICRO_STEPS:
        raise InputError(
            f"accumulation is {accumulation!r}; give the number of passes before an update,"
            f" 1 to {MOST_MICRO_STEPS}"
        )
    if not isinstance(grad_scaler, bool):
        raise InputError(f"grad_scaler is {grad_scaler!r}; give True or False")
    if not train and (accumulation > 1 or grad_scaler):
        what = "accumulation" if accumulation > 1 else "grad_scaler"
        raise InputError(f"{what} is of a training step, and train is False; leave it out")


def _check_wrapper(path: str, module: nn.Module) -> None:
    for kind in type(module).__mro__:
        if kind.__name__ in _WRAPPERS and not kind.__module__.startswith("__main__"):
            where = f" at {path!r}" if path else ""
            raise GraphError(f"the model is wrapped in {kind.__name__}{where}; {_WRAPPERS[kind.__name__]}")


def _check_script(path: str, module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        what = f"module {path!r} is" if path else "the model is"
        raise GraphError(
            f"{what} TorchScript, which has no Python code to follow; use the nn.Module it came from"
        )


def _check_quantised(path: str, module: nn.Module) -> None:
    kind = type(module)
    quantised = kind.__module__.startswith(_QUANTISED_MODULES)
    quantised |= any(tensor.is_quantized for tensor in module.parameters(recurse=False))
    if quantised:
        raise GraphError(
            f"module {path!r} is quantised ({kind.__name__}); capture the model before it is quantised"
        )
    for name, weight in module.named_parameters(recurse=False):
        plain = type(weight.data) in (torch.Tensor, nn.Parameter, FakeTensor)
        if not plain:
            whole, what = f"{path}.{name}".strip("."), type(weight.data).__name__
            raise GraphError(
                f"weight {whole!r} is a {what}, not a plain tensor; capture the model before it is sharded or"
                " quantised"
            )


def _check_lazy(model: nn.Module) -> None:
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if nn.parameter.is_lazy(weight):
            raise GraphError(f"weight {name!r} has no shape yet; run the model once on the example first")


def _check_devices(model: nn.Module) -> None:
    """All on one device; buffers that stayed on the CPU of a model on `meta` are as good as on it."""
    first: dict[str, str] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        first.setdefault(str(tensor.device), name)
    real = {device: name for device, name in first.items() if device != "meta"}
    if len(real) > 1:
        (one, here), (other, there) = list(real.items())[:2]
        raise GraphError(
            f"the model is on {one} ({here!r}) and on {other} ({there!r}); capture it from one device,"
            " before it is distributed; the plan decides where things go"
        )
