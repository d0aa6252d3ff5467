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
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from loadmaster.core.errors import RunError
from loadmaster.modules import python_state, randomness
from loadmaster.modules.module_calls import has_user_hooks
from loadmaster.modules.rounding import fingerprint
from loadmaster.modules.saved_tensors import drop_history, version_of
from loadmaster.modules.torch_state import list_kernel_settings, use_kernel_settings

_TABLES = ("_parameters", "_modules", "_forward_hooks", "_forward_pre_hooks")
_UNSURE = 1e-3  # of a norm on a GPU: what an order of additions may change, and no change of state does
_SMALL_BYTES = 1 << 16  # of a buffer, copied before every call that is to run again


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
    kernels: tuple[Any, ...] = ()  # which ones may be taken
    tensors: "list[HeldTensor]" = field(default_factory=list)  # buffers and such, of all its modules
    attributes: list[python_state.Table] = field(default_factory=list)
    contents: list[tuple[Any, Any]] = field(default_factory=list)  # of lists and tables of its modules
    drawn_from: list[tuple[Any, Any]] = field(default_factory=list)  # generators of its modules' own
    saved: list[tuple[torch.Size, torch.dtype]] = field(default_factory=list)
    witness: "Witness | None" = None  # an activation it saved, to know it again
    made: list[Any] | None = None  # handles of weights, and tensors, once it has run again

    def make_again(self, ranges: WeightRanges, device: torch.device) -> torch.Tensor | None:
        """Run the call once more and keep what it saves; gives whether that is other than it was.

        On a CPU it is said at once instead; a GPU is not waited for.
        """
        doubt: torch.Tensor | None = None
        assert self.run is not None, "its forward has noted it"
        if [version_of(leaf) for leaf in _list_tensors((self.args, self.kwargs))] != self.versions:
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
            if self.witness is not None and self.witness.at == at:
                nonlocal doubt
                doubt = self.witness.differs_from(tensor)
            if len(made) == len(self.saved):
                raise _EnoughError

        with ExitStack() as stack:
            stack.enter_context(_as_it_was(self, device))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(use_kernel_settings(self.kernels))
            for kind, enabled, dtype, cache in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache))
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, refuse_unpacking))
            with suppress(_EnoughError):
                self.run(*self.args, **self.kwargs)
        if len(made) < len(self.saved):
            raise RunError(
                f"{self.name!r} saved {len(made)} tensors where it had saved {len(self.saved)}"
                " the first time: it does not repeat exactly; raise memory_cap so that its"
                " activations stay"
            )
        self.made = made
        if doubt is None or doubt.device.type != "cpu":
            return doubt
        if bool(doubt):
            raise_unequal(self.name)
        return None

    def let_go(self) -> None:
        """Nothing of it is wanted any more."""
        self.over, self.made, self.run = True, None, None
        self.args, self.kwargs, self.generators = (), None, None
        self.tensors, self.attributes, self.contents, self.drawn_from = [], [], [], []


@dataclass(frozen=True, slots=True, eq=False)
class HeldTensor:
    """A buffer, or a tensor that is an attribute, as a call found it."""

    table: dict[str, Any]
    name: str
    tensor: torch.Tensor
    version: int
    copy: torch.Tensor | None
    is_written: bool  # by calls before, perhaps without a new version (batch norm)

    def find_earlier(self, module: str) -> torch.Tensor | None:
        """What is to be put in its place for a second run; None: it is as it was."""
        written = self.is_written or version_of(self.tensor) != self.version
        if not written:
            return None if self.table.get(self.name) is self.tensor else self.tensor
        if self.copy is None:
            raise RunError(
                f"{module!r} is to run again, and its buffer {self.name!r} of {tuple(self.tensor.shape)} has"
                " been written for the first time; raise memory_cap so that its activations stay"
            )
        return self.copy


def raise_unequal(name: str) -> NoReturn:
    """A call gave other numbers the second time."""
    raise RunError(
        f"{name!r} was to run again and gave other numbers the second time: it reads or writes something"
        " outside of itself (a global, a closure, an object, an input written in place); raise memory_cap so"
        " that its activations stay, or make that a buffer or an attribute of its module"
    )


class Witness:
    """What a weight of a call was multiplied with last: it depends on nearly all that the call has read."""

    def __init__(self, buffers: frozenset[int]) -> None:
        """`buffers`: where they lie; batch norm writes them without saying so."""
        self.at, self._buffers = -1, buffers
        self._kept: tuple[int, torch.Tensor | None, int] | None = None
        self._tensor: torch.Tensor | None = None
        self._version = 0
        self._number: torch.Tensor | None = None

    def look(self, at: int, tensor: torch.Tensor, ranges: WeightRanges) -> None:
        """A tensor is saved; without weights the last activation serves."""
        if ranges.find(tensor) is not None:
            if 0 <= self.at == at - 1:
                self._kept = (self.at, self._tensor, self._version)
        elif tensor.is_floating_point() and tensor.numel() and tensor.data_ptr() not in self._buffers:
            self.at, self._tensor, self._version = at, drop_history(tensor), version_of(tensor)

    def settle(self) -> None:
        """The call is over: remember a number of it, not the tensor."""
        if self._kept is not None:
            self.at, self._tensor, self._version = self._kept
        tensor, self._tensor, self._kept = self._tensor, None, None
        if tensor is None or version_of(tensor) != self._version:
            self.at = -1
            return
        self._number = _describe(tensor)

    def differs_from(self, tensor: torch.Tensor) -> torch.Tensor:
        """Whether a tensor is another one, as a number on its device."""
        assert self._number is not None, "the call is over"
        now, before = _describe(tensor), self._number
        if not now.is_floating_point():
            return now != before
        return (now - before).abs() > _UNSURE * before.abs()  # not a number: not told here


