"""Attributes: what Python knows of a model beside its tensors, which a graph has taken for constant.

A graph holds what `forward` did with the attributes it found. So they are part of what a graph is made for:
where one has another value, or a module was exchanged, another graph is made. A `forward` that changes them
itself, and hooks on modules, need Python at every call: such a model is run module by module.
"""

import argparse
import dataclasses
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.fx import _symbolic_trace as symbolic
from torch.nn.modules import module as all_modules
from torch.utils._device import DeviceContext

from loadmaster.core.errors import GraphError
from loadmaster.modules.randomness import preserve_rng
from loadmaster.modules.tracing.python_reads import Code, follow_code
from loadmaster.modules.tracing.torch_settings import find_setter, setter_codes

_OWN = frozenset(vars(nn.Module()))  # of every module; its mode is asked apart
_PLAIN = frozenset((int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device))
_SIZED = (list, dict, set)
_BUILT_IN = frozenset((tuple, *_SIZED))  # which are no settings
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_NOT_THE_USERS = ("torch.", "transformers.", "builtins", "loadmaster.runtime.")
_SETTINGS = ("Config", "Configuration", "Settings")  # what classes of them are called
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _HOOKS)
_CALLED = (symbolic._orig_module_call, symbolic._orig_module_getattr)
# hooks of weight norms: they are ops as any others; and those by which transformers collects hidden states
_PURE = ("torch.nn.utils", "transformers.utils.output_capturing")
_COLLECTS = "._output_capturing_hooks_installed"  # set when the latter are put there: by the first call


def list_modules(root: nn.Module) -> list[nn.Module]:
    """The model and every module in it, once each: what `root.modules()` gives, in another order, sooner."""
    found = [root]
    known = {id(root)}
    for module in found:
        for child in module._modules.values():
            if child is not None and id(child) not in known:
                known.add(id(child))
                found.append(child)
    return found


def child_identity(module: nn.Module) -> tuple[Any, ...]:
    """Names and modules right inside of one: two models may have the same modules, in other places."""
    return (*module._modules, *map(id, module._modules.values()))


def snapshot_state(modules: Iterable[nn.Module], ours: frozenset[str] = frozenset()) -> tuple[Any, ...]:
    """Every module and the values of its attributes; `ours` of the first are no attributes of the model."""
    found: list[Any] = []
    kinds: dict[type, bool] = {}  # whether it is one of torch's own
    held: dict[int, Any] = {}
    passed = _OWN | ours
    for module in modules:
        kind = type(module)
        if kind not in kinds:
            kinds[kind] = _is_torch_module(kind)
        found.append(id(module))
        found.append(kind)
        if module._modules:
            found.append(child_identity(module))
        for name, value in module.__dict__.items():
            if name in passed:
                continue
            if type(value) in _PLAIN:
                found.append(value)
                continue
            found.append(None if kinds[kind] and name != "forward" else _fingerprint(value))
            if type(value) not in _BUILT_IN:
                held.setdefault(id(value), value)
        passed = _OWN
    found.extend(value for _, value in _iterate_class_values(kinds))
    found.extend(value for _, value in _iterate_settings_values([("", value) for value in held.values()]))
    return tuple(found)


