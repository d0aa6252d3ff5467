"""Fake: a copy of the user's model whose tensors have shapes but no memory; the model is not touched."""

import copy
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_map, tree_map_only

from loadmaster.modules.full_masks import find_full_masks, name_arguments
from loadmaster.modules.tensor_trees import find_tensors, list_tensors


@dataclass(frozen=True, slots=True)
class FakeModel:
    """The model, its inputs and the mode they live in."""

    mode: FakeTensorMode
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    values: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()  # fake and real: buffers, whole-number inputs
    full_masks: frozenset[str] = frozenset()  # arguments that mask nothing

    def weights(self) -> dict[str, torch.Tensor]:
        """Every distinct parameter by its first name."""
        return dict(self.model.named_parameters())

    def buffers(self) -> dict[str, torch.Tensor]:
        """Every distinct buffer by its first name."""
        return dict(self.model.named_buffers())

    def inputs(self) -> list[tuple[str, torch.Tensor]]:
        """Every input tensor, named as the model's forward names its argument."""
        names = list_parameters(self.model)
        given = [
            (names[at] if at < len(names) else f"input_{at}", value) for at, value in enumerate(self.args)
        ]
        found = []
        for name, value in [*given, *self.kwargs.items()]:
            leaves = find_tensors(value)
            if leaves and isinstance(value, torch.Tensor):
                found.append((name, value))
            else:
                found += [(f"{name}_{at}", leaf) for at, leaf in enumerate(leaves)]
        return found

    def names(self) -> dict[str, torch.Tensor]:
        """Every name of every parameter and buffer."""
        tensors = dict(self.model.named_parameters(remove_duplicate=False))
        return tensors | dict(self.model.named_buffers(remove_duplicate=False))


def list_parameters(model: nn.Module) -> list[str]:
    """The names of what a model's forward takes, in order; none where Python does not know them."""
    try:
        return list(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):
        return []


def make_fake_model(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    full_masks: frozenset[str] | None = None,
) -> FakeModel:
    """A copy of the model on fake CPU tensors, with fake inputs; `full_masks` None: those that are full."""
    if full_masks is None:
        full_masks = find_full_masks(name_arguments(list_parameters(model), args, kwargs))
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers(), *_attribute_tensors(model)]:
        memo[id(tensor)] = fake_like(tensor, mode)
    try:
        copied = copy.deepcopy(model, dict(memo))
    except Exception:  # a lock, a file, a generator: such attributes are shared instead
        copied = rebuild_modules(model, memo)
    constants = [*model.buffers(), *_attribute_tensors(model)]
    values = [(memo[id(tensor)], tensor) for tensor in constants if not tensor.requires_grad]
    (args, kwargs), given = _fake_inputs((args, kwargs), mode)
    values += [
        (fake, tensor) for fake, tensor in given if not (tensor.is_floating_point() or tensor.is_complex())
    ]
    return FakeModel(mode, copied, args, kwargs, tuple(values), full_masks)


def _fake_inputs(inputs: Any, mode: FakeTensorMode) -> tuple[Any, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Inputs on fake tensors, also those inside of objects (a cache that grows, a batch of some class); and
    every fake tensor with its real one.

    A tensor that is given twice is two inputs: the next time it may be two tensors.
    """
    twins: dict[int, Any] = {}
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        pairs.append((fake_like(tensor, mode), tensor))
        return pairs[-1][0]

    def twin(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in twins:
            twins[id(tensor)] = fake(tensor)
        return twins[id(tensor)]

    def copy_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return fake(leaf)
        if isinstance(leaf, type) or not hasattr(leaf, "__dict__") or not find_tensors(leaf):
            return leaf
        try:
            return copy.deepcopy(leaf, {id(tensor): twin(tensor) for tensor in find_tensors(leaf)})
        except Exception:  # what cannot be copied is shared; its tensors become constants
            return leaf

    return tree_map(copy_leaf, inputs), pairs


def rebuild_modules(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """The tree of modules once more, with the tensors of `memo`; all else is shared with the original."""
    if id(module) not in memo:
        made = memo[id(module)] = object.__new__(type(module))
        state = {
            name: tree_map_only(torch.Tensor, lambda tensor: memo.get(id(tensor), tensor), value)
            for name, value in vars(module).items()
        }
        children = module._modules.items()
        state["_modules"] = {name: child and rebuild_modules(child, memo) for name, child in children}
        made.__dict__.update(state)
    return memo[id(module)]


def _attribute_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Tensors that modules hold as plain attributes."""
    own = {"_parameters", "_buffers", "_modules"}
    held = [value for module in model.modules() for name, value in vars(module).items() if name not in own]
    return list_tensors(held)


def fake_like(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A fake CPU tensor of that shape, strides and dtype; one that is fake in this mode stays itself."""
    if isinstance(tensor, FakeTensor) and tensor.fake_mode is mode:
        return tensor
    with mode:
        made = torch.empty_strided(tuple(tensor.size()), tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)
