"""Signatures read back: 'aten.mm.default float32[8,16] float32[16,4]/1,16' into an op and its arguments.

    word    = tensor | list | value            tensor = dtype "[" shape "]" [ "/" strides ]
    last    = "@autocast=bfloat16", where the op runs in mixed precision; "@views=2", where as many views are
              made after it
    list    = "(" word { "," word } ")"        value  = None, True, 3, 1e-05, torch.float32, cpu, mean, ...

What capture wrote (`modules/op_signature.py`) can be read, or `parse_signature` answers None:
then the op is timed by the roofline. Knows no torch.
"""

import math
import re
from dataclasses import dataclass

from loadmaster.core.graph import Dtype

_TENSOR = re.compile(r"([a-z][a-z0-9_]*)\[([0-9,]*)\]")
_OP = re.compile(r"(\w+)\.(\w+)\.(\w+)")
_NUMBER = re.compile(r"-?(?:[0-9]+\.?[0-9]*(?:e[+-]?[0-9]+)?|inf)|nan")
_PLAIN = re.compile(r"[\w.:+-]+")
_WORDS: dict[str, bool | None] = {"None": None, "True": True, "False": False}
_NAME = re.compile(r"([A-Za-z_]\w*)=")
AUTOCAST = " @autocast="
_AUTOCAST = re.compile(AUTOCAST + r"(\w+)$")
_VIEWS = re.compile(r" @views=([0-9]{1,4})$")
_CUT = 2000  # capture cuts longer signatures, and what is cut cannot be rebuilt
_SIZES = {dtype.name.lower(): dtype.itemsize for dtype in Dtype} | {
    "uint8": 1,
    "int16": 2,
    "uint64": 8,
    "uint32": 4,
    "complex64": 8,
    "complex128": 16,
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor argument."""

    dtype: str  # as torch spells it
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Of the memory it looks at."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))

    @property
    def num_bytes(self) -> int:
        """Of the memory it looks at."""
        return self.num_elements * _SIZES.get(self.dtype, 1)


@dataclass(frozen=True, slots=True)
class PlainWord:
    """Any other word: a dtype, a layout, a device, a name."""

    text: str


Value = TensorSpec | PlainWord | int | float | bool | None | list["Value"]


@dataclass(frozen=True, slots=True)
class Signature:
    """An op and what it is called with."""

    op: tuple[str, str, str]  # ('aten', 'mm', 'default')
    args: tuple[Value, ...]
    kwargs: dict[str, Value]
    autocast: str = ""  # dtype of mixed precision, '' = none
    num_views: int = 0  # made after it

    @property
    def tensors(self) -> list[TensorSpec]:
        """Every tensor argument, in order."""
        return [word for value in (*self.args, *self.kwargs.values()) for word in _flatten_tensors(value)]


def _flatten_tensors(value: Value) -> list[TensorSpec]:
    if isinstance(value, list):
        return [word for part in value for word in _flatten_tensors(part)]
    return [value] if isinstance(value, TensorSpec) else []


class _Unreadable(Exception):  # noqa: N818
    """The text is not what capture writes."""


def parse_signature(text: str) -> Signature | None:
    """The op and its arguments, or None where they cannot be known."""
    if len(text) >= _CUT:
        return None
    views = _VIEWS.search(text)
    text = text[: views.start()] if views else text
    cast = _AUTOCAST.search(text)
    head, _, rest = (text[: cast.start()] if cast else text).partition(" ")
    match = _OP.fullmatch(head)
    if match is None:
        return None
    args: list[Value] = []
    kwargs: dict[str, Value] = {}
    at = 0
    try:
        while at < len(rest):
            name = _NAME.match(rest, at)
            value, at = _parse_value(rest, name.end() if name else at, 0)
            if name:
                kwargs[name[1]] = value
            else:
                args.append(value)
            if at < len(rest) and rest[at] != " ":
                return None
            at += 1
    except _Unreadable:
        return None
    how = cast[1] if cast else "", int(views[1]) if views else 0
    return Signature((match[1], match[2], match[3]), tuple(args), kwargs, *how)


def _parse_value(text: str, at: int, depth: int) -> tuple[Value, int]:
    """The word that begins at a place, and where it ends."""
    if depth > 4:
        raise _Unreadable
    if text[at : at + 1] == "(":
        return _parse_list(text, at + 1, depth + 1)
    match = _TENSOR.match(text, at)
    if match is not None:
        return _parse_tensor(text, match)
    plain = _PLAIN.match(text, at)
    if plain is None:
        raise _Unreadable
    word = plain[0]
    if word in _WORDS:
        return _WORDS[word], plain.end()
    if _NUMBER.fullmatch(word):
        return _parse_number(word), plain.end()
    return PlainWord(word), plain.end()


def _parse_number(word: str) -> int | float:
    return int(word) if word.lstrip("-").isdigit() else float(word)


def _parse_list(text: str, at: int, depth: int) -> tuple[list[Value], int]:
    values: list[Value] = []
    if text[at : at + 1] == ")":
        return values, at + 1
    while True:
        value, at = _parse_value(text, at, depth)
        values.append(value)
        if text[at : at + 1] == ")":
            return values, at + 1
        if text[at : at + 1] != ",":
            raise _Unreadable
        at += 1


def _parse_tensor(text: str, match: re.Match[str]) -> tuple[TensorSpec, int]:
    shape = tuple(int(size) for size in match[2].split(",")) if match[2] else ()
    at = match.end()
    if text[at : at + 1] != "/":
        return TensorSpec(match[1], shape, _contiguous_strides(shape)), at
    steps = re.compile(",".join([r"([0-9]+)"] * len(shape))).match(text, at + 1)
    if steps is None:
        raise _Unreadable
    return TensorSpec(match[1], shape, tuple(map(int, steps.groups()))), steps.end()


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(max(size, 1) for size in shape[axis + 1 :]) for axis in range(len(shape)))
