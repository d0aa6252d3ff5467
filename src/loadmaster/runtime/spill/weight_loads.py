"""Loads: weights and activations that wait in host memory, and are copied just before they are read.

    forward    fetched ─► op ─► dropped         the next copies are sent as soon as one is dropped,
    backward   unpacked ─► op's backward ─► edge   a window of bytes at most; in reverse order

What autograd would save of a copy is saved as a note (which weight, which view); when its backward asks for
it, the weight is copied again. Nothing is kept from one pass for the other, so that weights which were
changed in between are never used in an old version: such a change is an error, as it is in PyTorch.

    op ─► stashed ─► op's backward              what a stashing op made is copied home when autograd saves it,
                                               and comes back as a weight does

    weight ─anchored─► ─edge─► op              a gradient goes down as soon as it is made (edge); whoever adds
                                               it up waits for it (anchor): the anchors' backward comes last
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from loadmaster.core.errors import RunError
from loadmaster.graph.spill import max_outgoing_bytes
from loadmaster.modules.live_storages import LiveStorages
from loadmaster.modules.saved_tensors import drop_history
from loadmaster.runtime.spill.weight_carriers import Carrier, PendingCopy, make_carrier
from loadmaster.runtime.transport.byte_accounts import Accounts
from loadmaster.runtime.transport.devices import RunDevice


@dataclass(frozen=True, slots=True)
class Reading:
    """An op that reads a spilled weight."""

    name: str  # of the weight
    place: int  # of the weight among the inputs of the graph
    home: int
    device: int  # where it is read


@dataclass(frozen=True, slots=True)
class StashingOp:
    """An op whose outputs wait at home for their backward."""

    name: str
    home: int
    device: int  # where it runs


class Spill:
    """What the passes of a placed model share: what stays at home, the window, the carriers."""

    def __init__(
        self,
        names: frozenset[str],
        stashing: Mapping[str, int],
        window_bytes: int,
        largest_bytes: int,
        devices: Sequence[RunDevice],
        accounts: Accounts | None,
    ) -> None:
        self.names, self.stashing = names, stashing  # weights; ops and the home of what they make
        self.window_bytes, self.accounts = window_bytes, accounts
        self._largest_bytes, self._devices = largest_bytes, devices
        self._carriers: dict[tuple[int, int], Carrier] = {}

    def carrier(self, device: int, home: int) -> Carrier:
        """Made when it is first needed."""
        key = (device, home)
        if key not in self._carriers:
            there, here = self._devices[device].where, self._devices[home].where
            self._carriers[key] = make_carrier(there, here, max_outgoing_bytes(self._largest_bytes))
        return self._carriers[key]


class _SavedCopy(NamedTuple):
    """What is saved of a copy: which reading, of which version, and how it was looked at."""

    at: int
    version: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(slots=True)
class _Stashed:
    """The memory that a stashing op made: on its way home once autograd saves it."""

    op: StashingOp
    version: int
    at: int = -1  # of its load; none yet


class _SavedStash(NamedTuple):
    """What is saved of memory that went home: which load, and how it was looked at.

    It alone holds on to that memory, so that it is free as soon as autograd lets go of what it saved.
    """

    at: int
    memory: torch.Tensor
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _SavedByMaker:
    """What an op saved of a tensor while it ran; if the op made the tensor, it is stashed afterwards."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.saved: torch.Tensor | _SavedStash = tensor


class _AtHome(NamedTuple):
    """A load: what is copied, from and to where."""

    name: str
    home: int
    device: int
    num_bytes: int
    weight: torch.Tensor | None = None
    stash: "weakref.ref[torch.Tensor] | None" = None
    done: Any = None  # the event of a stash's copy home, or None where it is there

    def find(self) -> torch.Tensor | None:
        """What is copied; None where nobody can ask for it any more."""
        return self.weight if self.stash is None else self.stash()


def _no_current_node() -> None:
    """Where torch does not tell who asks, copies without an edge stay to the end of the backward pass."""


