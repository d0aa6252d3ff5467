"""What each block needs, found out on fake tensors: no weight is allocated, no random number drawn.

Of each block: the bytes autograd keeps for its backward, the bytes of its output, its FLOPs; and of each
parameter whether every use of it is a cast to the compute dtype, so that a copy in that dtype can stand in.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from loadmaster.core.errors import InputError
from loadmaster.modules import python_state, randomness
from loadmaster.modules.op_work import ATTENTION_FLOPS
from loadmaster.modules.saved_tensors import drop_history
from loadmaster.shards.model.block_peaks import (
    BlockPeaks,
    block_signature,
    measure_block_peaks,
    tree_signature,
)
from loadmaster.shards.model.blocks import Chain, call_block
from loadmaster.shards.model.call_shards import CallShards
from loadmaster.shards.spec.trial import COMPUTE_DTYPE, Trial, compute_loss


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """Numbers of the blocks of one trial at the shapes of its first batch."""

    saved_bytes: tuple[int, ...]  # [block] kept by autograd between forward and backward
    output_bytes: tuple[int, ...]  # [block]
    input_bytes: int
    flops: tuple[float, ...]  # [block] of one forward
    castable: tuple[bool, ...]  # [parameter]
    sums_grads: bool = False  # several micro-batches: a sum stands beside what each gives
    num_ops: tuple[int, ...] = ()  # [block] calls of the framework in one forward, the loss with the last
    draws: bool = False  # random numbers, from torch, Python or NumPy
    peaks: BlockPeaks | None = None  # None: not to be had; a rule of thumb stands in
    calls: "CallFacts | None" = None  # of a model that is trained by call


@dataclass(frozen=True, slots=True, eq=False)
class CallFacts:
    """Bytes of the calls of shards in one forward and backward, in the order of the forward."""

    shards: CallShards
    order: tuple[int, ...]  # [call] shard
    kept_bytes: tuple[int, ...]  # [call] from forward to backward, the output included
    lean_bytes: tuple[int, ...]  # [call] the same where it is to run again
    between_bytes: tuple[int, ...]  # [call] kept by what runs before it, outside of shards
    forward_bytes: tuple[int, ...]  # [call] at most while it runs
    inflow_bytes: tuple[int, ...]  # [call] when its backward begins, beside what was kept
    backward_bytes: tuple[int, ...]  # [call] at most from then on
    tail_bytes: int  # at most between the last call and the first backward
    may_recompute: tuple[bool, ...]  # [shard] whether it may run twice, and that saves memory


def profile(trial: Trial, chain: Chain, batch: Any, *, device: torch.device) -> Profile:
    """Run the chain once on fake tensors of the device's kind."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    inputs, targets = batch
    with (
        python_state.preserve_state(list(chain.model.modules())),
        preserve_attributes(chain.model),
        mute_fake_tensor_log(),
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
    ):

        def fake(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)

        parameters = [fake(p.detach()).requires_grad_(p.requires_grad) for p in chain.parameters]
        buffers = [fake(buffer) for buffer in chain.buffers]
        given, wanted = tree_map(fake, inputs), tree_map(fake, targets)
        with bind_tensors(chain, parameters, buffers):
            found = _profile_blocks(trial, chain, given, wanted, parameters, mode)
        dtype = COMPUTE_DTYPE[trial.precision]
        narrow = [
            p.detach().to(dtype).requires_grad_(p.requires_grad)
            if castable and p.dtype == torch.float32
            else p
            for p, castable in zip(parameters, found.castable, strict=True)
        ]
        with bind_tensors(chain, narrow, buffers):
            sums = trial.accumulate > 1
            return replace(found, sums_grads=sums, peaks=_find_peaks(trial, chain, given, wanted, narrow))


