"""Models built without memory: on `meta` first, their numbers drawn straight into the host store.

A model allows it if a plain build does nothing but let each module reset itself, in the order of the module
tree. That is not believed but seen: the writes and draws of the build are listed, then those of the resets,
and the two lists must be the same. Then the resets under the seed give the numbers of a plain build. Whoever
asks a tensor whether it is on meta is listed, too: some of `nn.init` (trunc_normal_, orthogonal_, sparse_)
writes nothing there, and would not be missed.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from loadmaster.modules.materialise import own_tensors
from loadmaster.modules.python_state import plain_tensors


class _WriteRecorder(TorchDispatchMode):
    """Lists every op that writes into a tensor or draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Any] = []
        self.written: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note it, then go on."""
        kwargs = kwargs or {}
        if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
            leaves = tree_leaves((args, kwargs))
            target = args[0] if args and isinstance(args[0], torch.Tensor) else None
            # which tensor, too: a weight that was drawn and then replaced by a tied one is another
            self.log.append((str(func), id(target), [_describe_leaf(leaf) for leaf in leaves]))
            if target is not None:
                self.written[id(target)] = target  # kept, so that no other gets its id
        return func(*args, **kwargs)


class _DeviceQueryRecorder(TorchFunctionMode):
    """Lists, among the writes, every look at where a tensor is: code that asks may do otherwise on meta."""

    def __init__(self, log: list[Any]) -> None:
        super().__init__()
        self._log = log
        self._asking = {torch.Tensor.is_meta.__get__: "is_meta", torch.Tensor.device.__get__: "device"}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note it, then go on."""
        if func in self._asking:
            self._log.append(self._asking[func])
        return func(*args, **(kwargs or {}))


def build_on_meta(build: Callable[[], Any]) -> nn.Module | None:
    """The model on `meta`, if `refill` can give it the numbers of a plain build; else None."""
    built, again = _WriteRecorder(), _WriteRecorder()
    try:
        with warnings.catch_warnings(), built, _DeviceQueryRecorder(built.log), torch.device("meta"):
            warnings.filterwarnings("ignore", message=".*to a meta parameter")  # a plain build will load it
            model = build()
    except Exception:  # it looks at values, or loads them: a plain build says what is wrong, if anything is
        return None
    if not isinstance(model, nn.Module) or not _is_resettable(model):
        return None
    names = [id(parameter) for parameter in model.parameters()]
    own = {*names, *(id(buffer) for buffer in model.buffers())}
    if not all(name in built.written for name in names) or not built.written.keys() <= own:
        return None  # a weight that nobody fills, or one that was filled and then replaced, as ties do
    with again, _DeviceQueryRecorder(again.log):
        reset_modules(model)
    same = built.log == again.log and all(name in again.written for name in names)
    return model if same else None


def reset_modules(model: nn.Module) -> None:
    """Let every module that has parameters or buffers of its own reset itself, in the order of the tree."""
    for module in _iter_owners(model):
        module.reset_parameters()


def free_weights(model: nn.Module) -> None:
    """Put host tensors of the same shape, which take no memory, in the place of those on `meta`."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    flat = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                    made[id(parameter)] = (nn.Parameter(flat, parameter.requires_grad), parameter)
                module._parameters[name] = made[id(parameter)][0]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)


def _is_resettable(model: nn.Module) -> bool:
    """Everything on meta, every parameter with a module that resets it, no buffer but those of batch norm."""
    tensors = [*model.parameters(), *model.buffers()]
    if not tensors or any(tensor.device.type != "meta" for tensor in tensors):
        return False
    own = {id(tensor) for tensor in tensors}
    if any(t.device.type == "meta" and id(t) not in own for t in plain_tensors(model.modules())):
        return False  # a table that is no buffer: nobody would give it its numbers
    return all(
        callable(getattr(module, "reset_parameters", None))
        and (not module._buffers or isinstance(module, nn.modules.batchnorm._NormBase))
        for module in _iter_owners(model)
    )


def _iter_owners(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if any(own_tensors(module)))


def _describe_leaf(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf)
