"""Flops of the ops that multiply, from shapes alone; the formulas of `torch.utils.flop_counter`.

Every other op is bound by memory traffic and counts none, a product with a vector among them. So a model
read from a file and the same model captured count alike.
"""

import math
from collections.abc import Callable, Sequence

from loadmaster.core.errors import FormatError

Shape = tuple[int, ...]
_MOST = 2**300  # far above any machine, far below what a float cannot hold


def count_or_refuse(rule: Callable[[], int], what: str) -> float:
    """What a rule counts; shapes that the rule cannot make sense of are the file's fault."""
    try:
        flops = rule()
    except (IndexError, KeyError, TypeError, ValueError, AttributeError):
        raise FormatError(
            f"{what} has inputs of shapes that do not fit such an op; the file is broken"
        ) from None
    if not 0 <= flops < _MOST:
        raise FormatError(f"{what} would take {flops.bit_length()} bits of flops; its shapes are absurd")
    return float(flops)


def product(a: Shape, b: Shape, out: Shape, *, transposed: bool = False) -> int:
    """A product of matrices, or of stacks of them; `transposed`: the rows of `a` are summed."""
    if len(a) < 2 or len(b) < 2:
        return 0
    return 2 * math.prod(out) * a[-2 if transposed else -1]


def linear(x: Shape, weight: Shape) -> int:
    """Every row of `x` by a weight [outputs, inputs]."""
    return 2 * math.prod(x) * weight[-2] if len(weight) >= 2 else 0


def convolution(x: Shape, weight: Shape, out: Shape, *, transposed: bool = False) -> int:
    """The whole filter at every point of the output (of the input where it is transposed)."""
    points = (x if transposed else out)[2:]
    return 2 * x[0] * math.prod(points) * math.prod(weight)


def attention(query: Shape, key: Shape, value: Shape) -> int:
    """Both products; a mask spares nothing."""
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def recurrent(x: Shape, weights: Sequence[Shape]) -> int:
    """Every row of every step by every weight of every layer and direction."""
    return 2 * math.prod(x[:-1]) * sum(math.prod(weight) for weight in weights if len(weight) > 1)


def einsum(equation: str, shapes: Sequence[Shape]) -> int:
    """Operands contracted from left to right; a pair that shares no summed label is only multiplied."""
    terms, result = _parse_equation(equation, shapes)
    size: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        for label, length in zip(term, shape, strict=True):
            size[label] = max(size.get(label, 1), length)
    flops, left = 0, set(terms[0])
    for at, term in enumerate(terms[1:], start=1):
        wanted = set(result).union(*terms[at + 1 :])
        right = set(term)
        summed = (left & right) - wanted
        kept = (left | right) & wanted
        if summed:
            flops += 2 * math.prod(size[label] for label in kept | summed)
        left = kept
    return flops


def _parse_equation(equation: str, shapes: Sequence[Shape]) -> tuple[list[list[str]], list[str]]:
    """The labels of every operand and of the result; '...' becomes labels of its own."""
    given, arrow, result = equation.replace(" ", "").partition("->")
    words = given.split(",")
    hidden = [len(shape) - len(word.replace("...", "")) for word, shape in zip(words, shapes, strict=True)]
    terms = [_parse_operand(word, dots) for word, dots in zip(words, hidden, strict=True)]
    most = max([dots for word, dots in zip(words, hidden, strict=True) if "..." in word], default=0)
    if arrow:
        return terms, _parse_operand(result, most)
    letters = sorted(set(given) - {",", "."})
    return terms, _parse_operand("...", most) + [letter for letter in letters if given.count(letter) == 1]


def _parse_operand(word: str, dots: int) -> list[str]:
    before, found, after = word.partition("...")
    return [*before, *(f".{at}" for at in range(dots, 0, -1) if found), *after]
