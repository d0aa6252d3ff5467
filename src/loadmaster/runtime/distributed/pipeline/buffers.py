"""Buffers: those that a forward reads and writes are copies of its own for each micro-batch.

Between the forward pass of a micro-batch and its backward pass others run, and write. What is saved for the
backward pass must not change by that, and a stage that is computed again must begin with the values that its
first pass began with: moving averages, the vectors of a spectral norm, counters.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn


def copy_buffers(module: nn.Module, names: frozenset[str]) -> dict[str, torch.Tensor]:
    """What some buffers of a module hold now."""
    return {name: module.get_buffer(name).detach().clone() for name in sorted(names)}


@contextmanager
def own_buffers(module: nn.Module, values: Mapping[str, torch.Tensor], *, keep: bool) -> Iterator[None]:
    """A pass that begins with these values; with `keep` the module has what it makes of them."""
    own = {id(module.get_buffer(name)): value.clone() for name, value in values.items()}
    tables = [one._buffers for one in module.modules()] if own else []
    places = [(t, name, one) for t in tables for name, one in t.items() if one is not None and id(one) in own]
    for table, name, one in places:
        table[name] = own[id(one)]
    made = {}
    try:
        yield
        made = {id(one): table[name] for table, name, one in places} if keep else {}
    finally:
        for table, name, one in places:
            table[name] = one
    for _, _, one in places:
        found = made.pop(id(one), None)
        if found is not None and found.shape == one.shape:
            one.data.copy_(found.detach())
        elif found is not None:  # the model has put another in its place
            one.data = found.detach()
