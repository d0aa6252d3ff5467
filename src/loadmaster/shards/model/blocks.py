"""The chain of blocks of a model, and which parameters and buffers each block holds.

A block takes what the block before it gave: any pytree of tensors, so a skip connection that crosses a cut is
one more leaf. Blocks are given (`Trial.blocks`), or read off the module tree (`nn.Sequential`, or a module
whose only children are such chains), or cut out of the graph (`fx_blocks.py`). A model that is no chain keeps
its own forward, and its blocks are modules which that calls (`call_shards.py`).
"""

import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from loadmaster.core.errors import InputError
from loadmaster.modules import python_state, randomness
from loadmaster.modules.tracing.python_reads import Code, collect_reads, follow_code
from loadmaster.modules.tracing.torch_settings import find_setter, setter_codes
from loadmaster.shards.model.call_shards import CallShards, TrainingSwitches, find_call_shards
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
    by_call: bool = False  # blocks are modules that the model's own forward calls, in whatever order
    rest: tuple[int, ...] = ()  # by call: parameters that are read outside of all blocks
    switches: TrainingSwitches | None = None  # by call: what is off while the model's own forward trains

    def switched(self) -> AbstractContextManager[None]:
        """The model as it is trained, for a while."""
        return nullcontext() if self.switches is None else self.switches.off()

    def call_model(self, inputs: Any) -> Any:
        """The model's own forward, as it is trained."""
        with self.switched():
            return call_block(self.model, inputs, first=True)

    @property
    def is_whole(self) -> bool:
        """Whether the model's own forward is what is trained, with nothing said about blocks."""
        return self.traced or self.by_call

    def users(self, parameter: int) -> tuple[int, ...]:
        """Blocks that hold a parameter."""
        return tuple(
            block
            for block, slots in enumerate(self.parameter_slots)
            if any(slot.tensor == parameter for slot in slots)
        )


def build_chain(trial: Trial, model: nn.Module, *, shards: CallShards | None = None) -> Chain:
    """The blocks of a built model; says what does not fit together.

    A model that is no chain is trained by call (`call_shards`); `shards` tells which, where that is known.
    """
    if shards is not None:
        return build_call_chain(trial, model, shards)
    blocks = tuple(trial.blocks(model)) if trial.blocks is not None else ()
    traced = False
    if trial.blocks is None and trial.loss is not None and is_chain(model):
        blocks = cut_blocks_from_tree(model)
    elif trial.blocks is None and trial.loss is not None:
        blocks = _try_to_trace(model)
        traced = bool(blocks)
    if not blocks and trial.blocks is None:
        return build_call_chain(trial, model, find_call_shards(model))
    if not blocks:
        raise InputError(f"trial {trial.name!r}: its blocks are an empty list")
    chain = _make_chain(trial, model, blocks, traced=traced)
    try:
        _check_chain(trial, chain)
    except InputError:
        if not traced:
            raise
        return build_call_chain(trial, model, find_call_shards(model))  # a parameter that no block reads
    return chain


def _make_chain(trial: Trial, model: nn.Module, blocks: tuple[Any, ...], *, traced: bool) -> Chain:
    for index, block in enumerate(blocks):
        if not callable(block):
            raise InputError(f"trial {trial.name!r}: block {index} is {type(block).__name__}, not a module")
    module_name = {id(module): name for name, module in model.named_modules()}
    names = tuple(module_name.get(id(block)) or f"block{index}" for index, block in enumerate(blocks))
    parameters = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    return Chain(
        model,
        blocks,
        names,
        tuple(parameters),
        tuple(parameters.values()),
        find_slots(blocks, list(parameters.values()), "_parameters"),
        tuple(buffers),
        tuple(buffers.values()),
        find_slots(blocks, list(buffers.values()), "_buffers"),
        traced,
    )