@contextmanager
def mute_fake_tensor_log() -> Iterator[None]:
    """What does not fit is raised and said in our words; torch would print its own traceback before."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addFilter(_reject_record)
    try:
        yield
    finally:
        log.removeFilter(_reject_record)


def _reject_record(_record: logging.LogRecord) -> bool:
    return False


@contextmanager
def _note_block_in_errors(chain: Chain, index: int, value: Any) -> Iterator[None]:
    """An exception of a block says which one it was, and what it was given."""
    try:
        yield
    except Exception as problem:
        shapes = [tuple(leaf.shape) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        given = ", ".join(str(shape) for shape in shapes) or "no tensor"
        problem.add_note(f"in block {chain.block_name[index]!r}, which was given {given}")
        raise


@contextmanager
def preserve_attributes(model: torch.nn.Module) -> Iterator[None]:
    """Whatever a forward remembers of tensors without values (tables, counters) is forgotten."""
    before = [(module, dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)


def _find_peaks(
    trial: Trial, chain: Chain, inputs: Any, targets: Any, parameters: list[Any]
) -> BlockPeaks | None:
    """Peaks of the blocks, or None for a model whose backward does not run on fake tensors."""
    try:
        return measure_block_peaks(trial, chain, inputs, targets, parameters)
    except Exception:
        return None


@contextmanager
def bind_tensors(chain: Chain, parameters: list[Any], buffers: list[Any]) -> Iterator[None]:
    """The places that blocks look up see these tensors."""
    tables = [("_parameters", chain.parameter_slots, parameters), ("_buffers", chain.buffer_slots, buffers)]
    before = []
    for table, of_block, tensors in tables:
        for slots in of_block:
            for slot in slots:
                entries = getattr(slot.module, table)
                before.append((entries, slot.attribute, entries[slot.attribute]))
                entries[slot.attribute] = tensors[slot.tensor]
    try:
        yield
    finally:
        for entries, attribute, tensor in reversed(before):
            entries[attribute] = tensor


def _profile_blocks(
    trial: Trial, chain: Chain, inputs: Any, targets: Any, parameters: list[torch.Tensor], _mode: Any
) -> Profile:
    from torch.utils.flop_counter import FlopCounterMode

    dtype = COMPUTE_DTYPE[trial.precision]
    device = parameters[0].device.type
    watch = CastWatcher(parameters, dtype)
    others = randomness.capture_others()
    saved: list[int] = []
    outputs: list[int] = []
    flops: list[float] = []
    ops: list[int] = []
    value = inputs
    known: dict[object, tuple[int, Any]] = {}
    for index, block in enumerate(chain.blocks):
        kind = (block_signature(block), tree_signature(value), index == 0, index == len(chain.blocks) - 1)
        if kind in known:  # each type of block once
            like, value = known[kind]
            watch.copy_marks(chain.parameter_slots[like], chain.parameter_slots[index])
            saved.append(saved[like])
            outputs.append(outputs[like])
            flops.append(flops[like])
            ops.append(ops[like])
            continue
        value, ops_before = tree_map(_as_grad_leaf, value), watch.num_ops
        kept: dict[int, int] = {}
        storages = {parameter.untyped_storage()._cdata for parameter in parameters}

        def pack(tensor: Any, kept: dict[int, int] = kept, storages: set[int] = storages) -> Any:
            storage = tensor.untyped_storage()
            if storage._cdata not in storages:
                kept[storage._cdata] = storage.nbytes()
            return drop_history(tensor)

        counter = FlopCounterMode(display=False, custom_mapping=ATTENTION_FLOPS)
        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            torch.autocast(device, dtype=dtype, enabled=dtype is not None),
            counter,
            watch,
        ):
            with _note_block_in_errors(chain, index, value):
                value = call_block(block, value, first=index == 0)
            if index == len(chain.blocks) - 1:
                loss = compute_loss(trial, value, targets)
                check_loss(trial, loss)
        saved.append(sum(kept.values()))
        outputs.append(tree_bytes(value))
        flops.append(float(counter.get_total_flops()))
        ops.append(watch.num_ops - ops_before)
        known[kind] = index, value
    castable = tuple(
        dtype is not None and number in watch.cast and number not in watch.plain
        for number in range(len(parameters))
    )
    drew = watch.drew or not randomness.is_same_others(others, randomness.capture_others())
    return Profile(
        tuple(saved),
        tuple(outputs),
        tree_bytes(inputs),
        tuple(flops),
        castable,
        num_ops=tuple(ops),
        draws=drew,
    )


def tree_bytes(tree: Any) -> int:
    """Bytes of the tensors of a pytree."""
    return sum(
        leaf.numel() * leaf.element_size() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)
    )


def _as_grad_leaf(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().requires_grad_().clone()  # a clone, so that a block may write into it
    return value


def num_tokens(inputs: Any) -> int:
    """Positions of an integer input, else samples; of one micro-batch as it is, for lengths differ."""
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, torch.Tensor):
            return leaf.numel() if not leaf.is_floating_point() else (leaf.shape[0] if leaf.ndim else 1)
    return 1


def check_loss(trial: Trial, loss: Any) -> None:
    """A loss is one number."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise InputError(f"trial {trial.name!r}: loss must give one number, not {shape}; take its mean")


class CastWatcher(TorchDispatchMode):
    """Which parameters are cast to the compute dtype, and which are used in any other way."""

    def __init__(self, parameters: list[torch.Tensor], dtype: torch.dtype | None) -> None:
        super().__init__()
        self.number = {id(parameter): number for number, parameter in enumerate(parameters)}
        self.dtype = dtype
        self.cast: set[int] = set()
        self.plain: set[int] = set()
        self.written: set[int] = set()  # by ops in place
        self._storages = {each.untyped_storage()._cdata: number for number, each in enumerate(parameters)}
        self.drew = False
        self.num_ops = 0

    def copy_marks(self, source: Any, target: Any) -> None:
        """The parameters of a block are used as those of another of its type."""
        for mine, theirs in zip(target, source, strict=True):
            for marked in (self.cast, self.plain):
                if theirs.tensor in marked:
                    marked.add(mine.tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the arguments, then go on."""
        kwargs = kwargs or {}
        self.num_ops += 1
        self.drew = self.drew or _draws_numbers(func, args, kwargs)
        is_cast = func is torch.ops.aten._to_copy.default and kwargs.get("dtype") == self.dtype
        if func._schema.is_mutable:
            self._note_writes(func, args, kwargs)
        if func.namespace == "prim" or func is torch.ops.aten.detach.default:
            return func(*args, **kwargs)  # no arithmetic
        for leaf in tree_leaves((args, kwargs)):
            if id(leaf) in self.number:
                (self.cast if is_cast else self.plain).add(self.number[id(leaf)])
        return func(*args, **kwargs)

    def _note_writes(self, func: Any, args: Any, kwargs: Any) -> None:
        for at, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            for leaf in tree_leaves(value):
                if isinstance(leaf, torch.Tensor) and leaf.numel():
                    number = self._storages.get(leaf.untyped_storage()._cdata)
                    self.written |= set() if number is None else {number}


def _draws_numbers(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an op draws; attention is marked so even where it drops nothing."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [argument.name for argument in func._schema.arguments]
    if "scaled_dot_product" in func.name() and "dropout_p" in names:
        at = names.index("dropout_p")
        return bool(args[at] if at < len(args) else kwargs.get("dropout_p", 0.0))
    return True
