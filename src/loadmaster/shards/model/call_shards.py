"""Which modules of a model become shards by call: its own forward runs, and weights come around these calls.

1. The children of a list of layers (`ModuleList`, `Sequential`, `ModuleDict`: two or more with weights, of
   few types) are a shard each.
2. A large child that holds such lists itself is opened (stages of Swin or ConvNeXt).
3. What is left over and not small, such as an embedding or a head, is a shard too.
4. What is smaller, and a weight of the model itself, is the *rest*: it stays for the whole step. So does any
   weight that is read outside of the calls of its modules, which a run on fake tensors tells
   (`call_profile`); a shard that is never called is opened there too.
"""

import copy
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_LARGE = 1 / 6  # of all weights: opened where it can be
_SMALL = 1 / 256  # of all weights: not worth a shard
_OF_CLASS = object()  # an attribute that the instance does not have itself
_CONFIGS = ("text_config", "encoder", "decoder")  # configurations within one


@dataclass(frozen=True, slots=True)
class CallShards:
    """Modules by name, and parameters that must stay although they belong to one."""

    names: tuple[str, ...]
    rest: tuple[str, ...] = ()


def find_call_shards(
    model: nn.Module, *, opened: Collection[str] = (), rest: tuple[str, ...] = ()
) -> CallShards:
    """The shards of a model; modules that are `opened` are none themselves."""
    total = max(1, count_bytes(model))
    found: list[str] = []
    _visit(model, "", total, frozenset(opened), found, set())
    return CallShards(tuple(found) or ("",), rest)


class TrainingSwitches:
    """What training does not use, switched off while it runs: caches of keys and values, and checkpointing
    inside of shards (the trainer recomputes by itself where memory is short).

    Modules get copies of their configurations for so long; the user's own are never written to.
    """

    def __init__(self, model: nn.Module) -> None:
        """Find the switches of a model."""
        copies: dict[int, Any] = {}
        self._rows: list[tuple[dict[str, Any], str, Any]] = []  # attributes, name, value while it trains
        for module in model.modules():
            table = module.__dict__
            if getattr(module, "gradient_checkpointing", None) is True:
                self._rows.append((table, "gradient_checkpointing", False))
            config = table.get("config")
            if config is not None and not isinstance(config, dict) and id(config) not in copies:
                copies[id(config)] = _copy_without_cache(config, copies)
        self.has_caches = any(made is not None for made in copies.values())
        for module in model.modules() if self.has_caches else ():
            for name, value in module.__dict__.items():
                made = copies.get(id(value))
                if made is not None:
                    self._rows.append((module.__dict__, name, made))

    @contextmanager
    def off(self) -> Iterator[None]:
        """All of them off; afterwards as they were."""
        before = [(table, name, table.get(name, _OF_CLASS)) for table, name, _ in self._rows]
        try:
            for table, name, value in self._rows:
                table[name] = value
            yield
        finally:
            for table, name, value in before:
                table[name] = value
                if value is _OF_CLASS:
                    del table[name]


def _copy_without_cache(config: Any, copies: dict[int, Any]) -> Any:
    """A copy of a configuration with `use_cache` off, also in those within it; None: it is off already."""
    inner = [(name, getattr(config, name, None)) for name in _CONFIGS]
    cached = [(name, one) for name, one in inner if getattr(one, "use_cache", None) is True]
    if not cached and getattr(config, "use_cache", None) is not True:
        return None
    made = copy.copy(config)
    made.use_cache = False
    for name, one in cached:
        if copies.get(id(one)) is None:
            copies[id(one)] = _copy_without_cache(one, copies)
        setattr(made, name, copies[id(one)])
    return made


def count_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters, each once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def _visit(
    module: nn.Module, path: str, total: int, opened: frozenset[str], found: list[str], seen: set[int]
) -> None:
    """Shards below a module that is none itself."""
    listed = _is_list_of_layers(module)
    for name, child in module.named_children():
        at = f"{path}.{name}" if path else name
        size = count_bytes(child)
        if not size or id(child) in seen:
            continue
        seen.add(id(child))
        large, parted = size > _LARGE * total, _holds_layers(child)
        if at in opened or isinstance(
            child, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict
        ):
            _visit(child, at, total, opened, found, seen)
        elif listed:
            if large and parted:
                _visit(child, at, total, opened, found, seen)
            else:
                found.append(at)
        elif parted or (large and len([each for each in child.children() if count_bytes(each)]) > 1):
            _visit(child, at, total, opened, found, seen)
        elif size > _SMALL * total:
            found.append(at)


def _is_list_of_layers(module: nn.Module) -> bool:
    """Whether its children are layers: two or more with weights, of at most half as many types."""
    if not isinstance(module, _LISTS):
        return False
    children = [child for child in module.children() if count_bytes(child)]
    kinds = {type(child) for child in children}
    return len(children) >= 2 and 2 * len(kinds) <= max(2, len(children))


def _holds_layers(module: nn.Module) -> bool:
    return any(_is_list_of_layers(each) for each in module.modules())