class _Queue:
    """Copies on one device: some are held, the next ones are sent as there is room."""

    def __init__(self, loads: "WeightLoads", order: list[int]) -> None:
        self._loads = weakref.proxy(loads)  # which holds this queue, and what waits at home
        self._order = order
        self._place = {at: place for place, at in enumerate(order)}
        self._next = 0
        self.held: dict[int, PendingCopy] = {}
        self._user: dict[int, Any] = {}  # who asked for a copy

    def send_ahead(self) -> None:
        """Send what fits in the window."""
        while self._next < len(self._order):
            at = self._order[self._next]
            if at not in self.held and self._loads.is_wanted(at):
                held_bytes = sum(sent.tensor.nbytes for sent in self.held.values())
                if self.held and held_bytes + self._loads.nbytes(at) > self._loads.spill.window_bytes:
                    return
                self.held[at] = self._loads.send_weight(at)
            self._next += 1

    def fetch(self, at: int, user: Any = None) -> torch.Tensor:
        """A copy that may be read; copies that another user is done with are dropped."""
        for other in [one for one, by in self._user.items() if by is not user]:
            self.drop(other)
        if at not in self.held:
            self._next = self._place.get(at, len(self._order))
            self.held[at] = self._loads.send_weight(at)
        self._user[at] = user
        sent = self.held[at]
        self._loads.carrier(at).use(sent)
        self.send_ahead()
        return sent.tensor

    def drop(self, at: int) -> None:
        """A copy is not needed any more."""
        self._user.pop(at, None)
        sent = self.held.pop(at, None)
        if sent is not None:
            self._loads.carrier(at).free(sent)
            del sent
            self.send_ahead()

    def close(self) -> None:
        """Drop all, and send nothing more."""
        self._next = len(self._order)
        for at in list(self.held):
            self.drop(at)


def _forget(_: _Stashed) -> None:
    """Its memory is free on the device."""


