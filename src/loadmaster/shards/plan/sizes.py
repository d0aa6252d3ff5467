"""Bytes of every parameter wherever they count: on the device, on the way down, beside the master."""

import math
from dataclasses import dataclass

import torch

from loadmaster.shards.device.arena import align_bytes
from loadmaster.shards.model.built_model import BuiltModel
from loadmaster.shards.spec.trial import COMPUTE_DTYPE


@dataclass(frozen=True, slots=True, eq=False)
class Sizes:
    """Bytes of each parameter, wherever they count."""

    numel: tuple[int, ...]
    trained: tuple[bool, ...]
    compute_bytes: tuple[int, ...]  # as units read it
    grad_bytes: tuple[int, ...]  # as it leaves the device
    pinned_bytes: tuple[int, ...]  # master and state
    copy_bytes: tuple[int, ...]  # a compute copy beside the master
    update_bytes: tuple[int, ...]  # master, state and copy, in a ring
    wide_bytes: tuple[int, ...]  # the gradient in the master's dtype, where it comes in another
    start_bytes: tuple[int, ...]  # state the optimizer makes for itself in its first step


def measure_sizes(built: BuiltModel) -> Sizes:
    """What each parameter weighs, with what the optimizer keeps for it."""
    trial, chain = built.trial, built.chain
    dtype = COMPUTE_DTYPE[trial.precision]
    rows = []
    for number, parameter in enumerate(chain.parameters):
        narrow = dtype is not None and built.facts.castable[number] and parameter.dtype == torch.float32
        count, width = parameter.numel(), parameter.element_size()
        compute = count * (2 if narrow else width)
        layout = built.probe.states[number]
        kept = 0
        for key in layout.large if layout is not None else ():
            assert layout is not None
            kept += align_bytes(layout.large[key][1].itemsize * math.prod(layout.shape(key, parameter.shape)))
        grad = 0 if layout is None else (count * width if trial.accumulate > 1 else compute)
        copy = compute if narrow else 0
        master = align_bytes(count * width)
        wide = count * width if 0 < grad < count * width else 0
        start = 0 if built.probe.starts_at_zero else kept
        update = master + kept + align_bytes(copy)
        rows.append((count, layout is not None, compute, grad, master + kept, copy, update, wide, start))
    columns = list(zip(*rows, strict=True))
    return Sizes(*columns)
