"""Recompute: a model whose repeated blocks keep their inputs only, as people write it by hand.

Blocks are the modules of one class that stand side by side (the layers of a transformer, the residual
blocks of a stage), the outermost ones. Each runs under `torch.utils.checkpoint`, which runs it again in the
backward pass; capture then sees the ops that run twice and the tensors that are let go of.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from loadmaster.core.errors import GraphError
from loadmaster.graph.torch_capture.record.target_kernels import Kernels

_ALIKE = 2  # as few as two blocks are worth it


@contextmanager
def checkpoint_blocks(model: nn.Module, *, target: str | None = None) -> Iterator[None]:
    """While this lasts the blocks of a model are recomputed; the model is itself again after it."""
    found = find_blocks(model)
    if not found:
        raise GraphError(f"{type(model).__name__} has no blocks that are alike; nothing to recompute")
    kinds = {kind: _make_checkpointed_class(kind, target) for kind in {type(block) for block in found}}
    own = [(block, type(block)) for block in found]
    try:
        for block, kind in own:
            block.__class__ = kinds[kind]
        yield
    finally:
        for block, kind in own:
            block.__class__ = kind


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost modules with a sibling of their class that hold weights and modules of their own."""
    found, waiting = [], [model]
    while waiting:
        module = waiting.pop()
        children = list(module.children())
        count = Counter(type(child) for child in children if _is_block(child))
        alike = [child for child in children if count[type(child)] >= _ALIKE and _is_block(child)]
        found += alike
        waiting += [child for child in children if not any(child is block for block in alike)]
    return found


def _is_block(module: nn.Module) -> bool:
    inner = any(True for _ in module.children()) and any(True for _ in module.parameters())
    return inner and not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)


def _make_checkpointed_class(kind: type[Any], target: str | None) -> type[Any]:
    """The class with a forward pass that runs under a checkpoint, and again with the same kernels."""

    def contexts() -> tuple[Any, Any]:
        return nullcontext(), Kernels(target)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(kind.forward, self, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward})