class WeightLoads:
    """The loads of one run of a graph and of its backward."""

    def __init__(
        self, spill: Spill, readings: Sequence[Reading], stashing: Sequence[StashingOp], flat: Sequence[Any]
    ) -> None:
        self.spill = spill
        self._loads = [
            _AtHome(f"weight {one.name}", one.home, one.device, flat[one.place].nbytes, flat[one.place])
            for one in readings
        ]
        self._stashing = stashing
        self._stashed = LiveStorages[_Stashed](_forget)
        self._saved_by_maker: list[_SavedByMaker] | None = None  # while a stashing op runs
        self._landing: dict[int, Any] = {}  # what to wait for, by edge
        self._noted: list[int] = []
        self._task = -1
        self._backward: dict[int, _Queue] = {}
        self._forward = self._queues(range(len(readings)))
        self._copies: dict[int, int] = {}  # storages of copies held in the forward pass

    def _queues(self, order: Sequence[int]) -> dict[int, _Queue]:
        found: dict[int, list[int]] = {}
        for at in order:
            found.setdefault(self._loads[at].device, []).append(at)
        return {device: _Queue(self, some) for device, some in found.items()}

    def carrier(self, at: int) -> Carrier:
        """Of a load."""
        return self.spill.carrier(self._loads[at].device, self._loads[at].home)

    def is_wanted(self, at: int) -> bool:
        """Whether anybody may still ask for it."""
        return self._loads[at].find() is not None

    def nbytes(self, at: int) -> int:
        """Of what is copied."""
        return self._loads[at].num_bytes

    @contextmanager
    def running(self) -> Iterator[None]:
        """The forward pass: copies come ahead, what is saved of them is noted; none is left behind."""
        try:
            for queue in self._forward.values():
                queue.send_ahead()
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._copies.clear()
            self._stashed = LiveStorages[_Stashed](_forget)
            self._saved_by_maker = None
            self._close(self._forward)

    def _close(self, queues: dict[int, _Queue]) -> None:
        for queue in queues.values():
            queue.close()
        for at in {(load.device, load.home): at for at, load in enumerate(self._loads)}.values():
            self.carrier(at).settle()

    def fetch(self, at: int) -> torch.Tensor:
        """The copy of a reading, in the forward pass."""
        copy = self._forward[self._loads[at].device].fetch(at)
        self._copies[copy.untyped_storage()._cdata] = at
        return copy

    def drop(self, at: int) -> None:
        """The reader of the forward pass is done."""
        queue = self._forward[self._loads[at].device]
        if at in queue.held:
            self._copies.pop(queue.held[at].tensor.untyped_storage()._cdata, None)
        queue.drop(at)

    def send_weight(self, at: int) -> PendingCopy:
        """A copy on its way, counted where it will be."""
        load, accounts = self._loads[at], self.spill.accounts
        source = load.find()
        assert source is not None, "whoever asks for it holds it"
        with _disable_current_modes(), torch.no_grad():
            sent = self.carrier(at).up(source, load.done)
        if accounts is not None:
            accounts.add(sent.tensor, load.device, f"a copy of {load.name}")
        return sent

    def expect_stash(self) -> None:
        """A stashing op is about to run: it may save what it makes before anyone else sees it."""
        self._saved_by_maker = []

    def stash(self, number: int, made: Any) -> None:
        """What a stashing op made goes home when it is saved, and at once where the op itself saved it."""
        kept, self._saved_by_maker = self._saved_by_maker or [], None
        for tensor in tree_leaves(made):
            if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or not tensor.nbytes:
                continue
            storage = tensor.untyped_storage()
            if storage in self._stashed:
                continue
            self._stashed.add(storage, _Stashed(self._stashing[number], tensor._version))
            for one in kept:
                saved = one.saved
                if isinstance(saved, torch.Tensor) and saved.untyped_storage()._cdata == storage._cdata:
                    one.saved = self._save_at_home(saved, self._stashed.get(storage))

    def _save_at_home(self, tensor: torch.Tensor, stashed: _Stashed | None) -> _SavedStash:
        """A note of a tensor whose memory goes home, or is there."""
        assert stashed is not None, "it is alive"
        memory = self._loads[stashed.at].find() if stashed.at >= 0 else None
        if memory is None:
            op, accounts = stashed.op, self.spill.accounts
            with _disable_current_modes(), torch.no_grad():
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
                sent = self.spill.carrier(op.device, op.home).down(whole)
            if accounts is not None:
                accounts.add(sent.tensor, op.home, f"what {op.name} made")
            memory = sent.tensor
            stashed.at = len(self._loads)
            name, stash = f"what {op.name} made", weakref.ref(memory)
            load = _AtHome(name, op.home, op.device, memory.nbytes, stash=stash, done=sent.done)
            self._loads.append(load)
            self._noted.append(stashed.at)
        look = tuple(tensor.size()), tuple(tensor.stride()), tensor.storage_offset()
        return _SavedStash(stashed.at, memory, tensor.dtype, *look)

    def _pack(self, tensor: torch.Tensor) -> Any:
        if tensor.layout != torch.strided:
            return drop_history(tensor)
        at = self._copies.get(tensor.untyped_storage()._cdata)
        if at is None:
            stashed = self._stashed.get(tensor.untyped_storage())
            if stashed is not None and stashed.version == tensor._version:  # else it was written since
                return self._save_at_home(tensor, stashed)
            if self._saved_by_maker is None:
                return drop_history(tensor)
            self._saved_by_maker.append(_SavedByMaker(drop_history(tensor)))
            return self._saved_by_maker[-1]
        if at not in self._noted:
            self._noted.append(at)
        look = tuple(tensor.size()), tuple(tensor.stride()), tensor.storage_offset()
        weight = self._loads[at].weight
        assert weight is not None, "only weights are copied in the forward pass"
        return _SavedCopy(at, weight._version, *look)

    def _unpack(self, saved: Any) -> Any:
        if isinstance(saved, _SavedByMaker):
            saved = saved.saved
        if isinstance(saved, _SavedStash):
            memory = self._fetch_for_backward(saved.at).untyped_storage()
            look = torch.empty(0, dtype=saved.dtype, device=memory.device)
            return look.set_(memory, saved.offset, saved.size, saved.stride)
        if not isinstance(saved, _SavedCopy):
            return saved
        weight, name = self._loads[saved.at].weight, self._loads[saved.at].name.removeprefix("weight ")
        if weight is not None and weight._version != saved.version:
            raise RunError(
                f"weight {name!r} was changed in place between the forward and the backward pass"
                f" (version {saved.version}, now {weight._version}), which needs it as it was; change it"
                " after backward()"
            )
        return self._fetch_for_backward(saved.at).as_strided(saved.size, saved.stride, saved.offset)

    def _fetch_for_backward(self, at: int) -> torch.Tensor:
        self.begin_backward()
        node = getattr(torch._C, "_current_autograd_node", _no_current_node)()
        return self._backward[self._loads[at].device].fetch(at, user=node)

    def watch(self, out: Any) -> None:
        """Copies for the backward pass come as soon as it begins."""
        for tensor in tree_leaves(out) if self._noted else ():
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(lambda _: self.begin_backward())

    def begin_backward(self) -> None:
        """The first time in a backward pass: begin to send copies, in reverse order."""
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        for queue in self._backward.values():  # of one that was broken off
            queue.close()
        self._task = task
        self._backward = self._queues(self._noted[::-1])
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._end_backward)
        for queue in self._backward.values():
            queue.send_ahead()

    def _end_backward(self) -> None:
        self._task = -1
        self._close(self._backward)
        self._landing.clear()

    def send_gradient(self, at: int, edge: int, grad: torch.Tensor) -> torch.Tensor:
        """A gradient on its way home; its reader is done, so its copy is dropped."""
        load, accounts = self._loads[at], self.spill.accounts
        with _disable_current_modes(), torch.no_grad():
            sent = self.carrier(at).down(grad)
        if accounts is not None:
            accounts.add(sent.tensor, load.home, f"the gradient of {load.name}")
        self._landing[edge] = sent.done
        if load.device in self._backward:
            self._backward[load.device].drop(at)
        return sent.tensor

    def wait_for(self, edge: int) -> None:
        """Until a gradient is home."""
        done = self._landing.pop(edge, None)
        if done is not None:
            done.synchronize()


