"""What the host's optimizer achieves inside a step: stepped by the updater while another thread issues work.

    this thread   issue() issue() issue() ...                 units and copies, as a runner issues them
    updater       [ piece 0 ][ piece 1 ][ piece 2 ] ...       one-pass Adam over pieces too large for a cache

A rate taken alone, or over one piece again and again, is one that no step sees.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from loadmaster.shards.device.host_kernels import adam_step, table_of
from loadmaster.shards.device.update_thread import HostUpdater
from loadmaster.shards.plan.host_store import allocate_host_memory

_PARAM_BYTES = 16  # master, two moments, gradient and compute copy
_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
_STEP = 5  # of Adam: any, but the first


@dataclass(frozen=True, slots=True, eq=False)
class HostPieces:
    """Some pieces of equal size in host memory, as the kernel steps them."""

    num_params: int
    slabs: tuple[torch.Tensor, ...]
    tables: tuple[np.ndarray[Any, Any], ...]

    def step(self, number: int, *, num_threads: int) -> None:
        """One step of a piece, in turn."""
        at = number % len(self.slabs)
        adam_step(
            self.slabs[at],
            self.tables[at],
            steps=[_STEP],
            options=[_ADAM],
            decoupled=[True],
            num_threads=num_threads,
        )


def make_pieces(num_pieces: int, num_params: int) -> HostPieces:
    """Pieces of zeros with their memory taken."""
    slabs, tables = [], []
    for _ in range(num_pieces):
        slab = allocate_host_memory(num_params * _PARAM_BYTES, for_gpu=True)
        slab.zero_()
        wide = slab[: num_params * 12].view(torch.float32).view(3, num_params)
        half = slab[num_params * 12 :].view(torch.bfloat16).view(2, num_params)
        slabs.append(slab)
        tables.append(table_of(slab, [(0, wide[0], wide[1], wide[2], half[0], half[1])]))
    return HostPieces(num_params, tuple(slabs), tuple(tables))


def measure_rates_beside(
    pieces: HostPieces, issue: Callable[[], None], *, num_threads: int, num_updates: int = 10
) -> list[float]:
    """Parameters per second of each update but the first ones, while this thread issues."""
    warm = 2
    updater = HostUpdater()
    try:
        ends = [
            updater.submit(
                lambda number=number: pieces.step(number, num_threads=num_threads),  # type: ignore[misc]
                landed=None,
                urgency=(number,),
            )
            for number in range(warm + num_updates)
        ]
        while not ends[-1].done():
            issue()
        ends[-1].wait()
    finally:
        updater.close()
    spans = sorted(updater.spans(), key=lambda span: span[2])
    return [pieces.num_params / (end - start) for _, _, start, end in spans[warm:]]
