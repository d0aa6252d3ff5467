"""What a call of a shard leaves in autograd's graph: handles instead of weights, or of everything saved.

    keep       saved weights become handles, which fetch the weight again; activations stay
    run again  every saved tensor becomes a handle; the first one that is asked for runs the call once more,
               as it ran (generators, autocast, buffers, attributes, the same arguments), up to the last
               tensor that is needed

The graph itself is that of the plain model in both, so gradients are summed as it sums them.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from loadmaster.core.errors import RunError
from loadmaster.modules import python_state, randomness
from loadmaster.modules.saved_tensors import without_history


class _EnoughError(Exception):
    """Everything that backward needs has been made again."""


@dataclass(frozen=True, slots=True, eq=False)
class WeightHandle:
    """A view of a weight, to be taken of the weight wherever it then stands."""

    number: int
    offset_bytes: int
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def view(self, weight: torch.Tensor) -> torch.Tensor:
        """The same view of the weight as it stands now."""
        start = weight.storage_offset() * weight.element_size() + self.offset_bytes
        bare = torch.empty(0, dtype=self.dtype, device=weight.device)
        return bare.set_(weight.untyped_storage(), start // self.dtype.itemsize, self.size, self.stride)


class WeightRanges:
    """Where the weights of a call lie in memory, to know a view of one."""

    def __init__(self, views: Mapping[int, torch.Tensor]) -> None:
        rows = sorted(
            (view.data_ptr(), view.nbytes, number) for number, view in views.items() if view.numel()
        )
        self._starts = [row[0] for row in rows]
        self._rows = rows

    def find(self, tensor: torch.Tensor) -> WeightHandle | None:
        """The handle of a tensor that is a view of a weight."""
        address = tensor.data_ptr()
        at = bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        start, size, number = self._rows[at]
        if address >= start + size:
            return None
        return WeightHandle(number, address - start, tensor.shape, tensor.stride(), tensor.dtype)


@dataclass(eq=False)
class CallRecord:
    """One call of a shard, from its forward until its backward is over."""

    shard: int
    name: str
    position: int  # among the units of its micro-batch
    is_again: bool  # it runs once more
    over: bool = False  # its backward has been left
    run: Callable[..., Any] | None = None
    args: Any = ()
    kwargs: Any = None
    versions: list[int] = field(default_factory=list)
    generators: randomness.Generators | None = None
    autocast: list[tuple[str, bool, torch.dtype, bool]] = field(default_factory=list)
    buffers: list[tuple[nn.Module, str, torch.Tensor]] = field(default_factory=list)
    attributes: list[python_state.Table] = field(default_factory=list)
    saved: list[tuple[torch.Size, torch.dtype]] = field(default_factory=list)
    made: list[Any] | None = None  # handles of weights, and tensors, once it has run again

    def make_again(self, ranges: WeightRanges, device: torch.device) -> None:
        """Run the call once more and keep what it saves."""
        assert self.run is not None, "its forward has noted it"
        if [leaf._version for leaf in _list_tensors((self.args, self.kwargs))] != self.versions:
            raise RunError(
                f"an input of {self.name!r} was written in place after the call, which is to run again;"
                " raise memory_cap so that its activations stay, or write into a copy"
            )
        made: list[Any] = []

        def pack(tensor: torch.Tensor) -> None:
            at = len(made)
            if at < len(self.saved) and (tensor.shape, tensor.dtype) != self.saved[at]:
                raise RunError(
                    f"{self.name!r} saved {tuple(tensor.shape)} {tensor.dtype} where it had saved"
                    f" {tuple(self.saved[at][0])} {self.saved[at][1]} the first time: it does not do the same"
                    " twice; raise memory_cap so that its activations stay"
                )
            made.append(ranges.find(tensor) or tensor.detach())
            if len(made) == len(self.saved):
                raise _EnoughError

        with ExitStack() as stack:
            stack.enter_context(_as_it_was(self, device))
            stack.enter_context(torch.enable_grad())
            for kind, enabled, dtype, cache in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache))
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, _refuse_unpacking))
            with suppress(_EnoughError):
                self.run(*self.args, **self.kwargs)
        if len(made) < len(self.saved):
            raise RunError(
                f"{self.name!r} saved {len(made)} tensors where it had saved {len(self.saved)}"
                " the first time: it does not do the same twice; raise memory_cap so that its"
                " activations stay"
            )
        self.made = made

    def let_go(self) -> None:
        """Nothing of it is wanted any more."""
        self.over, self.made, self.run = True, None, None
        self.args, self.kwargs, self.generators = (), None, None
        self.buffers, self.attributes = [], []


class CallWatch:
    """What the first calls of a shard show: buffers and attributes that it writes."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._places = [(each, name) for each in module.modules() for name in each._buffers]
        self._writes: set[int] | None = None  # of the places
        self._tables: list[dict[str, Any]] | None = None

    def before(self, record: CallRecord) -> Callable[[], None]:
        """Note what the call may write; the result is to be called after it."""
        places = range(len(self._places)) if self._writes is None else sorted(self._writes)
        held = []
        for at in places:
            module, name = self._places[at]
            buffer = module._buffers[name]
            if buffer is not None:
                held.append((at, buffer, buffer._version, buffer.clone()))
        tables = self._tables
        if tables is None:
            tables = [vars(each) for each in self._module.modules()]
        attributes = [(table, dict(table)) for table in tables]

        def after() -> None:
            if self._writes is None:
                self._writes = self._find_written(held)
            record.buffers = [
                (*self._places[at], copy) for at, _, _, copy in held if at in (self._writes or ())
            ]
            if self._tables is None:
                self._tables = [table for table, was in attributes if python_state.differs(table, was)]
            changing = {id(table) for table in self._tables}
            record.attributes = [row for row in attributes if id(row[0]) in changing]

        return after

    def _find_written(self, held: list[tuple[int, torch.Tensor, int, torch.Tensor]]) -> set[int]:
        """Buffers that changed (batch norm gives no new version), and others of the same modules."""
        found = set()
        for at, buffer, version, copy in held:
            module, name = self._places[at]
            now = module._buffers[name]
            if now is not buffer or buffer._version != version or not torch.equal(buffer, copy):
                found.add(at)
        writers = {id(self._places[at][0]) for at in found}
        return {at for at, (module, _) in enumerate(self._places) if id(module) in writers}


