"""A tape of units: recorded once as CUDA graphs, then replayed, each by one call.

A trial of a group has little to compute in a shard, and telling a GPU op by op takes longer than the ops do.

    input of shard k ──F_k──► input of shard k+1        all in memory that stays, so that every step's
    slope, input of k ──B_k──► slope, gradients          kernels read and write the same addresses

Kernels are those of a step that is not recorded, so the numbers are too. What Python does in `forward` is
done while recording and not again: that is for the user to allow (`Trial(replay=True)`). A shard that draws
random numbers, writes buffers or its input is never recorded, nor are inputs of another shape than the first.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from loadmaster.shards.device.arena import BookingStack
from loadmaster.shards.device.streams import Device
from loadmaster.shards.model.profile import tree_bytes
from loadmaster.train.execute.units import MicroBatch, Units, collect_gradients, make_leaves

_WARM_STEPS = 2  # libraries take their work space, and what a shard does is seen
_MOST_ADDRESSES = 2  # of one shard's weights: each is a recording of its own
_ANY = MicroBatch(0, 0, 1)
Bind = Callable[[], AbstractContextManager[Mapping[int, torch.Tensor]]]  # a shard's parameters, bound


class UnitTape:
    """The recorded units of one trial on one GPU; None from `forward` and `backward`: not on the tape."""

    def __init__(self, units: Units, device: Device, pool: Any, *, name: str) -> None:
        """`pool` is the memory of all tapes of a group: one unit runs at a time."""
        self._units, self._device, self._pool = units, device, pool
        self._booked = BookingStack(device.arena, f"{name} boundaries")
        self._graphs: dict[tuple[Any, ...], torch.cuda.CUDAGraph] = {}
        self._seen: dict[int, Any] = {}  # [shard] its input, without values
        self._inputs: dict[int, Any] = {}  # [shard] memory that stays
        self._slopes: dict[Any, torch.Tensor] = {}  # by form
        self._grads: dict[tuple[Any, ...], dict[int, torch.Tensor]] = {}
        self._given: dict[tuple[Any, ...], list[torch.Tensor | None]] = {}
        self._num_steps = 0
        self.why_not = ""  # recording failed; steps go on without

    def begin(self) -> None:
        """A step begins; after the first ones memory is taken that stays."""
        self._units.watching = self._num_steps < _WARM_STEPS
        if self._num_steps == _WARM_STEPS and not self.why_not:
            self._booked.push(max(1, tree_bytes(list(self._seen.values()))))
            where = self._device.torch_device
            self._inputs = {
                shard: tree_map(lambda leaf: _allocate_like(leaf, where), seen)
                for shard, seen in self._seen.items()
            }
        self._num_steps += 1

    @property
    def num_recorded(self) -> int:
        """Units on the tape."""
        return len(self._graphs)

    def note_input(self, shard: int, value: Any) -> None:
        """The input of a shard in a step that is not recorded."""
        if self._num_steps <= _WARM_STEPS:
            self._seen[shard] = tree_map(_to_meta, value)

    def forward(self, shard: int, value: Any, address: Any, bind: Bind) -> Any:
        """F: the input of the next shard."""
        own, out = self._inputs.get(shard), self._inputs.get(shard + 1)
        if out is None or not self._is_recordable(shard) or not _fits(own, value):
            return None

        def work(_: Mapping[int, torch.Tensor]) -> None:
            with torch.no_grad():
                _fill(out, self._units.run(shard, own, _ANY))

        _fill(own, value)
        return out if self._play(("F", shard, address), work, bind) else None

    def backward(
        self, shard: int, value: Any, slopes: list[torch.Tensor | None], address: Any, bind: Bind
    ) -> tuple[list[torch.Tensor | None], dict[int, torch.Tensor]] | None:
        """B: the slopes of the shard's input, and gradients by parameter."""
        own = self._inputs.get(shard)
        if own is None or not self._is_recordable(shard) or not _fits(own, value):
            return None
        key = ("B", shard, address, tuple(_slope_key(at, slope) for at, slope in enumerate(slopes)))
        standing = [None if each is None else self._get_slope(at, each) for at, each in enumerate(slopes)]

        def work(leaves: Mapping[int, torch.Tensor]) -> None:
            given = make_leaves(own, wanted=shard > 0)
            out = tree_flatten(self._units.run(shard, self._units.prepare_input(shard, given), _ANY))[0]
            pairs = [
                (leaf, slope)
                for leaf, slope in zip(out, standing, strict=True)
                if slope is not None and leaf.requires_grad
            ]
            torch.autograd.backward([leaf for leaf, _ in pairs], [slope for _, slope in pairs])
            self._given[key] = self._keep_slopes(collect_gradients(given))
            self._keep_grads(self._grads[key], leaves)

        _fill(own, value)
        for mine, slope in zip(standing, slopes, strict=True):
            if mine is not None and slope is not None and slope is not mine:
                mine.copy_(slope)
        if key not in self._grads:
            for at, leaf in enumerate(tree_flatten(own)[0]):
                if leaf.is_floating_point():
                    self._get_slope(at, leaf)
            with bind() as leaves:
                self._grads[key] = {
                    n: torch.empty_like(leaf) for n, leaf in leaves.items() if leaf.requires_grad
                }
        if not self._play(key, work, bind):
            return None
        return self._given[key], self._grads[key]

    def close(self) -> None:
        """Forget everything."""
        self._graphs.clear()
        self._inputs.clear()
        self._slopes.clear()
        self._grads.clear()
        self._given.clear()
        self._booked.clear()
        self._units.watching = False

    def _is_recordable(self, shard: int) -> bool:
        given = tree_flatten(self._inputs.get(shard + 1, ()))[0]  # what it hands on: a number would be fixed
        tensors = all(isinstance(leaf, torch.Tensor) for leaf in given)
        due = self._num_steps > _WARM_STEPS and not self.why_not
        return due and tensors and self._units.is_same_each_time(shard)

    def _play(
        self, key: tuple[Any, ...], work: Callable[[Mapping[int, torch.Tensor]], None], bind: Bind
    ) -> bool:
        """Replay a unit, recording it if it is new; whether that was possible."""
        graph = self._graphs.get(key)
        if graph is None:
            others = sum(each[:2] == key[:2] for each in self._graphs)
            graph = self._record_unit(work, bind) if others < _MOST_ADDRESSES else None
            if graph is None:
                return False
            self._graphs[key] = graph
        graph.replay()
        return True

    def _record_unit(
        self, work: Callable[[Mapping[int, torch.Tensor]], None], bind: Bind
    ) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        try:
            with bind() as leaves, self._capture_into(graph):
                work(leaves)
        except RuntimeError as problem:  # an op that waits for the GPU, or allocates outside
            self.why_not = " ".join(str(problem).split())[:200]
            return None
        return graph

    @contextmanager
    def _capture_into(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        self._units.recording = True
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            self._units.recording = False
            graph.capture_end()

    def _get_slope(self, at: int, like: torch.Tensor) -> torch.Tensor:
        form = _slope_key(at, like)
        if form not in self._slopes:
            self._slopes[form] = torch.empty_like(like)
        return self._slopes[form]

    def _keep_slopes(self, found: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        kept = [None if each is None else self._slopes[_slope_key(at, each)] for at, each in enumerate(found)]
        for mine, each in zip(kept, found, strict=True):
            if mine is not None and each is not None:
                mine.copy_(each)
        return kept

    @staticmethod
    def _keep_grads(kept: dict[int, torch.Tensor], leaves: Mapping[int, torch.Tensor]) -> None:
        for number in list(kept):
            grad, leaves[number].grad = leaves[number].grad, None
            if grad is None:
                del kept[number]
            else:
                kept[number].copy_(grad)


def _to_meta(leaf: Any) -> Any:
    return torch.empty_like(leaf, device="meta") if isinstance(leaf, torch.Tensor) else leaf


def _allocate_like(leaf: Any, where: torch.device) -> Any:
    return torch.empty_like(leaf, device=where) if isinstance(leaf, torch.Tensor) else leaf


def _slope_key(at: int, tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else (at, tensor.shape, tensor.dtype)


def _fits(own: Any, value: Any) -> bool:
    """Whether values are tensors alone, of the form the memory was taken for."""
    mine, spec = tree_flatten(own)
    given, other = tree_flatten(value)
    return (
        spec == other
        and all(isinstance(leaf, torch.Tensor) for leaf in given)
        and all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(mine, given, strict=True))
    )


def _fill(own: Any, value: Any) -> None:
    """Write values into memory, where they do not stand there already."""
    for mine, given in zip(tree_flatten(own)[0], tree_flatten(value)[0], strict=True):
        if mine is not given:
            mine.copy_(given)
