"""Traced: the forward pass as it runs eagerly on fake tensors; every op below autograd is an op."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from loadmaster.graph.torch_capture.record.recorder import Recorder
from loadmaster.modules.fake_model import FakeModel


def run_traced(fake: FakeModel) -> Any:
    """What the model gives."""
    return fake.model(*fake.args, **fake.kwargs)


@contextmanager
def track_modules(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """An op's module is the innermost one that runs, in the forward pass or again for the backward pass."""
    handles = []
    for path, module in model.named_modules():
        handles += _register_hooks(path, module, recorder)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _register_hooks(path: str, module: nn.Module, recorder: Recorder) -> list[Any]:
    """Hooks that say which module runs."""
    outer: list[str] = []

    def enter(_: nn.Module, __: Any) -> None:
        outer.append(recorder.module)
        recorder.module = path

    def leave(_: nn.Module, __: Any, out: Any) -> Any:
        recorder.module = outer.pop() if outer else ""
        return out

    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]


def describe_last_op(recorder: Recorder) -> str:
    """Where a run stopped, in words."""
    ops = recorder.ledger.ops
    where = f" in module {recorder.module!r}" if recorder.module else ""
    return f"after op {ops[-1].name!r}{where}" if ops else "at its first op"
