"""Drift: copies of a weight that should be equal, compared now and then, and made equal again.

Sums over ranks give every rank the same gradient. A gradient that each rank makes by itself (duplicated
groups, factors) may be rounded differently on unlike devices, so copies may drift apart. Every so many steps
checksums are compared; where they differ, the first rank's copy goes to the others and the largest
difference is kept, relative to the largest value.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from loadmaster.runtime.distributed.strategy.layout import Meeting
from loadmaster.runtime.distributed.strategy.wire import Wire

_TAGS = 1 << 19


@dataclass(slots=True)
class DriftReport:
    """What was found until now."""

    checks: int = 0
    largest: float = 0.0  # relative difference
    weight: str = ""  # where it was
    mended: int = 0  # weights that were made equal again


@dataclass(slots=True)
class Drift:
    """Copies of one rank; all ranks check together."""

    wire: Wire
    every: int
    report: DriftReport = field(default_factory=DriftReport)

    def is_due(self, steps_done: int) -> bool:
        """Whether to check after this step."""
        return self.every > 0 and steps_done % self.every == 0

    def check(self, weights: Mapping[str, nn.Parameter], meetings: Mapping[str, Meeting]) -> None:
        """Compare all weights that several ranks have."""
        if dist.get_world_size() == 1:
            return
        rank, own = self.wire.rank, {}
        for name, weight in weights.items():
            if len(meetings[name].ranks) > 1:
                own[name] = checksum(weight)
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, own)
        self.report.checks += 1
        coming = []
        for at, name in enumerate(meetings):
            meeting = meetings[name]
            said = {found[one].get(name) for one in meeting.ranks} - {None}
            if len(said) <= 1 or rank not in meeting.ranks:
                continue
            self.report.mended += 1
            if rank == meeting.owner:
                for other in meeting.ranks:
                    if other != rank:
                        self.wire.send(weights[name], other, _TAGS + at, f"rank {other}", "drift")
            else:
                shape, dtype = weights[name].shape, weights[name].dtype
                what = f"the first copy of {name!r} from rank {meeting.owner}"
                coming.append((name, self.wire.receive(shape, dtype, meeting.owner, _TAGS + at, what)))
        with torch.no_grad():
            for name, one in coming:
                value = one.wait()
                self._note(name, relative_difference(weights[name], value))
                weights[name].copy_(value)
        self.wire.flush()

    def _note(self, name: str, difference: float) -> None:
        if difference > self.report.largest:
            self.report.largest, self.report.weight = difference, name


def checksum(weight: torch.Tensor) -> tuple[int, int]:
    """Of the bits of a tensor: equal tensors have equal ones, others almost surely have not."""
    flat = weight.detach().contiguous().reshape(-1)
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    bits = flat.view(whole).to(torch.int64)
    return int(bits.sum()), int((bits * bits).sum())


def relative_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of an element, relative to the largest element."""
    largest = float(other.detach().abs().max()) if other.numel() else 0.0
    apart = float((one.detach() - other.detach()).abs().max()) if other.numel() else 0.0
    return apart / largest if largest else apart
