"""Hooks: runs a model that cannot be exported, each function on the device of its module.

The plan is projected to modules: a module is where most of its ops are. Hooks on modules say which one runs;
a function mode sees every torch function before it runs and brings what it reads to that device, one copy per
(tensor, device) and one edge per reading, as the graph engine does. What only looks at memory, or writes into
it, runs where that memory is.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from loadmaster.core.errors import RunError
from loadmaster.runtime.graph_engine.assignment import PlanIndex
from loadmaster.runtime.graph_engine.padded_encoder import zero_padding
from loadmaster.runtime.transport.byte_accounts import NO_DEVICE, Accounts
from loadmaster.runtime.transport.copies import copy_to_device, link_gradient, move_to_device
from loadmaster.runtime.transport.devices import RunDevice

_CASTS = frozenset(
    {"to", "type", "type_as", "float", "half", "bfloat16", "double", "long", "int", "bool", "contiguous"}
)
_LOOKS = {
    "alias", "as_strided", "chunk", "detach", "diagonal", "expand", "expand_as", "flatten", "movedim",
    "narrow", "permute", "ravel", "real", "reshape", "reshape_as", "select", "split", "split_with_sizes",
    "squeeze", "swapaxes", "swapdims", "t", "tensor_split", "transpose", "unbind", "unflatten", "unfold",
    "unsqueeze", "view", "view_as", "__getitem__", "__get__", "requires_grad_", "register_hook", "__len__",
    "__iter__", "is_contiguous", "stride", "size", "dim", "numel", "data_ptr", "storage_offset",
    "untyped_storage", "item", "tolist", "__bool__", "__int__", "__float__", "__index__", "is_floating_point",
    "is_complex", "backward", "retain_grad",
}  # fmt: skip
_COMPARES = {"multi_head_attention_forward"}  # takes other kernels where `key is value`


@dataclass(slots=True)
class HookEngine:
    """One placed model's modules."""

    model: nn.Module
    root: nn.Module
    known: PlanIndex
    devices: Sequence[RunDevice]
    homes: dict[str, int]
    accounts: Accounts | None
    output_device: torch.device | None = None
    notes: list[str] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)  # of modules

    def __post_init__(self) -> None:
        """Project the plan to modules; a module without ops of its own is where its parent is."""
        for path, _ in self.model.named_modules():
            parent = self.places.get(path.rpartition(".")[0], 0)
            self.places[path] = self.known.by_module.get(path, parent)

    def count_moved_ops(self) -> int:
        """Ops of the forward pass that the plan has elsewhere than their module."""
        return sum(
            self.known.device[name] != self.places[module]
            for name, module in self.known.forward
            if module in self.places and name not in self.known.views
        )

    def settle(self) -> bool:
        """Buffers go to their modules, which may write them; gives whether any moved."""
        moved = False
        for name, buffer in self.model.named_buffers():
            home = self.places[name.rpartition(".")[0]]
            if self.homes.get(name) == home:
                continue
            self.homes[name], moved = home, True
            buffer.data = buffer.data.to(self.devices[home].where)
            if self.accounts is not None:
                self.accounts.move(buffer, home)
        return moved

    @property
    def graphs(self) -> list[Any]:
        """It has none."""
        return []

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What the model gives."""
        self.settle()
        forward = type(self.model).forward
        mode = _FollowMode(self)
        with zero_padding(self.model), self._track_modules(mode), mode:
            out = forward(self.root, *args, **dict(kwargs))
        if self.output_device is None:
            return out
        return tree_map_only(torch.Tensor, lambda tensor: move_to_device(tensor, self.output_device), out)

    @contextmanager
    def _track_modules(self, mode: "_FollowMode") -> Iterator[None]:
        """Modules tell the mode when they begin and end; nothing is left on them."""
        with ExitStack() as stack:
            for path, module in self.model.named_modules():
                if not path:
                    continue
                place = self.places[path]
                begin = module.register_forward_pre_hook(mode.begin(place), prepend=True)
                stack.callback(begin.remove)
                end = module.register_forward_hook(mode.end, always_call=True)
                stack.callback(end.remove)
            yield

    def locate_tensor(self, tensor: torch.Tensor, here: int) -> int:
        """The device a tensor is on; one that nobody knows is on this one from now on."""
        if self.accounts is not None:
            owner = self.accounts.owner(tensor)
            if owner == NO_DEVICE:
                self.accounts.add(tensor, here, "a tensor of the model's own")
                return here
            return owner
        if tensor.device == self.devices[here].where:
            return here
        return next((at for at, one in enumerate(self.devices) if one.where == tensor.device), NO_DEVICE)


class _FollowMode(TorchFunctionMode):
    """Brings what a function reads to the device of the module that calls it."""

    def __init__(self, engine: HookEngine) -> None:
        super().__init__()
        self._engine = engine
        self._stack = [engine.places[""]]
        # a copy lives while autograd or a function that runs needs it: as the plan counts it, and no longer
        self._copies: dict[int, dict[tuple[int, int], weakref.ref[torch.Tensor]]] = {}
        self._alive: dict[int, Any] = {}
        self._known: set[Any] = set()  # autograd's nodes whose bytes are counted

    def begin(self, place: int) -> Any:
        """A hook: a module begins."""

        def hook(module: Any, args: Any) -> None:
            self._stack.append(place)

        return hook

    def end(self, module: Any, args: Any, out: Any) -> None:
        """A hook: a module ends; what autograd keeps of functions that no mode sees is counted with it."""
        at, accounts = self._stack.pop(), self._engine.accounts
        if accounts is not None and torch.is_grad_enabled():
            accounts.watch_backward(out, at, type(module).__name__, self._known)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function where it belongs."""
        kwargs = kwargs or {}
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        at = self._stack[-1]
        _refuse_without_memory([leaves[place] for place in tensors])
        if tensors and self._only_looks(func, leaves[tensors[0]]):
            return func(*args, **kwargs)
        if tensors and self._changes_nothing(func, args, kwargs):
            return args[0]
        if tensors and _stays_on_device(func, kwargs):
            at = self._engine.locate_tensor(leaves[tensors[0]], at)
        far = [place for place in tensors if self._engine.locate_tensor(leaves[place], at) != at]
        # in the order of the arguments, and held until the function has read them
        held = [self._copy(leaves[place], at) for place in far if not leaves[place].is_inference()]
        original, made = {}, {}
        for place in reversed(far):
            source = leaves[place]
            key = id(source) if getattr(func, "__name__", "") in _COMPARES else place
            if key not in made:
                made[key] = self._linked_copy(source, at)
            leaves[place] = made[key]
            original[id(leaves[place])] = source
        args, kwargs = tree_unflatten(leaves, spec)
        out = self._run(func, args, kwargs, at)
        del held
        return original.get(id(out), out)  # `to` may have nothing to do: then nothing was read

    def _only_looks(self, func: Any, tensor: torch.Tensor) -> bool:
        """Whether a function looks at an input that nobody has read: it is no device's yet."""
        accounts = self._engine.accounts
        if accounts is None or getattr(func, "__name__", "") not in _LOOKS:
            return False
        return accounts.owner(tensor) == NO_DEVICE

    def _changes_nothing(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether a function gives back an input that nobody has read, as it is: a cast to what it is."""
        accounts = self._engine.accounts
        if accounts is None or getattr(func, "__name__", "") not in _CASTS or not args:
            return False
        first = args[0]
        if not isinstance(first, torch.Tensor) or accounts.owner(first) != NO_DEVICE:
            return False
        return func(*args, **kwargs) is first

    def _run(self, func: Any, args: Any, kwargs: Any, at: int) -> Any:
        accounts = self._engine.accounts
        if accounts is None or at == NO_DEVICE:
            return func(*args, **kwargs)
        what = getattr(func, "__name__", "a function")
        with accounts.running(at, what):
            out = func(*args, **kwargs)
        accounts.watch_backward(out, at, what, self._known)
        return out

    def _linked_copy(self, source: torch.Tensor, at: int) -> torch.Tensor:
        """A copy for one reader; the gradient that it sends home takes memory there, not at the reader."""
        copy, accounts = link_gradient(source, self._copy(source, at)), self._engine.accounts
        if accounts is not None and copy.grad_fn is not None:
            home = self._engine.locate_tensor(source, at)
            accounts.watch_backward(copy, home, "a copy", self._known)
        return copy

    def _copy(self, tensor: torch.Tensor, at: int) -> torch.Tensor:
        """One copy per version of a tensor and device, as long as the tensor is there."""
        if tensor.is_inference():  # has no versions
            return self._copy_tensor(tensor, at)
        key = id(tensor)
        if key not in self._alive:
            self._alive[key] = weakref.ref(tensor, lambda _: self._forget(key))
        version = (tensor._version, at)
        made = self._copies.setdefault(key, {})
        known = made[version]() if version in made else None
        if known is None:
            known = self._copy_tensor(tensor, at)
            made[version] = weakref.ref(known)
        return known

    def _copy_tensor(self, tensor: torch.Tensor, at: int) -> torch.Tensor:
        where, accounts = self._engine.devices[at].where, self._engine.accounts
        if accounts is None:
            return copy_to_device(tensor, where)
        with accounts.running(at, "a copy"):
            return copy_to_device(tensor, where)

    def _forget(self, key: int) -> None:
        self._alive.pop(key, None)
        self._copies.pop(key, None)


def _refuse_without_memory(tensors: list[torch.Tensor]) -> None:
    """Refuse tensors whose memory cannot be looked at, so that nobody knows where they are."""
    for tensor in tensors:
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise RunError("forward uses torch.func (vmap, grad, jvp), which a placed model cannot follow")
        if tensor.layout != torch.strided:
            raise RunError(
                f"forward uses a tensor of {tuple(tensor.shape)} in {tensor.layout}, which a placed model"
                " cannot move; make it dense, or leave the model on one device without lm.place"
            )


def _stays_on_device(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function looks at its first tensor, or writes into it."""
    name = getattr(func, "__name__", "")
    writes = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
    writes |= kwargs.get("out") is not None or kwargs.get("inplace") is True
    in_place = name.startswith("__i") and name.endswith("__")
    return writes or in_place or name in _LOOKS