class _Anchor(torch.autograd.Function):
    """Forward: the weight. Backward: its gradient, once it is home."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, loads: WeightLoads, edge: int) -> torch.Tensor:
        """The weight under a name of its own."""
        ctx.loads, ctx.edge = loads, edge
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Any) -> Any:
        """The same gradient."""
        ctx.loads.wait_for(ctx.edge)
        return grads[0], None, None


class _LoadEdge(torch.autograd.Function):
    """Forward: the copy. Backward: the gradient, on its way home."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, copy: torch.Tensor, loads: WeightLoads, at: int, edge: int
    ) -> torch.Tensor:
        """The copy's memory under a name of its own."""
        ctx.loads, ctx.at, ctx.edge = loads, at, edge
        return copy.view_as(copy)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Any) -> Any:
        """The gradient of one reader, not there yet."""
        return ctx.loads.send_gradient(ctx.at, ctx.edge, grads[0]), None, None, None, None


def anchor_gradient(regions: Any, edge: int, weight: torch.Tensor) -> torch.Tensor:
    """A node of the graph: where the gradient of one reading will come home."""
    if torch.is_grad_enabled() and weight.requires_grad:
        made: torch.Tensor = _Anchor.apply(weight, regions.loads, edge)
        return made
    return weight


def fetch_load(regions: Any, at: int) -> torch.Tensor:
    """A node of the graph: the copy of a reading."""
    copy: torch.Tensor = regions.loads.fetch(at)
    return copy


def link_load_gradient(
    regions: Any, at: int, edge: int, anchor: torch.Tensor, copy: torch.Tensor
) -> torch.Tensor:
    """A node of the graph: the copy, its gradient going home."""
    if torch.is_grad_enabled() and anchor.requires_grad:
        made: torch.Tensor = _LoadEdge.apply(anchor, copy, regions.loads, at, edge)
        return made
    return copy


def expect_stash(regions: Any) -> None:
    """A node of the graph: the next op's outputs wait at home for their backward."""
    regions.loads.expect_stash()


def stash_output(regions: Any, number: int, made: Any) -> None:
    """A node of the graph: what the op before it made waits at home for its backward."""
    regions.loads.stash(number, made)


def drop_load(regions: Any, at: int) -> None:
    """A node of the graph: the copy of a reading is not needed any more."""
    regions.loads.drop(at)