def _describe(tensor: torch.Tensor) -> torch.Tensor:
    """All bits on a CPU; on a GPU, where kernels may add in any order, the size."""
    with torch.no_grad():
        if tensor.device.type == "cpu":
            return fingerprint(tensor)
        return torch.linalg.vector_norm(tensor.detach(), dtype=torch.float32)


class CallWatch:
    """Notes what a second run of a shard must find: buffers, attributes, and lists and tables they hold.

    Copied before a call: small tensors, and those of modules whose buffers calls have written.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._modules = module, list(module.modules())
        self._held = python_state.list_held(self._modules)
        self._generators = python_state.list_generators(self._modules)
        self._writers: set[int] | None = None  # modules that write buffers; None: no call has been seen

    def find_buffers(self) -> frozenset[int]:
        """Where the buffers of its modules lie."""
        tables = (module._buffers.values() for module in self._modules)
        return frozenset(each.data_ptr() for table in tables for each in table if each is not None)

    def has_hooks(self) -> bool:
        """Whether hooks of the user's would be called twice."""
        return has_user_hooks(self._module)

    def before(self, record: CallRecord) -> Callable[[], None]:
        """Note what the call may write; the result is to be called after it."""
        rows: list[tuple[int, HeldTensor]] = []
        for at, module in enumerate(self._modules):
            writes = self._writers is None or at in self._writers
            for table in (module._buffers, vars(module)):
                for name, tensor in table.items():
                    if isinstance(tensor, torch.Tensor):
                        copies = writes or tensor.nbytes <= _SMALL_BYTES
                        copy = tensor.detach().clone() if copies else None
                        held = HeldTensor(table, name, tensor, version_of(tensor), copy, writes)
                        rows.append((at, held))
        record.tensors = [held for _, held in rows]
        attributes = [vars(each) for each in self._modules]
        record.contents = python_state.copy_contents(self._held)
        # other tensors may stand in for the parameters for a while (functional_call)
        tables = [vars(each)[name] for each in self._modules for name in _TABLES]
        record.attributes = [(table, dict(table)) for table in (*attributes, *tables)]
        record.drawn_from = python_state.capture_generators(self._generators)

        def after() -> None:
            found = {at for at, held in rows if _is_written(held, look=self._writers is None)}
            self._writers = (self._writers or set()) | found

        return after


def _is_written(held: HeldTensor, *, look: bool) -> bool:
    """Whether a call wrote a tensor, or bound another; `look` at its values, too (a GPU is waited for)."""
    if held.table.get(held.name) is not held.tensor or version_of(held.tensor) != held.version:
        return True
    return look and held.copy is not None and not torch.equal(held.tensor, held.copy)


def note_call(
    record: CallRecord, run: Callable[..., Any], args: Any, kwargs: Any, device: torch.device
) -> None:
    """How a call ran, for the second time."""
    record.run = run
    record.args, record.kwargs = tree_map(_itself, (args, kwargs))  # lists may grow after the call
    record.versions = [version_of(leaf) for leaf in _list_tensors((args, kwargs))]
    record.generators = randomness.capture_generators(device)
    record.kernels = list_kernel_settings()
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
    earlier = [(held, held.find_earlier(record.name)) for held in record.tensors]
    changed = [row for row in record.attributes if python_state.differs(*row)]
    refilled = [row for row in record.contents if not python_state.holds_same(*row)]
    with (
        randomness.preserve_generators(device),
        python_state.swap_attributes(changed),
        python_state.preserve_contents(container for container, _ in record.contents),
        ExitStack() as stack,
    ):
        stack.enter_context(python_state.use_generators(record.drawn_from))
        python_state.refill(refilled)
        randomness.restore_generators(record.generators, device)
        before = [(vars_, dict(vars_)) for vars_, _ in record.attributes]
        bound = [(held.table, held.name, held.table.get(held.name)) for held, _ in earlier]
        for held, tensor in earlier:
            if tensor is not None:
                held.table[held.name] = tensor
        try:
            yield
        finally:
            for table, was in before:
                if python_state.differs(table, was):
                    table.clear()
                    table.update(was)
            for table, name, tensor in bound:
                table[name] = tensor


def keep_saved(tensor: torch.Tensor) -> torch.Tensor:
    """A saved tensor that stays."""
    return drop_history(tensor)


def refuse_unpacking(_: Any) -> Any:
    """Nobody goes backward there."""
    raise RunError("a graph that was made only for what it saves was run backward")


def _itself(leaf: Any) -> Any:
    return leaf


def _list_tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
