"""Ranges of random numbers: what can be said of a draw before it is made.

`torch.rand([])` is at least 0 and below 1, so `rand < 0.0` is False and `rand >= 0` True whatever is drawn:
such a comparison does not depend on the draw. A range goes with a tensor through sums and products with
constants; whatever else happens to it, nothing is known but the numbers that were drawn.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Range:
    """All numbers from `low` to `high`; `high` itself is not among them where it is `open`."""

    low: float
    high: float
    open: bool = False


def range_of_draw(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Range | None:
    """What an op that draws can give, by its name."""
    if name in ("rand", "rand_like"):
        return Range(0.0, 1.0, open=True)
    if name in ("uniform_", "uniform"):
        ends = [*args[1:3], *(0.0, 1.0)[len(args[1:3]) :]]
        return Range(float(kwargs.get("from", ends[0])), float(kwargs.get("to", ends[1])))
    if name in ("bernoulli", "bernoulli_"):
        chance = kwargs.get("p", args[1] if len(args) > 1 else None)
        sure = isinstance(chance, int | float) and chance in (0, 1)
        return Range(float(chance), float(chance)) if sure and chance is not None else Range(0.0, 1.0)
    numbers = [value for value in args if isinstance(value, int) and not isinstance(value, bool)]
    if name in ("randint", "randint_like") and numbers:
        return Range(float(numbers[0]) if len(numbers) > 1 else 0.0, float(numbers[-1] - 1))
    return Range(0.0, float(numbers[0] - 1)) if name == "randperm" and numbers else None


def range_of_values(values: torch.Tensor) -> Range | None:
    """From the least to the greatest of some numbers."""
    if values.numel() == 0 or values.is_complex():
        return None
    return Range(float(values.min()), float(values.max()))


def range_of_result(name: str, given: list[Range | None], kwargs: dict[str, Any]) -> Range | None:
    """The range of what an op gives, from those of its operands; None where there is no rule."""
    if not given or any(one is None for one in given) or kwargs.get("alpha", 1) != 1:
        return None
    known = [one for one in given if one is not None]
    first = known[0]
    if name in ("clone", "detach", "alias", "_to_copy", "lift_fresh", "copy"):
        return Range(first.low, first.high)
    if name in ("floor", "ceil", "trunc", "round"):
        ends = _to_whole(name, first.low), _to_whole(name, first.high)
        if name == "floor" and first.open and first.high == ends[1]:
            return Range(ends[0], ends[1] - 1)
        return Range(*ends)
    if name == "neg":
        return Range(-first.high, -first.low)
    return _range_of_two(name, first, known[1]) if len(known) == 2 else None


def _to_whole(name: str, end: float) -> float:
    if name == "round":
        return float(round(end))
    return float(
        math.floor(end) if name == "floor" else math.ceil(end) if name == "ceil" else math.trunc(end)
    )


def _range_of_two(name: str, one: Range, other: Range) -> Range | None:
    if name == "rsub":
        return _range_of_two("sub", other, one)
    if name == "add":
        return Range(one.low + other.low, one.high + other.high)
    if name == "sub":
        return Range(one.low - other.high, one.high - other.low)
    if name == "div" and other.low == other.high and other.low != 0:
        return _range_of_two("mul", one, Range(1 / other.low, 1 / other.low))
    if name == "mul":
        ends = [a * b for a in (one.low, one.high) for b in (other.low, other.high)]
        return Range(min(ends), max(ends))
    return None


def decide_comparison(name: str, one: Range | None, other: Range | None) -> bool | None:
    """Whether a comparison holds for all numbers of two ranges, or for none; None: it depends."""
    if one is None or other is None or any(map(math.isnan, (one.low, one.high, other.low, other.high))):
        return None
    if name == "gt":
        return decide_comparison("lt", other, one)
    if name == "ge":
        return decide_comparison("le", other, one)
    if name == "ne":
        equal = decide_comparison("eq", one, other)
        return None if equal is None else not equal
    below = one.high < other.low or (one.high == other.low and one.open)
    above = one.low > other.high or (one.low == other.high and other.open)
    if name == "lt":
        return True if below else False if above or one.low == other.high else None
    if name == "le":
        return True if below or one.high == other.low else False if above else None
    if name == "eq":
        same = one.low == one.high == other.low == other.high
        return False if below or above else True if same else None
    return None
