"""Schedules of micro-batches as users write them ('1f1b:8', 'gpipe:8'), and what each stage then holds."""

import re
from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Ints
from loadmaster.core.errors import InputError, UnknownNameError

SCHEDULES = ("1f1b", "gpipe")


_MOST_MICROBATCHES = 2**20


@dataclass(frozen=True, slots=True)
class Schedule:
    """In which order micro-batches run forward and backward through stages."""

    name: str  # of SCHEDULES
    num_microbatches: int

    def held(self, num_behind: int) -> int:
        """Micro-batches that a stage holds which has so many stages behind it."""
        if self.name == "gpipe":
            return self.num_microbatches
        return min(num_behind + 1, self.num_microbatches)

    def in_flight(self, num_stages: int) -> Ints:
        """[S] micro-batches that each stage holds."""
        return np.array([self.held(num_stages - 1 - s) for s in range(num_stages)], dtype=np.int32)

    def __str__(self) -> str:
        """As it is asked for: '1f1b:8'."""
        return f"{self.name}:{self.num_microbatches}"


def parse_schedule(text: str) -> Schedule:
    """A schedule and its number of micro-batches from '1f1b:8' or 'gpipe:8'."""
    if not isinstance(text, str):
        raise InputError(f"pipeline is {text!r}; write schedule and micro-batches, e.g. '1f1b:8'")
    name, _, count = text.partition(":")
    if name not in SCHEDULES:
        raise UnknownNameError("pipeline schedule", name, SCHEDULES)
    if not count:
        raise InputError(f"pipeline {text!r} does not say how many micro-batches; write e.g. {name}:8")
    if not re.fullmatch(r"[0-9]{1,7}", count, re.ASCII) or not 1 <= int(count) <= _MOST_MICROBATCHES:
        raise InputError(
            f"pipeline {text!r} has {count!r} micro-batches; give 1 to {_MOST_MICROBATCHES:,}, e.g. {name}:8"
        )
    return Schedule(name, int(count))
