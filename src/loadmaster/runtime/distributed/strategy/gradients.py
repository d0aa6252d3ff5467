"""Gradients: how those of each weight meet, in buckets of our own.

    allreduce   a bucket is added up over its ranks as soon as its last gradient is there, beside the rest of
                the backward pass; every rank steps its own copy
    ps          the server adds up what the others send, steps, and sends the weights back

A bucket holds weights with the same ranks and the same way, in the reverse order of the model, at most
`bucket_bytes` of them. All ranks begin the sums of a set of ranks in one order, whatever becomes ready first.
What this rank computes whole (placed, duplicated) or makes of factors meets nobody.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from loadmaster.core.errors import RunError
from loadmaster.core.strategy import Sync
from loadmaster.runtime.distributed.strategy.layout import Meeting
from loadmaster.runtime.distributed.strategy.wire import Arriving, Wire

_TAGS = 1 << 18  # first tag of gradients and weights


@dataclass(slots=True)
class _Bucket:
    number: int
    names: tuple[str, ...]
    meeting: Meeting
    missing: int = 0  # gradients that are yet to come
    begun: bool = False
    coming: list[Arriving] = field(default_factory=list)
    own: torch.Tensor | None = None


@dataclass(slots=True)
class Gradients:
    """One rank's gradients; `begin` before a backward pass, `finish` after it."""

    wire: Wire
    weights: Mapping[str, nn.Parameter]  # this rank's, that are trained, in the order of the model
    meetings: Mapping[str, Meeting]
    bucket_bytes: int
    uses: dict[str, int] = field(default_factory=dict)  # how often each gets a gradient in a backward pass
    is_settled: bool = False
    _buckets: list[_Bucket] = field(default_factory=list)
    _left: dict[str, int] = field(default_factory=dict)
    _by_name: dict[str, _Bucket] = field(default_factory=dict)
    _hooks: list[Any] = field(default_factory=list)

    def settle(self, trained: Iterable[str]) -> None:
        """Deal the weights that have a gradient on any rank to buckets; the same on all ranks."""
        known, rank = set(trained), self.wire.rank
        open_: dict[tuple[Meeting, torch.dtype], list[str]] = {}
        room: dict[tuple[Meeting, torch.dtype], int] = {}
        made: list[tuple[str, ...]] = []
        for name in reversed(list(self.meetings)):
            meeting = self.meetings[name]
            if name not in known or meeting.sync == Sync.NONE or meeting.factors:
                continue
            if rank not in meeting.ranks:
                continue
            weight = self.weights[name]
            key = meeting, weight.dtype
            if weight.nbytes > room.get(key, -1):
                if key in open_:
                    made.append(tuple(open_[key]))
                open_[key], room[key] = [], self.bucket_bytes
            open_[key].append(name)
            room[key] -= weight.nbytes
        made += [tuple(names) for names in open_.values()]
        order = {name: at for at, name in enumerate(reversed(list(self.meetings)))}
        made.sort(key=lambda names: order[names[-1]])  # a bucket is ready with its last gradient
        self._buckets = [_Bucket(order[names[0]], names, self.meetings[names[0]]) for names in made if names]
        self._by_name = {name: bucket for bucket in self._buckets for name in bucket.names}

    def learn(self) -> None:
        """The first backward pass begins: count how often each weight gets a gradient."""
        self._unhook()
        self.uses = {}

        def count(name: str) -> Any:
            def one_more(_: torch.Tensor) -> None:
                self.uses[name] = self.uses.get(name, 0) + 1

            return one_more

        for name, weight in self.weights.items():
            if weight.requires_grad:
                self._hooks.append(weight.register_post_accumulate_grad_hook(count(name)))

    def settle_with_all(self) -> None:
        """The first backward pass is done: all ranks deal the weights that have a gradient to buckets."""
        self._unhook()
        own = [name for name, weight in self.weights.items() if weight.grad is not None]
        found: list[Any] = [own]
        if dist.get_world_size() > 1:
            found = [None] * dist.get_world_size()
            dist.all_gather_object(found, own)
        self.settle(name for names in found for name in names)
        self.is_settled = True
        self._reset()

    def begin(self, *, meet: bool) -> None:
        """A backward pass begins; with `meet` its gradients are added up over ranks."""
        self._unhook()
        self._reset()
        if not meet:
            return
        for bucket in self._buckets:
            for name in bucket.names:
                weight = self.weights[name]
                self._hooks.append(weight.register_post_accumulate_grad_hook(self._make_hook(name)))

    def _reset(self) -> None:
        self._left = {name: self.uses.get(name, 1) for name in self._by_name}
        for bucket in self._buckets:
            bucket.missing, bucket.begun, bucket.coming, bucket.own = len(bucket.names), False, [], None

    def _make_hook(self, name: str) -> Any:
        def ready(_: torch.Tensor) -> None:
            self._left[name] -= 1
            if self._left[name] == 0:
                self._by_name[name].missing -= 1
                self._begin_ready()

        return ready

    def _begin_ready(self) -> None:
        """Begin what is ready, but never out of order within a set of ranks."""
        blocked: set[tuple[int, ...]] = set()
        for bucket in self._buckets:
            ranks = bucket.meeting.ranks
            if bucket.begun or ranks in blocked:
                continue
            if bucket.missing > 0:
                blocked.add(ranks)
                continue
            self._begin_bucket(bucket)

    def _begin_bucket(self, bucket: _Bucket) -> None:
        bucket.begun = True
        for name in bucket.names:
            if self.weights[name].grad is None:
                self.weights[name].grad = torch.zeros_like(self.weights[name])
        flat = torch.cat([_grad(self.weights[name]).reshape(-1) for name in bucket.names])
        meeting, wire = bucket.meeting, self.wire
        what = f"the gradients of {bucket.names[0]!r}"
        if meeting.sync == Sync.ALLREDUCE:
            bucket.coming = [wire.begin_sum(flat, meeting.ranks, f"{what} from all of them", "allreduce")]
        elif wire.rank == meeting.server:
            bucket.own = flat
            bucket.coming = [
                wire.receive(
                    flat.shape, flat.dtype, rank, _TAGS + 2 * bucket.number, f"{what} from rank {rank}"
                )
                for rank in meeting.ranks
                if rank != meeting.server
            ]
        else:
            to = meeting.server
            wire.send(flat, to, _TAGS + 2 * bucket.number, f"rank {to} to take {what}", "ps")

    def finish(self) -> None:
        """Wait until every gradient is the sum over its ranks (under `ps`: on the server)."""
        self._unhook()
        late = next((name for name, left in self._left.items() if left < 0), None)
        if late is not None:
            raise RunError(
                f"weight {late!r} got a gradient after its sum had begun; a backward pass must be like the"
                " first one (is a layer run again in some steps only?)"
            )
        for bucket in self._buckets:
            if not bucket.begun:
                self._begin_bucket(bucket)
        for bucket in self._buckets:
            if bucket.own is not None:
                total = bucket.own
                for one in bucket.coming:
                    total += one.wait()
                self._write(bucket, total)
            elif bucket.coming:
                self._write(bucket, bucket.coming[0].wait())
            bucket.coming, bucket.own = [], None

    def _write(self, bucket: _Bucket, flat: torch.Tensor) -> None:
        at = 0
        for name in bucket.names:
            grad = _grad(self.weights[name])
            grad.copy_(flat[at : at + grad.numel()].reshape(grad.shape))
            at += grad.numel()

    def send_weights(self) -> None:
        """Under `ps` the servers send what they stepped, and the others take it."""
        wire, coming = self.wire, []
        for bucket in self._buckets:
            meeting = bucket.meeting
            if meeting.sync != Sync.PS:
                continue
            what = f"the weights of {bucket.names[0]!r}"
            tag = _TAGS + 2 * bucket.number + 1
            if wire.rank == meeting.server:
                flat = torch.cat([self.weights[name].detach().reshape(-1) for name in bucket.names])
                for rank in meeting.ranks:
                    if rank != wire.rank:
                        wire.send(flat, rank, tag, f"rank {rank} to take {what}", "ps")
            else:
                size = sum(self.weights[name].numel() for name in bucket.names)
                dtype = self.weights[bucket.names[0]].dtype
                source = meeting.server
                coming.append(
                    (bucket, wire.receive((size,), dtype, source, tag, f"{what} from rank {source}"))
                )
        with torch.no_grad():
            for bucket, one in coming:
                flat, at = one.wait(), 0
                for name in bucket.names:
                    weight = self.weights[name]
                    weight.copy_(flat[at : at + weight.numel()].reshape(weight.shape))
                    at += weight.numel()

    def clip(self, largest: float) -> float:
        """Scale all gradients of all ranks to a norm, as `clip_grad_norm_` does; each weight counts once."""
        squares = torch.zeros(1, dtype=torch.float64)
        for name, weight in self.weights.items():
            if weight.grad is not None and self.meetings[name].owner == self.wire.rank:
                squares += weight.grad.detach().double().norm().cpu() ** 2
        norm = math.sqrt(float(self.wire.sum_everywhere(squares, "the norm of all gradients")))
        factor = min(1.0, largest / (norm + 1e-6))
        for weight in self.weights.values():
            if weight.grad is not None:
                weight.grad.mul_(factor)
        return norm

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _grad(weight: nn.Parameter) -> torch.Tensor:
    assert weight.grad is not None, "filled before"
    return weight.grad


def sets_of_ranks(meetings: Sequence[Meeting]) -> list[tuple[int, ...]]:
    """Ranks that add up together, each set once."""
    return sorted({tuple(sorted(one.ranks)) for one in meetings if one.sync == Sync.ALLREDUCE})
