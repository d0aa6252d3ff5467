"""The chain of blocks of a model, and which parameters and buffers each block holds.

A block takes what the block before it gave: any pytree of tensors, so a skip connection that crosses a cut is
one more leaf. Blocks are given (`Trial.blocks`), or read off the module tree (`nn.Sequential`, or a module
whose only children are such chains), or cut out of the graph (`fx_blocks.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from loadmaster.core.errors import InputError
from loadmaster.shards.model.fx_blocks import cut_blocks_from_graph
from loadmaster.shards.model.torch_containers import as_chain, has_hooks
from loadmaster.shards.spec.trial import Trial


@dataclass(frozen=True, slots=True, eq=False)
class TensorSlot:
    """A place in the module tree where a parameter or buffer is looked up."""

    module: nn.Module
    attribute: str
    tensor: int  # index into Chain.parameters or Chain.buffers


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """A model as blocks in a row."""

    model: nn.Module
    blocks: tuple[Any, ...]
    block_name: tuple[str, ...]
    parameter_name: tuple[str, ...]  # as in model.named_parameters(): a tied one once
    parameters: tuple[nn.Parameter, ...]
    parameter_slots: tuple[tuple[TensorSlot, ...], ...]  # of each block
    buffer_name: tuple[str, ...]
    buffers: tuple[torch.Tensor, ...]
    buffer_slots: tuple[tuple[TensorSlot, ...], ...]
    traced: bool = False  # cut out of the model's graph

    def users(self, parameter: int) -> tuple[int, ...]:
        """Blocks that hold a parameter."""
        return tuple(
            block
            for block, slots in enumerate(self.parameter_slots)
            if any(slot.tensor == parameter for slot in slots)
        )


def build_chain(trial: Trial, model: nn.Module) -> Chain:
    """The blocks of a built model; says what does not fit together."""
    blocks = tuple(trial.blocks(model)) if trial.blocks is not None else cut_blocks_from_tree(model)
    traced = not blocks and trial.blocks is None
    if traced:
        blocks = cut_blocks_from_graph(model)
    if not blocks:
        raise InputError(f"trial {trial.name!r}: its model has no chain of blocks; give Trial(blocks=...)")
    for index, block in enumerate(blocks):
        if not callable(block):
            raise InputError(f"trial {trial.name!r}: block {index} is {type(block).__name__}, not a module")
    module_name = {id(module): name for name, module in model.named_modules()}
    names = tuple(module_name.get(id(block)) or f"block{index}" for index, block in enumerate(blocks))
    parameters = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    chain = Chain(
        model,
        blocks,
        names,
        tuple(parameters),
        tuple(parameters.values()),
        _find_slots(blocks, list(parameters.values()), "_parameters"),
        tuple(buffers),
        tuple(buffers.values()),
        _find_slots(blocks, list(buffers.values()), "_buffers"),
        traced,
    )
    _check_chain(trial, chain)
    return chain


def cut_blocks_from_tree(model: nn.Module) -> tuple[Any, ...]:
    """The chain a module tree shows by itself; empty where it shows none."""
    if not is_chain(model):
        return ()
    flat: list[Any] = []
    for child in model._modules.values():
        assert child is not None, "a chain runs it"
        flat.extend(cut_blocks_from_tree(child) if is_chain(child) else as_chain(child) or (child,))
    return tuple(flat)


def is_chain(module: nn.Module) -> bool:
    """Whether a module runs its children one after the other, and does nothing else."""
    plain = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    return plain and not has_hooks(module)


def call_block(block: Any, value: Any, *, first: bool) -> Any:
    """One block on what came before it; the first one gets the batch's inputs."""
    if first and isinstance(value, Mapping):
        return block(**value)
    if first and isinstance(value, tuple):
        return block(*value)
    return block(value)


def _find_slots(blocks: Sequence[Any], tensors: list[Any], table: str) -> tuple[tuple[TensorSlot, ...], ...]:
    index = {id(tensor): number for number, tensor in enumerate(tensors)}
    found = []
    for block in blocks:
        slots = []
        for module in block.modules() if isinstance(block, nn.Module) else ():
            for attribute, tensor in getattr(module, table).items():
                if tensor is not None and id(tensor) in index:
                    slots.append(TensorSlot(module, attribute, index[id(tensor)]))
        found.append(tuple(slots))
    return tuple(found)


def _check_chain(trial: Trial, chain: Chain) -> None:
    """Every trainable parameter belongs to a block; no module stands in two blocks with its own buffers."""
    if has_hooks(chain.model) and chain.model not in chain.blocks:
        raise InputError(
            f"trial {trial.name!r}: its model has hooks, which are not called where blocks run one by one;"
            " register them on modules inside of blocks"
        )
    for name, parameter in zip(chain.parameter_name, chain.parameters, strict=True):
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise InputError(
                f"trial {trial.name!r}: parameter {name!r} has a hook on its gradient, which shards do not"
                " call; use Trial(clip_norm=...), or a step_pre_hook of the optimizer"
            )
    reached = {slot.tensor for slots in chain.parameter_slots for slot in slots}
    missing = [name for number, name in enumerate(chain.parameter_name) if number not in reached]
    missing = [name for name in missing if name not in trial.unused]
    if missing:
        raise InputError(
            f"trial {trial.name!r}: {len(missing)} of {len(chain.parameters)} parameters are in no block"
            f" ({', '.join(missing[:3])}); the blocks must cover the model, or name them in Trial(unused=...)"
        )
    if not any(parameter.requires_grad for parameter in chain.parameters):
        raise InputError(f"trial {trial.name!r}: no parameter requires a gradient; nothing would be trained")
    seen: dict[int, int] = {}
    for index, block in enumerate(chain.blocks):
        if id(block) in seen:
            raise InputError(
                f"trial {trial.name!r}: blocks {seen[id(block)]} and {index} are the same module;"
                " shared weights are fine, but give each block a module of its own"
            )
        seen[id(block)] = index