def snapshot_named_state(root: nn.Module, ours: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The same by name."""
    found: dict[str, Any] = {path or "the model": id(module) for path, module in root.named_modules()}
    for name, module, value in _iterate_attributes(root, ours):
        plain = type(value) in _PLAIN
        own = _is_torch_module(type(module)) and not name.endswith("forward")
        found[name] = value if plain else None if own else _fingerprint(value)
    found |= dict(_iterate_class_values(dict.fromkeys(map(type, root.modules()))))
    return found | collect_settings(root, ours)


def _iterate_attributes(root: nn.Module, ours: frozenset[str]) -> Iterator[tuple[str, nn.Module, Any]]:
    for path, module in root.named_modules():
        for name, value in module.__dict__.items():
            if name not in _OWN and not (path == "" and name in ours):
                yield f"{path}.{name}" if path else name, module, value


def _iterate_class_values(kinds: Iterable[type]) -> Iterator[tuple[str, Any]]:
    """Plain values that classes of the user's own hold, by name."""
    for kind in dict.fromkeys(behind for one in kinds for behind in one.__mro__):
        if not kind.__module__.startswith(_NOT_THE_USERS):
            for name, value in vars(kind).items():
                if type(value) in _PLAIN and not name.startswith("__"):
                    yield f"{kind.__name__}.{name}", value


def collect_settings(root: nn.Module, ours: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Plain values in the settings that modules hold, by name: a graph was made with them."""
    held = [(name, value) for name, _, value in _iterate_attributes(root, ours) if type(value) not in _PLAIN]
    return dict(_iterate_settings_values(held))


def _iterate_settings_values(held: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Each of the settings once, also those within settings; named by who holds them first."""
    waiting: list[tuple[str, Any]] = []
    known: set[int] = set()

    def look_at(where: str, value: Any) -> None:
        if id(value) not in known and _is_settings(value):
            known.add(id(value))
            waiting.append((where, value))

    for where, value in held:
        look_at(where, value)
    while waiting:
        at, one = waiting.pop()
        for name, value in vars(one).items():
            if type(value) in _PLAIN:
                yield f"{at}.{name}", value
            else:
                look_at(f"{at}.{name}", value)


def _is_settings(value: Any) -> bool:
    """A configuration, as models have one: an object that only holds values. Others may change by the way."""
    if isinstance(value, nn.Module | torch.Tensor | type) or not hasattr(value, "__dict__"):
        return False
    if isinstance(value, types.SimpleNamespace | argparse.Namespace) or dataclasses.is_dataclass(value):
        return True
    return type(value).__name__.endswith(_SETTINGS)


def _is_torch_module(kind: type) -> bool:
    """Modules of torch keep their objects to themselves."""
    return kind.__module__.startswith("torch.nn.")


def _fingerprint(value: Any) -> Any:
    """What is known of an object: which it is, and how much is in it."""
    return (id(value), len(value)) if type(value) in _SIZED else id(value)


def find_changed_names(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names that are new, gone, or have another value."""
    names = {**before, **after}
    nothing = object()
    return [name for name in names if before.get(name, nothing) != after.get(name, nothing)]


def find_hooked_module(root: nn.Module) -> str:
    """The path of a module inside that has hooks of the user's own, '' = none has."""
    for module in list_modules(root)[1:]:
        if any(map(module.__dict__.get, _HOOKS)) and _has_own_hooks(module):
            return next(path for path, one in root.named_modules() if one is module)
    return ""


def is_call_replaced() -> bool:
    """Whether all modules are called by another function than torch's own, which torch.export would take."""
    return (nn.Module.__call__, nn.Module.__getattr__) != _CALLED


def find_outer_python() -> str:
    """What runs Python around every module or function that is called now, '' = nothing does."""
    if any(getattr(all_modules, name) for name in _GLOBAL_HOOKS):
        return "there are hooks of all modules, which a graph does not call"
    for at in range(torch._C._len_torch_function_stack()):
        mode = torch._C._get_function_stack_at(at)
        if not isinstance(mode, DeviceContext):
            return f"it is called under a {type(mode).__name__}, which a graph does not ask"
    return ""


def _has_own_hooks(module: nn.Module) -> bool:
    hooks = [hook for name in _HOOKS for hook in module.__dict__[name].values()]
    return any(not _home_module(hook).startswith(_PURE) for hook in hooks)


def _home_module(hook: Any) -> str:
    """Where the function, or the class of an object that is called, comes from."""
    home = hook if isinstance(hook, types.FunctionType) else type(hook)
    return getattr(home, "__module__", "") or ""


def remove_hooks(root: nn.Module) -> None:
    """Whoever calls the placed model runs the hooks of the model itself; its graph must not."""
    for name in _HOOKS:
        root.__dict__[name] = type(root.__dict__[name])()


@contextmanager
def refuse_attribute_changes(model: nn.Module) -> Iterator[Code]:
    """Refuse a `forward` that changes attributes of the model, draws random numbers but torch's, or sets
    something of torch's own.

    Gives the code that ran.
    """
    code: Code = {}
    seen: list[str] = []
    chance: list[str] = []
    settings_made: list[str] = []
    right: Callable[..., Any] = model.forward
    ours = frozenset({"forward"})

    @functools.wraps(right)
    def forward(*args: Any, **kwargs: Any) -> Any:
        before, settings = snapshot_named_state(model, ours), collect_settings(model, ours)
        with preserve_rng() as drawn:
            with follow_code(setter_codes()) as (ran, called):
                out = right(*args, **kwargs)
            chance.append(drawn())
        settings_made.append(find_setter(ran, called))
        code.update(ran)
        unset = {name for name, value in settings.items() if value is None}  # filled in once: not for a graph
        seen.extend(
            name
            for name in find_changed_names(before, snapshot_named_state(model, ours))
            if name not in unset and not f".{name}".endswith(_COLLECTS)
        )
        return out

    model.__dict__["forward"] = forward
    try:
        yield code
    finally:
        del model.__dict__["forward"]
    if seen:
        raise GraphError(f"its forward changes {seen[0]!r}, which a graph would not do again")
    if any(chance):
        raise GraphError(f"its forward draws from {max(chance)}, which a graph would not do again")
    if any(settings_made):
        raise GraphError(f"its forward calls {max(settings_made)}, which a graph would not do again")
