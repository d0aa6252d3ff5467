"""Segmented forward: one rank's segments of a step, and what it is given and sends between them.

    forward    receive what the segment reads from other ranks, run it, send what others read
    backward   the segments in reverse order: receive the gradients of what was sent, run backward,
               send the gradients of what was received

Each segment is a piece of autograd's graph of its own, from detached inputs to its outputs, so the order of
every rank is the program's, forward and reversed, whatever autograd would choose. Transfers have tags, so a
rank sends as soon as it has something.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from loadmaster.modules.randomness import derive_seed
from loadmaster.runtime.distributed.pipeline.stages import Stage
from loadmaster.runtime.distributed.strategy.clock import Clock
from loadmaster.runtime.distributed.strategy.factors import Factors
from loadmaster.runtime.distributed.strategy.layout import RowShare
from loadmaster.runtime.distributed.strategy.moves import (
    Move,
    moves_back_of_whole,
    moves_of_rows,
    moves_of_whole,
)
from loadmaster.runtime.distributed.strategy.segments import Crossing, Output, Segment, SegmentCut
from loadmaster.runtime.distributed.strategy.wire import Arriving, Wire

_BACK = 1 << 16  # tags of gradients come after those of tensors


@dataclass(slots=True)
class _Coming:
    """Parts of a tensor that this rank is given: kept ones and those under way, in order."""

    parts: list[torch.Tensor | Arriving]
    dim: int  # along which they are joined; < 0: they are added up

    def wait(self) -> torch.Tensor:
        found = [one.wait() if isinstance(one, Arriving) else one for one in self.parts]
        if len(found) == 1:
            return found[0]
        if self.dim >= 0:
            return torch.cat(found, dim=self.dim)
        total = found[0].clone()
        for one in found[1:]:
            total += one
        return total


@dataclass(slots=True)
class _Ran:
    """A segment that has run forward."""

    received: dict[tuple[int, int], torch.Tensor]  # (op, share it is held in) -> leaf
    given: dict[int, torch.Tensor]


@dataclass(slots=True)
class SegmentedForward:
    """One rank's part of every step."""

    cut: SegmentCut
    stages: Mapping[int, Stage]  # of this rank, by segment
    shares: Sequence[RowShare]  # for this batch
    batch: int
    forms: Mapping[int, tuple[tuple[int, ...], torch.dtype]]  # of ops, for the whole batch
    unflatten: Callable[[Any], Any]
    chosen: int | None  # the output that is the loss
    rank: int
    where: torch.device
    wire: Wire
    clock: Clock
    seed: int
    random: frozenset[int] = frozenset()  # segments that draw random numbers
    step: int = 0
    _values: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    _grads: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    @property
    def final_share(self) -> int:
        """The share that makes the loss."""
        return self.cut.final_share

    @property
    def final(self) -> RowShare:
        """Who makes the loss."""
        return self.shares[self.cut.final_share]

    def run(
        self,
        parts: Callable[[int], Any],
        finish: Callable[[Any], Any],
        factors: Factors | None,
        *,
        grad: bool,
        step: int,
    ) -> Any:
        """One step; gives what `finish` makes of the outputs on ranks that make the loss."""
        self.step = step
        self._values.clear()
        self._grads.clear()
        ran: dict[int, _Ran] = {}
        with factors.watching() if factors is not None else nullcontext():
            for s, segment in enumerate(self.cut.segments):
                if self._takes_part(segment.share):
                    ran[s] = self._forward(s, segment, tree_leaves(parts(segment.share)), grad=grad)
            value = None
            if self._takes_part(self.cut.final_share):
                value = self._make_loss(finish, grad=grad)
            if grad:
                for s in reversed(range(len(self.cut.segments))):
                    self._backward(s, ran.get(s))
        self._values.clear()
        self._grads.clear()
        return value

    def _takes_part(self, share: int) -> bool:
        return self.rank in self.shares[share].ranks

    # -------------------------------------------------------------------------------------- forward

    def _forward(self, s: int, segment: Segment, leaves: Sequence[Any], *, grad: bool) -> _Ran:
        received = {}
        with self.clock.span("WAIT", segment.share):
            for op in segment.reads:
                received[op, segment.share] = self._leaf(op, segment.share, grad=grad)
        if s in self.random:
            share = self.shares[segment.share]
            at = 0 if share.whole else share.bounds(self.rank)[0]
            torch.manual_seed(derive_seed(self.seed, step=self.step, micro_batch=at, block=s))
        with self.clock.span("F", segment.share):
            outputs = self.stages[s](*received.values(), leaves=leaves)
        given = dict(zip(segment.gives, outputs, strict=True))
        for op, tensor in given.items():
            self._values[op, segment.share] = tensor
            for crossing in self.cut.crossings:
                if crossing.node == op:
                    self._send(crossing, tensor.detach())
        return _Ran(received, given)

    def _leaf(self, op: int, share: int, *, grad: bool) -> torch.Tensor:
        """A tensor that this rank has in a share, cut off from the graph that made it."""
        if self.cut.share[op] == share:
            value = self._values[op, share]
        else:
            if (op, share) not in self._values:
                crossing = self.cut.crossing(op, share)
                assert crossing is not None, "found when the graph was cut"
                self._values[op, share] = self._receive(crossing).wait()
            value = self._values[op, share]
        return value.detach().requires_grad_(grad and op in self.cut.trained)

    def _send(self, crossing: Crossing, tensor: torch.Tensor) -> None:
        """What other ranks need of a tensor that this one has made."""
        source, target = self.shares[crossing.source], self.shares[crossing.target]
        what = "an activation"
        if crossing.has_rows:
            for move in moves_of_rows(source, target):
                if move.source == self.rank and not move.is_local:
                    piece = self._rows_of(tensor, crossing.dim, move, source)
                    self.wire.send(piece, move.target, self._tag(crossing), what, "move")
            return
        for one, other in moves_of_whole(source, target):
            if one == self.rank and other != one:
                self.wire.send(tensor, other, self._tag(crossing), what, "move")

    def _receive(self, crossing: Crossing) -> _Coming:
        source, target = self.shares[crossing.source], self.shares[crossing.target]
        own = self._values.get((crossing.node, crossing.source))
        parts: list[torch.Tensor | Arriving] = []
        if crossing.has_rows:
            for move in moves_of_rows(source, target):
                if move.target == self.rank:
                    if move.is_local:
                        assert own is not None, "this rank made it"
                        parts.append(self._rows_of(own.detach(), crossing.dim, move, source))
                    else:
                        parts.append(self._await_rows(crossing, move, self._tag(crossing)))
            return _Coming(parts, crossing.dim)
        shape, dtype = self.forms[crossing.node]
        for one, other in moves_of_whole(source, target):
            if other == self.rank:
                if one == self.rank:
                    assert own is not None, "this rank made it"
                    parts.append(own.detach())
                else:
                    what = f"an activation from rank {one}"
                    parts.append(self.wire.receive(shape, dtype, one, self._tag(crossing), what))
        return _Coming(parts, -1)

    def _await_rows(self, crossing: Crossing, move: Move, tag: int) -> Arriving:
        shape, dtype = self.forms[crossing.node]
        each = shape[crossing.dim] // self.batch
        shape = (*shape[: crossing.dim], each * move.rows, *shape[crossing.dim + 1 :])
        return self.wire.receive(shape, dtype, move.source, tag, f"rows from rank {move.source}")

    def _rows_of(self, tensor: torch.Tensor, dim: int, move: Move, held: RowShare) -> torch.Tensor:
        """Rows of the batch out of those that this rank has."""
        begin, end = held.bounds(self.rank)
        each = tensor.shape[dim] // (end - begin)
        return tensor.narrow(dim, each * (move.begin - begin), each * move.rows)

    def _tag(self, crossing: Crossing, *, back: bool = False) -> int:
        return (_BACK if back else 0) + crossing.number + 1

    # -------------------------------------------------------------------------------------- backward

    def _make_loss(self, finish: Callable[[Any], Any], *, grad: bool) -> Any:
        share, leaves, flat = self.cut.final_share, {}, []
        for at, one in enumerate(self.cut.outputs):
            if not isinstance(one, Output):
                flat.append(one)
            elif self.chosen is not None and at != self.chosen:
                flat.append(None)
            else:
                leaf = self._leaf(one.node, share, grad=grad)
                leaves[one.node] = leaf
                flat.append(leaf)
        with self.clock.span("F", share):
            value = finish(flat[self.chosen] if self.chosen is not None else self.unflatten(tuple(flat)))
        if grad:
            with self.clock.span("B", share):
                value.backward()
            for op, leaf in leaves.items():
                self._add(op, share, leaf.grad)
        return value

    def _add(self, op: int, share: int, grad: torch.Tensor | None) -> None:
        if grad is not None:
            before = self._grads.get((op, share))
            self._grads[op, share] = grad if before is None else before + grad

    def _backward(self, s: int, ran: _Ran | None) -> None:
        segment = self.cut.segments[s]
        # 1. all readers in other shares that come after this segment are done: their gradients go back
        if self._crosses(s):
            self._exchange_grads(s)
        if ran is None:
            return
        outputs, grads = [], []
        for op, tensor in ran.given.items():
            grad = self._grads.pop((op, segment.share), None)
            if grad is not None and tensor.requires_grad:
                outputs.append(tensor)
                grads.append(grad)
        if outputs:
            with self.clock.span("B", segment.share):
                torch.autograd.backward(outputs, grads)
        for (op, share), leaf in ran.received.items():
            self._add(op, share, leaf.grad)
        ran.received.clear()
        ran.given.clear()

    def _crosses(self, s: int) -> bool:
        ops = set(self.cut.segments[s].gives)
        return any(one.node in ops and one.trained for one in self.cut.crossings)

    def _exchange_grads(self, s: int) -> None:
        """Gradients of what this segment sent: from the ranks that read it to those that made it."""
        ops = set(self.cut.segments[s].gives)
        for crossing in self.cut.crossings:
            if crossing.node in ops and crossing.trained:
                found = self._return_grad(crossing)
                if found is not None:
                    self._add(crossing.node, crossing.source, found)

    def _return_grad(self, crossing: Crossing) -> torch.Tensor | None:
        source, target = self.shares[crossing.source], self.shares[crossing.target]
        own = self._grads.pop((crossing.node, crossing.target), None)
        if own is None and self.rank in target.ranks:
            own = torch.zeros_like(self._values[crossing.node, crossing.target])
        tag, parts = self._tag(crossing, back=True), []
        shape, dtype = self.forms[crossing.node]
        if crossing.has_rows:
            moves = moves_of_rows(target, source)
            for move in moves:
                if move.source == self.rank and not move.is_local:
                    assert own is not None, "this rank read it"
                    piece = self._rows_of(own, crossing.dim, move, target)
                    self.wire.send(piece, move.target, tag, "a gradient", "move")
            for move in moves:
                if move.target == self.rank:
                    if move.is_local:
                        assert own is not None, "this rank read it"
                        parts.append(self._rows_of(own, crossing.dim, move, target))
                    else:
                        parts.append(self._await_rows(crossing, move, tag))
            return _Coming(parts, crossing.dim).wait() if parts else None
        pairs = moves_back_of_whole(source, target)
        for one, other in pairs:
            if one == self.rank and other != one:
                assert own is not None, "this rank read it"
                self.wire.send(own, other, tag, "a gradient", "move")
        for one, other in pairs:
            if other == self.rank:
                if one == self.rank:
                    assert own is not None, "this rank read it"
                    parts.append(own)
                else:
                    parts.append(self.wire.receive(shape, dtype, one, tag, f"a gradient from rank {one}"))
        return _Coming(parts, -1).wait() if parts else None
