"""Schedules of micro-batches as users write them ('1f1b:8', 'interleaved:8x2'), and what stages then hold.

`auto` stands for any schedule: 'auto:8' is a step of 8 micro-batches by whichever is best.
"""

import re
from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Ints
from loadmaster.core.errors import InputError, UnknownNameError
from loadmaster.core.pipelines.order import (
    INTERLEAVED,
    SCHEDULES,
    SEVERAL_STAGES,
    in_flight_of,
    make_order,
)

AUTO = "auto"
OF_THROUGHPUT = ("1f1b", "gpipe")  # what a steady state of its own can be asked of
_MOST_MICROBATCHES = 2**20
_MOST_STAGES_PER_RANK = 64


@dataclass(frozen=True, slots=True)
class Schedule:
    """In which order micro-batches run forward and backward through stages."""

    name: str  # of SCHEDULES, or AUTO
    num_microbatches: int
    stages_per_rank: int = 1

    def count_held(self, num_behind: int) -> int:
        """Micro-batches that a stage holds which has so many stages behind it, one stage a device."""
        if self.name == "gpipe":
            return self.num_microbatches
        return min(num_behind + 1, self.num_microbatches)

    def in_flight(self, num_stages: int) -> Ints:
        """[S] micro-batches that each stage holds."""
        if self.name in OF_THROUGHPUT and self.stages_per_rank == 1:
            return np.array([self.count_held(num_stages - 1 - s) for s in range(num_stages)], dtype=np.int32)
        order = make_order(self.name, num_stages, self.num_microbatches, self.stages_per_rank)
        return np.array(in_flight_of(order, num_stages), dtype=np.int32)

    def __str__(self) -> str:
        """As it is asked for: '1f1b:8'."""
        several = f"x{self.stages_per_rank}" if self.stages_per_rank > 1 else ""
        return f"{self.name}:{self.num_microbatches}{several}"


def parse_schedule(text: str) -> Schedule:
    """A schedule from '1f1b:8', 'gpipe:8', 'zb-h1:8', 'interleaved:8x2' (2 stages a rank) or 'auto:8'."""
    if not isinstance(text, str):
        raise InputError(f"pipeline is {text!r}; write schedule and micro-batches, e.g. '1f1b:8'")
    name, _, count = text.partition(":")
    if name not in (*SCHEDULES, AUTO):
        raise UnknownNameError("pipeline schedule", name, (*SCHEDULES, AUTO))
    if not count:
        raise InputError(f"pipeline {text!r} does not say how many micro-batches; write e.g. {name}:8")
    count, _, each = count.partition("x") if name in SEVERAL_STAGES else (count, "", "")
    if not re.fullmatch(r"[0-9]{1,7}", count, re.ASCII) or not 1 <= int(count) <= _MOST_MICROBATCHES:
        raise InputError(
            f"pipeline {text!r} has {count!r} micro-batches; give 1 to {_MOST_MICROBATCHES:,}, e.g. {name}:8"
        )
    each = each or ("2" if name == INTERLEAVED else "1")
    if not re.fullmatch(r"[0-9]{1,2}", each, re.ASCII) or not 1 <= int(each) <= _MOST_STAGES_PER_RANK:
        raise InputError(f"pipeline {text!r} has {each!r} stages a rank; give 1 to 64, e.g. {name}:8x2")
    return Schedule(name, int(count), int(each))
