"""What each input of a graph is filled with, looked up in every call."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from loadmaster.runtime.graph_engine.program import Program
from loadmaster.runtime.transport.copies import move_to_device

Fill = Callable[[list[Any]], Any]


def make_fills(
    model: nn.Module, program: Program, device: Mapping[fx.Node, int], where: Sequence[torch.device]
) -> tuple[Fill, ...]:
    """A value for every input, of the leaves of the arguments."""
    made = []
    for node in program.inputs:
        slot, there = node.meta["slot"], where[device[node]]
        if slot.kind == "weight":
            made.append(_fill_weight(model, slot.name))
        elif slot.kind == "input":
            made.append(_fill_leaf(slot.place, there))
        else:
            made.append(_fill_constant(slot.value, there))
    return tuple(made)


def _fill_weight(model: nn.Module, name: str) -> Fill:
    """Looked up at each call: a weight may be exchanged for another."""
    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)
    table = module._parameters if own in module._parameters else module._buffers
    return lambda _: table[own]


def _fill_leaf(place: int, where: torch.device) -> Fill:
    return lambda leaves: move_to_device(leaves[place], where)


def _fill_constant(value: Any, where: torch.device) -> Fill:
    """One that was written to since is copied to its device again."""
    if not isinstance(value, torch.Tensor) or value.is_inference():
        return lambda _: value if not isinstance(value, torch.Tensor) else move_to_device(value, where)
    known: list[Any] = [value._version, move_to_device(value, where)]

    def fill(_: list[Any]) -> Any:
        if known[0] != value._version:
            known[:] = value._version, move_to_device(value, where)
        return known[1]

    return fill
