"""Wire: what the ranks of a strategy send each other, each message counted.

Everything goes by gloo over the memory of the host; a tensor of a GPU is copied there and back. Transfers
from rank to rank have a tag of their own, so that their order does not matter; sums run in the order in which
all ranks begin them.

What is counted are the bytes that a rank sends: of a transfer its own, of a sum over M ranks 2 (M - 1) / M of
the tensor, as the ring sends them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from loadmaster.runtime.distributed.transports import Waits

_CPU = torch.device("cpu")


@dataclass(slots=True)
class Arriving:
    """Something under way; `wait` gives the tensor."""

    work: Any
    data: torch.Tensor
    waits: Waits
    what: str
    where: torch.device = _CPU

    def wait(self) -> torch.Tensor:
        """Until it is done."""
        if self.work is not None:
            self.waits.wait(self.work, self.what)
            self.work = None
        return self.data if self.where.type == "cpu" else self.data.to(self.where)


@dataclass(slots=True)
class Wire:
    """One rank's end."""

    rank: int
    where: torch.device
    waits: Waits
    sent_bytes: Counter[str] = field(default_factory=Counter)  # of this step, by what it was for
    _leaving: list[Arriving] = field(default_factory=list)
    _groups: dict[tuple[int, ...], Any] = field(default_factory=dict)

    def make_groups(self, sets: Sequence[tuple[int, ...]]) -> None:
        """A process group for each set of ranks; all ranks make all, in one order."""
        for ranks in sorted({tuple(sorted(one)) for one in sets if len(one) > 1}):
            if ranks not in self._groups:
                self._groups[ranks] = dist.new_group(list(ranks), backend="gloo")

    def send(self, data: torch.Tensor, to: int, tag: int, what: str, why: str) -> None:
        """Begin to send; `flush` waits until it has left."""
        staged = data.detach().to(_CPU).contiguous()
        self.sent_bytes[why] += staged.numel() * staged.element_size()
        work = dist.isend(staged, to, tag=tag)
        self._leaving.append(Arriving(work, staged, self.waits, what))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int, tag: int, what: str) -> Arriving:
        """Begin to receive."""
        data = torch.empty(tuple(shape), dtype=dtype)
        return Arriving(dist.irecv(data, source, tag=tag), data, self.waits, what, self.where)

    def begin_sum(self, data: torch.Tensor, ranks: tuple[int, ...], what: str, why: str) -> Arriving:
        """Begin to add up a tensor over ranks; what is given may be overwritten."""
        count, at = len(ranks), sorted(ranks).index(self.rank)
        each, more = divmod(2 * (count - 1) * data.numel() * data.element_size(), count)
        self.sent_bytes[why] += each + (at < more)
        staged = data.to(_CPU)
        work = dist.all_reduce(staged, group=self._groups[tuple(sorted(ranks))], async_op=True)
        return Arriving(work, staged, self.waits, what, self.where)

    def sum_everywhere(self, data: torch.Tensor, what: str) -> torch.Tensor:
        """Add up a small tensor over all ranks; not counted."""
        if dist.get_world_size() > 1:
            self.waits.wait(dist.all_reduce(data, async_op=True), what)
        return data

    def make_equal(self, tensors: Sequence[torch.Tensor], ranks: tuple[int, ...]) -> None:
        """Tensors of one type take the values of the first of these ranks; not counted."""
        flat = torch.cat([one.detach().reshape(-1) for one in tensors]).to(_CPU)
        group = self._groups[tuple(sorted(ranks))]
        work = dist.broadcast(flat, ranks[0], group=group, async_op=True)
        self.waits.wait(work, f"the first values of weights from rank {ranks[0]}")
        at = 0
        for one in tensors:
            one.copy_(flat[at : at + one.numel()].reshape(one.shape))
            at += one.numel()

    def flush(self) -> None:
        """Until all that was sent has left."""
        while self._leaving:
            self._leaving.pop(0).wait()

    def take_counts(self) -> dict[str, int]:
        """The bytes sent since this was asked last."""
        found, self.sent_bytes = dict(self.sent_bytes), Counter()
        return found
