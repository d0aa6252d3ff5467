"""What calls of shards need, found out on fake tensors: no weight is allocated, no random number drawn.

One run of the model's own forward, loss and backward. Of each call: what autograd keeps for its backward,
what its output takes, its FLOPs, and the most that lives while it runs, forward and backward. A weight that
is read outside of its shard's calls goes to the rest; a shard that is not called is opened; then all is
looked at again. A model whose forward looks at values (a router that sends tokens to experts) runs on the
host instead.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from loadmaster.modules import python_state, randomness
from loadmaster.modules.live_storages import LiveBytes
from loadmaster.modules.module_calls import has_user_hooks, is_checkpointing, standing_around
from loadmaster.modules.op_work import ATTENTION_FLOPS
from loadmaster.modules.saved_tensors import drop_history, version_of
from loadmaster.shards.model.blocks import Chain, build_call_chain
from loadmaster.shards.model.call_shards import CallShards, find_call_shards
from loadmaster.shards.model.profile import (
    CallFacts,
    CastWatcher,
    Profile,
    bind_tensors,
    check_loss,
    mute_fake_tensor_log,
    preserve_attributes,
    tree_bytes,
)
from loadmaster.shards.model.refusals import refuse_value_reads, refuse_writes
from loadmaster.shards.spec.trial import COMPUTE_DTYPE, Trial, compute_loss

_MOST_LOOKS = 6
_CHEAP = 0.05  # a shard that keeps no more than this beside its output gains nothing by running twice


@dataclass(eq=False)
class _Call:
    """One call of a shard, as it is seen."""

    shard: int
    enter_bytes: int
    exit_bytes: int = 0
    peak_bytes: int = 0
    output_bytes: int = 0
    first_bytes: int = -1  # when backward came to it
    backward_bytes: int = 0  # the most from then on
    flops: float = 0.0
    num_ops: int = 0


def profile_calls(trial: Trial, chain: Chain, batch: Any, *, device: torch.device) -> tuple[Chain, Profile]:
    """The shards that suit a model, and what they need."""
    opened: set[str] = set()
    rest: set[str] = set()
    for _ in range(_MOST_LOOKS):
        look = _look_at(trial, chain, batch, device)
        if look.inner_backward and len(chain.rest) < len(chain.parameters):
            found = CallShards(("",), chain.parameter_name)  # gradients inside of forward: all stay
            chain = build_call_chain(trial, chain.model, found)
            continue
        idle = {chain.block_name[shard] for shard in range(len(chain.blocks)) if not look.counts[shard]}
        idle.discard("")
        names = {chain.parameter_name[number] for number in look.outside}
        if not idle and names <= rest:
            return chain, _to_profile(trial, chain, batch, look)
        opened |= idle
        rest |= names
        found = find_call_shards(chain.model, opened=opened, rest=tuple(sorted(rest)))
        chain = build_call_chain(trial, chain.model, found)
    whole = CallShards(("",), ())
    chain = build_call_chain(trial, chain.model, whole)
    return chain, _to_profile(trial, chain, batch, _look_at(trial, chain, batch, device))


def _look_at(trial: Trial, chain: Chain, batch: Any, device: torch.device) -> "_Look":
    """One run on fake tensors; where that does not go (values are looked at, a kernel that has no shapes) on
    the host, with the batch and the weights as they are. An error of the model's own is raised there, too.
    """
    try:
        with refuse_value_reads(trial):
            return _look_fake(trial, chain, batch, device)
    except Exception as problem:
        if _bans_hooks(problem):
            return _Look(chain, list(chain.parameters), None, inner_backward=True)
        if any(p.is_meta or _is_hollow(p) for p in chain.parameters):
            raise
    try:
        return _look_real(trial, chain, batch)
    except Exception as problem:
        if _bans_hooks(problem):
            return _Look(chain, list(chain.parameters), None, inner_backward=True)
        raise


def _bans_hooks(problem: Exception) -> bool:
    """Whether a layer takes gradients by torch.func, inside of which saved tensors have no hooks."""
    return isinstance(problem, RuntimeError) and "saved tensor hooks" in str(problem)


def _is_hollow(parameter: torch.Tensor) -> bool:
    """Built without memory: a value that stands for all elements."""
    return parameter.numel() > 1 and not any(parameter.stride())


def _look_fake(trial: Trial, chain: Chain, batch: Any, device: torch.device) -> "_Look":
    from torch._subclasses.fake_tensor import FakeTensorMode

    dtype = COMPUTE_DTYPE[trial.precision]
    with (
        python_state.preserve_state(list(chain.model.modules())),
        randomness.preserve_rng(),
        preserve_attributes(chain.model),
        mute_fake_tensor_log(),
        warnings.catch_warnings(),
        torch.jit.optimized_execution(False),  # scripted functions op by op: a fused kernel reads memory
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        warnings.simplefilter("ignore")

        def fake(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)

        parameters = [fake(p.detach()).requires_grad_(p.requires_grad) for p in chain.parameters]
        buffers = [fake(buffer) for buffer in chain.buffers]
        given, wanted = tree_map(fake, batch[0]), tree_map(fake, batch[1])
        castable: tuple[bool, ...] = (False,) * len(parameters)
        if dtype is not None:  # which weights are only ever cast: then a copy in that dtype stands in
            first = _Look(chain, parameters, dtype)
            with bind_everywhere(chain, parameters, buffers):
                first.run_forward(trial, given, wanted, device)
            castable = first.castable(dtype)
            parameters = [
                p.detach().to(dtype).requires_grad_(p.requires_grad)
                if narrow and p.dtype == torch.float32
                else p
                for p, narrow in zip(parameters, castable, strict=True)
            ]
        look = _Look(chain, parameters, dtype, buffers=buffers)
        with bind_everywhere(chain, parameters, buffers):
            look.run(trial, given, wanted, device)
        look.narrow = castable
        return look


def _look_real(trial: Trial, chain: Chain, batch: Any) -> "_Look":
    """A forward and backward on the host, which leaves no trace."""
    where = torch.device("cpu")
    dtype = COMPUTE_DTYPE[trial.precision]
    buffers = [buffer.clone() for buffer in chain.buffers]
    look = _Look(chain, list(chain.parameters), dtype, buffers=buffers)
    with (
        randomness.preserve_generators(where),
        python_state.preserve_state(list(chain.model.modules())),
        bind_everywhere(chain, list(chain.parameters), buffers),
    ):
        given, wanted = (tree_map(_copy_tensor, each) for each in batch)
        look.run(trial, given, wanted, where)
    for parameter in chain.parameters:
        parameter.grad = None
    return look


@contextmanager
def bind_everywhere(chain: Chain, parameters: list[Any], buffers: list[Any]) -> Iterator[None]:
    """Every place in the model where a parameter or buffer is looked up sees these tensors."""
    whole = build_slots(chain)
    with bind_tensors(
        replace(chain, parameter_slots=(whole[0],), buffer_slots=(whole[1],)), parameters, buffers
    ):
        yield


def build_slots(chain: Chain) -> tuple[Any, Any]:
    """All places of parameters and of buffers in a model, those of the rest too."""
    from loadmaster.shards.model.blocks import find_slots

    (parameters,) = find_slots((chain.model,), list(chain.parameters), "_parameters")
    (buffers,) = find_slots((chain.model,), list(chain.buffers), "_buffers")
    return parameters, buffers


@dataclass(eq=False)
class _Look:
    """What one run of the model shows."""

    chain: Chain
    parameters: list[torch.Tensor]
    dtype: torch.dtype | None
    calls: list[_Call] = field(default_factory=list)
    outside: set[int] = field(default_factory=set)  # parameters read outside of their shard's calls
    refuses: set[int] = field(default_factory=set)  # shards that must not run twice
    inner_backward: bool = False  # forward or loss go backward through calls themselves
    narrow: tuple[bool, ...] = ()
    buffers: list[torch.Tensor] = field(default_factory=list)
    draws: bool = False
    tail_bytes: int = 0  # the most between the last call and the backward of a shard, beside what was kept
    before_bytes: int = 0
    _stack: list[_Call] = field(default_factory=list)
    _inputs: list[tuple[int, torch.Tensor, int]] = field(default_factory=list)
    _forward_runs: bool = False
    _graphs: list[Any] = field(default_factory=list)  # hooks of the calls that run with a graph

    def __post_init__(self) -> None:
        """Which shard each parameter belongs to."""
        self.counts = [0] * len(self.chain.blocks)
        self.live = LiveBytes()
        self.watch = CastWatcher(self.parameters, self.dtype)
        self._number = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        self._shards: dict[int, set[int]] = {}
        for shard, slots in enumerate(self.chain.parameter_slots):
            for slot in slots:
                self._shards.setdefault(slot.tensor, set()).add(shard)
        self._now: _Call | None = None  # whose backward runs

    def castable(self, dtype: torch.dtype) -> tuple[bool, ...]:
        """Parameters whose every use is a cast to a dtype."""
        return tuple(
            number in self.watch.cast and number not in self.watch.plain and dtype is not None
            for number in range(len(self.parameters))
        )

    def run_forward(self, trial: Trial, inputs: Any, targets: Any, device: torch.device) -> torch.Tensor:
        """Forward and loss."""
        others = randomness.capture_others()
        guard = _ReadGuard(self._on_read)
        self._forward_runs = True
        with (
            standing_around(self.chain.blocks, self._around),
            torch.autocast(device.type, dtype=self.dtype, enabled=self.dtype is not None),
            self.watch,
            guard,
        ):
            out = self.chain.call_model(inputs)
            loss = compute_loss(trial, out, targets)
            check_loss(trial, loss)
        self._forward_runs = False
        self.draws = self.watch.drew or not randomness.is_same_others(others, randomness.capture_others())
        if self.watch.written:
            refuse_writes(trial, sorted(self.chain.parameter_name[number] for number in self.watch.written))
        for shard, tensor, version in self._inputs:
            if version_of(tensor) != version:
                self.refuses.add(shard)  # what it was given has changed: it cannot run again
        self._inputs.clear()
        return loss

    def run(self, trial: Trial, inputs: Any, targets: Any, device: torch.device) -> None:
        """Forward, loss and backward, with all that lives counted."""
        from torch.utils.flop_counter import FlopCounterMode

        self.flops = FlopCounterMode(display=False, custom_mapping=ATTENTION_FLOPS)
        self.flops.mod_tracker = _NoModules()  # torch's own fails where forward takes gradients of an input
        drop = [p.register_post_accumulate_grad_hook(_drop_grad) for p in self.parameters if p.requires_grad]
        try:
            with self.live:
                with self.flops:
                    loss = self.run_forward(trial, inputs, targets, device)
                end = self.calls[-1].exit_bytes if self.calls else 0
                loss.reshape(()).backward()
                self._leave_backward()
            if not any(call.first_bytes >= 0 for call in self.calls):
                self.tail_bytes = max(0, self.live.peak_bytes - end)
        finally:
            for handle in drop:
                handle.remove()

    def _on_read(self, tensors: list[torch.Tensor]) -> None:
        """An op reads parameters: of a shard that runs, or from outside."""
        running = set() if self._is_checkpointed() else {call.shard for call in self._stack}
        for tensor in tensors:
            number = self._number.get(id(tensor))
            if number is not None and number in self._shards and not self._shards[number] & running:
                self.outside.add(number)

    def _is_checkpointed(self) -> bool:
        """Whether a call runs a part that is to run again by the model's own doing: it then reads weights."""
        if not self._stack or not self._graphs[-1]:
            return False
        if torch.is_grad_enabled():
            top = torch._C._autograd._top_saved_tensors_default_hooks(True)
            return top is not None and top[1] is not self._graphs[-1]
        return is_checkpointing()

    def _around(self, shard: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if any(call.shard == shard for call in self._stack):
            return original(*args, **kwargs)
        live = self.live
        self.counts[shard] += 1
        if torch._C._functorch.peek_interpreter_stack() is not None:  # saved tensors have no hooks there
            self.outside |= {slot.tensor for slot in self.chain.parameter_slots[shard]}
            return original(*args, **kwargs)
        call = _Call(shard, live.now_bytes)
        outer, live.peak_bytes = live.peak_bytes, live.now_bytes
        flops = self.flops.get_total_flops() if hasattr(self, "flops") else 0
        ops = self.watch.num_ops
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self._inputs += [(shard, leaf, version_of(leaf)) for leaf in given]
        objects = [leaf for leaf in tree_leaves((args, kwargs)) if _is_object(leaf)]
        was_written = python_state.watch_objects(objects)
        versions = [version_of(each) for each in self.buffers]
        self._stack.append(call)
        graph = torch.is_grad_enabled()
        if graph:
            self.calls.append(call)

        def pack(tensor: Any) -> Any:
            return drop_history(tensor)

        def unpack(tensor: Any) -> Any:
            self._enter_backward(call)
            return tensor

        self._graphs.append(unpack if graph else None)
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        try:
            with nullcontext() if len(self.chain.rest) == len(self.parameters) else hooks:
                out = original(*args, **kwargs)
        finally:
            self._stack.pop()
            self._graphs.pop()
        own = {id(each) for each in self.chain.blocks[shard].buffers()}
        foreign = any(
            version_of(each) != version and id(each) not in own
            for each, version in zip(self.buffers, versions, strict=True)
        )
        if foreign or was_written():
            self.refuses.add(
                shard
            )  # it writes into an object that it was given or one behind it, or elsewhere
        self._note_views(shard, out)
        call.exit_bytes, call.peak_bytes = live.now_bytes, live.peak_bytes
        call.output_bytes = tree_bytes([leaf for leaf in tree_leaves(out) if not _is_among(leaf, given)])
        live.peak_bytes = max(outer, live.peak_bytes)
        call.flops = float((self.flops.get_total_flops() if hasattr(self, "flops") else 0) - flops)
        call.num_ops = self.watch.num_ops - ops
        return out

    def _note_views(self, shard: int, out: Any) -> None:
        """A weight, or a view of one, that a call gives away is read after it."""
        leaves = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        given = {leaf.untyped_storage()._cdata for leaf in leaves}
        for slot in self.chain.parameter_slots[shard]:
            if self.parameters[slot.tensor].untyped_storage()._cdata in given:
                self.outside.add(slot.tensor)

    def _enter_backward(self, call: _Call) -> None:
        if self._forward_runs:
            self.inner_backward = True
            return
        if self._now is call:
            return
        if self._now is None:
            last = self.calls[-1]
            self.tail_bytes = max(0, self.live.peak_bytes - last.exit_bytes)
        self._leave_backward()
        self._now = call
        if call.first_bytes < 0:
            call.first_bytes = self.live.now_bytes
        self.live.peak_bytes = self.live.now_bytes

    def _leave_backward(self) -> None:
        if self._now is not None:
            self._now.backward_bytes = max(self._now.backward_bytes, self.live.peak_bytes)


class _ReadGuard(TorchDispatchMode):
    """Tells which tensors ops read."""

    def __init__(self, on_read: Callable[[list[torch.Tensor]], None]) -> None:
        super().__init__()
        self._on_read = on_read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the arguments, then go on."""
        if func is not torch.ops.aten.detach.default and func.namespace != "prim":
            self._on_read([leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)])
        return func(*args, **(kwargs or {}))


def _to_profile(trial: Trial, chain: Chain, batch: Any, look: _Look) -> Profile:
    num = len(chain.blocks)
    kept = [max(0, call.exit_bytes - call.enter_bytes) for call in look.calls]
    lean = [min(call.output_bytes, each) for call, each in zip(look.calls, kept, strict=True)]
    extra = [
        max(0, call.backward_bytes - call.first_bytes) if call.first_bytes >= 0 else 0 for call in look.calls
    ]
    inflow = [
        max(0, call.first_bytes - call.exit_bytes) if call.first_bytes >= 0 else 0 for call in look.calls
    ]
    between = [
        later.enter_bytes - earlier.exit_bytes
        for earlier, later in zip(look.calls, look.calls[1:], strict=False)
    ]
    first = look.calls[0].enter_bytes if look.calls else 0
    saved, outputs, flops, ops = ([0] * num for _ in range(4))
    for call, each in zip(look.calls, kept, strict=True):
        saved[call.shard] += each
        outputs[call.shard] += call.output_bytes
        flops[call.shard] += int(call.flops)
        ops[call.shard] += call.num_ops
    total = look.flops.get_total_flops() if hasattr(look, "flops") else 0
    flops[-1] += max(0, int(total) - sum(flops))
    ops[-1] += max(0, look.watch.num_ops - sum(ops))
    gains = {
        shard: sum(k - m for c, k, m in zip(look.calls, kept, lean, strict=True) if c.shard == shard)
        for shard in range(num)
    }
    whole = max(1, sum(kept))
    again = tuple(
        shard not in look.refuses
        and not look.inner_backward
        and len(chain.rest) < len(chain.parameters)
        and gains[shard] > _CHEAP * whole / num
        and not has_user_hooks(chain.blocks[shard])
        for shard in range(num)
    )
    calls = CallFacts(
        shards=CallShards(
            chain.block_name, tuple(chain.parameter_name[n] for n in sorted(_kept_back(chain)))
        ),
        order=tuple(call.shard for call in look.calls),
        kept_bytes=tuple(kept),
        lean_bytes=tuple(lean),
        between_bytes=(first, *between),
        forward_bytes=tuple(max(0, call.peak_bytes - call.enter_bytes) for call in look.calls),
        inflow_bytes=tuple(inflow),
        backward_bytes=tuple(extra),
        tail_bytes=look.tail_bytes,
        may_recompute=again,
    )
    return Profile(
        tuple(saved),
        tuple(outputs),
        tree_bytes(batch[0]),
        tuple(float(each) for each in flops),
        look.narrow or (False,) * len(chain.parameters),
        sums_grads=trial.accumulate > 1,
        num_ops=tuple(ops),
        draws=look.draws,
        calls=calls,
    )


def _kept_back(chain: Chain) -> set[int]:
    """Parameters of a shard's module that are in the rest."""
    inside = {id(parameter) for block in chain.blocks for parameter in block.parameters()}
    return {number for number in chain.rest if id(chain.parameters[number]) in inside}


class _NoModules:
    """Stands for a tracker of modules: flops are counted in all, not by module."""

    parents = ("Global",)

    def __enter__(self) -> None:
        """Nothing to begin."""

    def __exit__(self, *problem: object) -> None:
        """Nor to end."""


def _is_among(leaf: Any, tensors: list[torch.Tensor]) -> bool:
    return any(leaf is each for each in tensors)


def _is_object(leaf: Any) -> bool:
    """Something of a class of the user's, which a call may write into."""
    return not isinstance(leaf, torch.Tensor | nn.Module | type) and hasattr(leaf, "__dict__")


def _copy_tensor(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _drop_grad(parameter: torch.Tensor) -> None:
    parameter.grad = None