def note_call(
    record: CallRecord, run: Callable[..., Any], args: Any, kwargs: Any, device: torch.device
) -> None:
    """How a call ran, for the second time."""
    record.run, record.args, record.kwargs = run, args, kwargs
    record.versions = [leaf._version for leaf in _list_tensors((args, kwargs))]
    record.generators = randomness.capture_generators(device, others=False)
    kinds = {"cpu", device.type}
    record.autocast = [
        (
            kind,
            torch.is_autocast_enabled(kind),
            torch.get_autocast_dtype(kind),
            torch.is_autocast_cache_enabled(),
        )
        for kind in sorted(kinds)
    ]


@contextmanager
def _as_it_was(record: CallRecord, device: torch.device) -> Iterator[None]:
    """Generators, buffers and attributes of the forward; afterwards as they are now."""
    assert record.generators is not None, "its forward has noted them"
    now = randomness.capture_generators(device, others=False)
    bound = [(module, name, module._buffers[name]) for module, name, _ in record.buffers]
    with python_state.swap_attributes(record.attributes):
        randomness.restore_generators(record.generators, device)
        for module, name, copy in record.buffers:
            module._buffers[name] = copy
        try:
            yield
        finally:
            for module, name, buffer in bound:
                module._buffers[name] = buffer
            randomness.restore_generators(now, device)


def keep_saved(tensor: torch.Tensor) -> torch.Tensor:
    """A saved tensor that stays."""
    return without_history(tensor)


def _refuse_unpacking(_: Any) -> Any:
    raise RunError("a graph that was made only for what it saves was run backward")


def _list_tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
