"""Nested values as JSON and back, with what JSON does not know: keys that are numbers, tuples, small tensors.

A schedule's `state_dict` has them: `MultiStepLR` keeps its milestones in a `Counter` by step, and with a
learning rate that is a tensor every schedule keeps tensors. As plain JSON the milestones would come back as
texts, which no step ever equals.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

_KIND, _CONTENT = "__kind__", "content"


def encode_plain(value: Any) -> Any:
    """The value in dicts by text, lists and numbers; what is none of the kinds known here stays as it is."""
    if isinstance(value, torch.Tensor):
        return {_KIND: "tensor", _CONTENT: value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, Mapping):
        if type(value) is dict and all(isinstance(key, str) for key in value) and _KIND not in value:
            return {key: encode_plain(each) for key, each in value.items()}
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {
            _KIND: kind,
            _CONTENT: [[encode_plain(key), encode_plain(each)] for key, each in value.items()],
        }
    if isinstance(value, tuple):
        return {_KIND: "tuple", _CONTENT: [encode_plain(each) for each in value]}
    return [encode_plain(each) for each in value] if isinstance(value, list) else value


def decode_plain(value: Any) -> Any:
    """What `encode_plain` was given."""
    if isinstance(value, list):
        return [decode_plain(each) for each in value]
    if not isinstance(value, dict):
        return value
    content: Any = value.get(_CONTENT)
    match value.get(_KIND):
        case "tensor":
            return torch.tensor(content, dtype=getattr(torch, value["dtype"]))
        case "tuple":
            return tuple(decode_plain(each) for each in content)
        case "dict" | "counter" as kind:
            pairs = {decode_plain(key): decode_plain(each) for key, each in content}
            return Counter(pairs) if kind == "counter" else pairs
    return {key: decode_plain(each) for key, each in value.items()}
