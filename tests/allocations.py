"""Witnesses of memory: one real training step on the CPU, its allocations counted in two ways.

`counted_peak` follows storages with weak references under a dispatch mode; it sees every tensor, and nothing
that a kernel takes for itself. `profiled_peak` asks PyTorch's profiler for what the allocator did; nothing
watches the run, and kernels' own workspace is in it.

Both count the second step, when the optimizer has its state. The step is a plain loop's: the output and the
inputs are held throughout, gradients are set to None between steps.
"""

import weakref
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from loadmaster.zoo.example import Example


def _tensors(tree: Any) -> list[Any]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class StorageCounter(TorchDispatchMode):
    """Bytes of the storages alive, and the most there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._known: dict[int, Any] = {}

    def add(self, tensor: Any) -> None:
        storage = tensor.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        if address in self._known:
            return

        def gone(_: Any) -> None:
            self.live_bytes -= size
            del self._known[address]

        self._known[address] = weakref.ref(storage, gone)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            self.add(tensor)
        return out


def plain_loss(out: Any) -> Any:
    """The model's own loss, else the mean."""
    own = getattr(out, "loss", None)
    return own if own is not None else out.mean()


class _Loop:
    def __init__(self, example: Example, optimizer: Any, accumulation: int = 1) -> None:
        self.example, self.loss = example, example.loss or plain_loss
        self.accumulation = accumulation
        self.optimizer = optimizer(list(example.model.parameters()))
        self.step()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self) -> Any:
        for _ in range(self.accumulation):
            out = self.example.model(*self.example.args, **self.example.kwargs)
            loss = self.loss(out)
            (loss / self.accumulation if self.accumulation > 1 else loss).backward()
        self.optimizer.step()
        return out, loss

    def held(self) -> list[Any]:
        """What is there before the step begins."""
        e = self.example
        state = _tensors([list(kept.values()) for kept in self.optimizer.state.values()])
        return [*e.model.parameters(), *e.model.buffers(), *_tensors((e.args, e.kwargs)), *state]


def counted_peak(example: Example, optimizer: Any = torch.optim.AdamW, *, accumulation: int = 1) -> int:
    """Bytes of tensors at the worst moment of a step."""
    loop, counter = _Loop(example, optimizer, accumulation), StorageCounter()
    for tensor in loop.held():
        counter.add(tensor)
    with counter:
        held = loop.step()
    del held
    return counter.peak_bytes


def profiled_peak(example: Example, optimizer: Any = torch.optim.AdamW) -> int:
    """Bytes taken from the allocator at the worst moment of a step."""
    loop = _Loop(example, optimizer)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        held = loop.step()
    del held
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in loop.held()}
    return peak + sum(sizes.values())
