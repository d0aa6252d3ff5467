"""Compare modules: what each module gives under the hook engine against what it gives unplaced."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from loadmaster.modules.rounding import is_close, max_difference
from loadmaster.runtime.hook_engine.engine import HookEngine
from loadmaster.runtime.verify.unplaced import call_model, copy_weights, seed_and_restore, to_cpu

Seen = Callable[[str, list[torch.Tensor]], None]


class ModuleComparison:
    """One batch of a hook engine, compared module by module, in the order in which they end."""

    def __init__(self, engine: HookEngine, args: Any, kwargs: Mapping[str, Any], *, seed: int) -> None:
        self._engine, self._args, self._kwargs = engine, args, kwargs
        self._noted: dict[str, list[list[torch.Tensor]]] = {}  # of a module's calls
        self._calls: dict[str, int] = {}
        self._finding = ""
        given = tree_map_only(torch.Tensor, to_cpu, (args, dict(kwargs)))
        _, tensors = copy_weights(engine)
        with seed_and_restore(engine, seed), torch.enable_grad(), _watch_outputs(engine.model, self._note):
            call_model(engine, tensors, given)

    def run(self) -> Any:
        """What the placed model gives."""
        with _watch_outputs(self._engine.model, self._compare):
            return self._engine(self._args, self._kwargs)

    def finding(self) -> str:
        """The first module that differs and how, '' = none."""
        return self._finding

    def _note(self, path: str, values: list[torch.Tensor]) -> None:
        self._noted.setdefault(path, []).append([value.detach().clone() for value in values])

    def _compare(self, path: str, values: list[torch.Tensor]) -> None:
        call = self._calls[path] = self._calls.get(path, -1) + 1
        calls = self._noted.get(path, [])
        if self._finding or call >= len(calls):
            return
        for wanted, value in zip(calls[call], values, strict=False):
            if not is_close(wanted, value.detach()):
                where = self._engine.devices[self._engine.places[path]].name
                off = max_difference(wanted, value)
                self._finding = f"module {path!r} on {where} gives other values, off by {off:.3g}"
                return


@contextmanager
def _watch_outputs(model: nn.Module, seen: Seen) -> Iterator[None]:
    """What every module gives is seen when it ends."""
    handles = []
    for path, module in model.named_modules():
        if path:

            def hook(module: Any, args: Any, out: Any, path: str = path) -> None:
                with torch._C.DisableTorchFunction():
                    seen(path, [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)])

            handles.append(module.register_forward_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
