"""Materialise: weights of a model made on 'meta' get their values module by module.

A module's own weights are made on the CPU, given values, and handed to `settle`, which sends them to their
device, before the next module's are made: the whole model is never on one device, nor on the CPU. Values come
from a checkpoint, or from the modules' own `reset_parameters`, children before parents, as constructors run.
So, under the same seed, the numbers are those of the model built plainly on the CPU wherever its modules were
registered in the order in which they were built and every weight gets its values by `reset_parameters` alone.
Models of the transformers library are initialised again by their `_init_weights`, module by module: the
distribution is the same, the numbers are others. Where the function that builds a model is at hand,
`meta_build` finds out whether resets repeat it to the bit.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from loadmaster.core.errors import InputError
from loadmaster.modules.checkpoint import Checkpoint

Settle = Callable[[str, torch.Tensor], None]  # a weight or buffer, by name, that has its values
_RESETS = ("reset_parameters", "_reset_parameters")


def is_meta(model: nn.Module) -> bool:
    """Whether any weight or buffer has no values."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def materialise(model: nn.Module, settle: Settle, *, weights: Checkpoint | None = None) -> None:
    """Give values to every weight on 'meta' (with `weights`: to every weight), and `settle` each at once."""
    names = _find_first_names(model)
    found = _match_checkpoint(model, weights, names) if weights is not None else {}
    blank = {id(module) for module in model.modules() if _is_blank(module)}
    with torch.no_grad():
        for path, module in _iterate_children_first(model):
            _materialise_module(model, path, module, found, weights, names, settle, blank=id(module) in blank)


def _materialise_module(
    model: nn.Module,
    path: str,
    module: nn.Module,
    found: Mapping[str, str],
    weights: Checkpoint | None,
    names: Mapping[int, str],
    settle: Settle,
    *,
    blank: bool,
) -> None:
    """One module's own weights: made, given values, sent home."""
    own = {name: tensor for name, tensor in own_tensors(module) if tensor.is_meta}
    for tensor in own.values():
        _make_real(tensor)
    before = {name: tensor._version for name, tensor in own.items()}
    lacking = [name for name in own if names[id(own[name])] not in found]
    if lacking or (weights is None and blank):
        with _protect_weights(module, keep=set(own)):
            _reset_module(model, module)
    for _, tensor in own_tensors(module):
        source = found.get(names.get(id(tensor), ""))
        if source is not None and weights is not None:
            tensor.copy_(weights.read(source))
    for name in lacking:
        now = _get_tensor(module, name)
        if now is own[name] and now._version == before[name] and now.numel():
            kind = "weight" if name in module._parameters else "buffer"
            full = f"{path}.{name}" if path else name
            raise InputError(
                f"{kind} {full!r} is on 'meta', and {type(module).__name__} has no reset_parameters to give"
                " it values; give weights=, write that method, or build this module outside of 'meta'"
            )
    for name, tensor in own_tensors(module):
        if name in own or (weights is not None):
            settle(names.get(id(tensor), f"{path}.{name}" if path else name), tensor)


def _make_real(tensor: torch.Tensor) -> None:
    """Empty memory on the CPU under the same object, so that ties and optimizers hold on to it."""
    made = torch.empty_like(tensor, device="cpu")
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, made)


@contextmanager
def _protect_weights(module: nn.Module, *, keep: set[str]) -> Iterator[None]:
    """Weights that have their values (those tied to another module's) are not given others: as where a model
    is built, the numbers drawn for them go nowhere."""
    real = {name: weight for name, weight in module._parameters.items() if weight is not None}
    real = {name: weight for name, weight in real.items() if name not in keep}
    for name, weight in real.items():
        module._parameters[name] = nn.Parameter(torch.empty_like(weight, device="cpu"), weight.requires_grad)
    try:
        yield
    finally:
        module._parameters.update(real)


def _reset_module(model: nn.Module, module: nn.Module) -> None:
    """The module's own way, then that of a model that initialises its modules itself."""
    for name in _RESETS:
        reset = getattr(module, name, None)
        if callable(reset):
            reset()
            break
    again = getattr(model, "_init_weights", None)
    if callable(again):
        again(module)


def _is_blank(module: nn.Module) -> bool:
    """Whether there are weights in a module and below, and none has values."""
    tensors = [*module.parameters(), *module.buffers()]
    return bool(tensors) and all(tensor.is_meta for tensor in tensors)


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Weights and buffers of the module itself."""
    for table in (module._parameters, module._buffers):
        yield from ((name, tensor) for name, tensor in table.items() if tensor is not None)


def _get_tensor(module: nn.Module, name: str) -> Any:
    return module._parameters.get(name, module._buffers.get(name))


def _iterate_children_first(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module after its children, which stand in the order of their registration."""
    stack, seen = [("", model, False)], {id(model)}
    while stack:
        path, module, ready = stack.pop()
        if ready:
            yield path, module
            continue
        stack.append((path, module, True))
        for name, child in reversed(list(module.named_children())):
            if id(child) not in seen:
                seen.add(id(child))
                stack.append((f"{path}.{name}" if path else name, child, False))


def _find_first_names(model: nn.Module) -> dict[int, str]:
    """The name of each weight and buffer; of several the first."""
    found: dict[int, str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found.setdefault(id(tensor), name)
    return found


def _match_checkpoint(model: nn.Module, weights: Checkpoint, names: Mapping[int, str]) -> dict[str, str]:
    """What the checkpoint calls each weight (of a tied one any name will do); refuses one that lacks some."""
    state = model.state_dict(keep_vars=True)
    head = str(getattr(model, "base_model_prefix", ""))
    found: dict[str, str] = {}
    for name, tensor in state.items():
        for known in (name, name.removeprefix(f"{head}."), f"{head}.{name}"):
            if known in weights.names and id(tensor) in names:
                found.setdefault(names[id(tensor)], known)
                break
    lacking = sorted({names[id(tensor)] for tensor in state.values() if id(tensor) in names} - set(found))
    if lacking:
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise InputError(
            f"{weights.source} lacks weight {lacking[0]!r}{more} of the model's"
            f" {len(state)}; it holds e.g. {', '.join(sorted(weights.names)[:3])}"
        )
    for name, known in found.items():
        here, there = tuple(state[name].shape), weights.shape(known)
        if here != there:
            raise InputError(
                f"weight {name!r} is {list(here)} in the model, {list(there)} in {weights.source}"
            )
    return found