def build_call_chain(trial: Trial, model: nn.Module, shards: CallShards) -> Chain:
    """Modules that the model's own forward calls, as blocks; what else it reads is the rest."""
    if trial.rng == "counter":
        raise InputError(
            f"trial {trial.name!r}: rng='counter' seeds block by block, and its model runs its own forward;"
            " give Trial(blocks=...), or leave rng out"
        )
    compiled = next((n for n, m in model.named_modules() if m._compiled_call_impl is not None), None)
    if compiled is not None:
        raise InputError(
            f"trial {trial.name!r}: module {compiled or 'itself'!r} was compiled with .compile(), which goes"
            " around the calls that weights are brought for; leave it uncompiled"
        )
    modules = dict(model.named_modules())
    blocks = tuple(modules[name] for name in shards.names)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    everything = list(parameters.values())
    index = {name: number for number, name in enumerate(parameters)}
    kept = {index[name] for name in shards.rest if name in index}
    found = find_slots(blocks, everything, "_parameters")
    slots = tuple(tuple(slot for slot in each if slot.tensor not in kept) for each in found)
    reached = {slot.tensor for each in slots for slot in each}
    rest = tuple(number for number in range(len(everything)) if number not in reached)
    chain = Chain(
        model,
        blocks,
        shards.names,
        tuple(parameters),
        tuple(everything),
        slots,
        tuple(buffers),
        tuple(buffers.values()),
        find_slots((model, *blocks[1:]), list(buffers.values()), "_buffers"),
        by_call=True,
        rest=rest,
        switches=TrainingSwitches(model),
    )
    _check_parameters(trial, chain)
    return chain


def _try_to_trace(model: nn.Module) -> tuple[Any, ...]:
    """Blocks cut out of a model's graph; empty where it cannot be traced.

    A recurrent layer rounds otherwise without gradients than with them, and a norm that counts its batches in
    a forward of its own counts them in the graph: both had better run as they are, by call. So had models
    whose hooks are told of gradients, and those whose forward may be called in several ways.
    """
    modules = list(model.modules())
    if any(isinstance(module, nn.RNNBase) or _counts_batches(module) for module in modules):
        return ()
    if any(module._backward_hooks or module._backward_pre_hooks for module in modules) or _has_options(model):
        return ()
    blocks: tuple[Any, ...] = ()
    # the trace runs the model's own Python: what it counts or writes is not of the training
    with python_state.preserve_buffers(modules), python_state.preserve_state(modules), suppress(InputError):
        with randomness.preserve_rng() as drawn, follow_code(setter_codes()) as (ran, called):
            blocks = cut_blocks_from_graph(model)
            chance = drawn()
        if blocks and (chance or find_setter(ran, called) or _changes_by_itself(model, ran)):
            return ()
    return blocks


def _has_options(model: nn.Module) -> bool:
    """Whether its forward has arguments that may be left out: a trace cannot tell whether they are."""
    return any(one.default is not one.empty for one in inspect.signature(model.forward).parameters.values())


def _changes_by_itself(model: nn.Module, ran: Code) -> bool:
    """Whether a forward changes what it reads in objects, globals or closures, which blocks would not do."""
    reads = collect_reads(list(model.modules()), ran)
    if reads.writes and not reads.sources:
        cut_blocks_from_graph(model)
    return bool(reads.sources or (reads.writes and reads.find_change()))


def _counts_batches(module: nn.Module) -> bool:
    kind = type(module)
    return isinstance(module, nn.modules.batchnorm._NormBase) and not kind.__module__.startswith("torch.nn.")


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


def find_slots(blocks: Sequence[Any], tensors: list[Any], table: str) -> tuple[tuple[TensorSlot, ...], ...]:
    """Of each block, where it looks up which of some tensors."""
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
    _check_parameters(trial, chain)
    reached = {slot.tensor for slots in chain.parameter_slots for slot in slots}
    missing = [name for number, name in enumerate(chain.parameter_name) if number not in reached]
    missing = [name for name in missing if name not in trial.unused]
    if missing:
        raise InputError(
            f"trial {trial.name!r}: {len(missing)} of {len(chain.parameters)} parameters are in no block"
            f" ({', '.join(missing[:3])}); the blocks must cover the model, or name them in Trial(unused=...)"
        )
    seen: dict[int, int] = {}
    for index, block in enumerate(chain.blocks):
        if id(block) in seen:
            raise InputError(
                f"trial {trial.name!r}: blocks {seen[id(block)]} and {index} are the same module;"
                " shared weights are fine, but give each block a module of its own"
            )
        seen[id(block)] = index


def _check_parameters(trial: Trial, chain: Chain) -> None:
    """Nothing that the engine would leave out hangs on a parameter, and something is trained."""
    for name, parameter in zip(chain.parameter_name, chain.parameters, strict=True):
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise InputError(
                f"trial {trial.name!r}: parameter {name!r} has a hook on its gradient, which shards do not"
                " call; use Trial(clip_norm=...), or a step_pre_hook of the optimizer"
            )
    if not any(parameter.requires_grad for parameter in chain.parameters):
        raise InputError(f"trial {trial.name!r}: no parameter requires a gradient; nothing would be trained")
