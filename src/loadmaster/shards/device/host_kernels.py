"""Adam and AdamW on the host in one pass over memory: bf16 or fp32 gradient in, bf16 compute copy out.

`torch.optim.AdamW(fused=True)` wants the gradient in the parameter's dtype and writes no second copy, so a
bf16 gradient and a bf16 compute copy would cost two further passes. The arithmetic below is that kernel's,
operation by operation (where it fuses a multiply with an add, so does this), and a test holds the two equal
to the bit.

A whole piece is one call: a table says where in its slab each block of each parameter lies, so the thread
that runs it asks for Python's lock once. Threads take blocks from a common counter, not shares laid down
beforehand: one that the system sets aside for a while delays one block, not its share of the whole. On Linux
they keep off some cores, where the threads that issue a device's work are then never behind them. Compiled
code and its threads belong to numba (`adam_kernel`), which loads when a table is first stepped.
"""

import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch

BLOCK = 1 << 14  # elements a thread takes at a time: its five streams stay inside a core's cache
NO_COPY = -1
_APART = 16  # words of the counter's array: nothing else lies on its cache line
_FEW_CORES = 8  # of which none is left free
_MASK_BYTES = 128  # of a set of cores, as the system takes it


def table_of(
    slab: torch.Tensor,
    rows: Sequence[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]],
) -> np.ndarray[Any, Any]:
    """Blocks of (group, param, exp_avg, exp_avg_sq, grad, compute copy or None), all views of the slab."""
    blocks = []
    for group, param, mean, square, grad, copy in rows:
        narrow = grad.dtype == torch.bfloat16
        starts = [(tensor.data_ptr() - slab.data_ptr()) // 4 for tensor in (param, mean, square)]
        grad_start = (grad.data_ptr() - slab.data_ptr()) // (2 if narrow else 4)
        copy_start = NO_COPY if copy is None else (copy.data_ptr() - slab.data_ptr()) // 2
        for first in range(0, param.numel(), BLOCK):
            size = min(BLOCK, param.numel() - first)
            at = [start + first for start in starts]
            copied = NO_COPY if copy is None else copy_start + first
            blocks.append([group, size, *at, grad_start + first, int(narrow), copied])
    return np.array(blocks, dtype=np.int64).reshape(-1, 8)


class AdamLaunch:
    """One table, to be stepped again and again: all that stays the same from step to step is made once.

    The thread that steps it is one of the workers, and keeps to their cores from then on. So the cores are
    asked for elsewhere: each time it asked itself there would be fewer.
    """

    def __init__(
        self,
        slab: torch.Tensor,
        table: np.ndarray[Any, Any],
        *,
        num_threads: int,
        cores: np.ndarray[Any, Any],
    ) -> None:
        import numba

        from loadmaster.shards.device.adam_kernel import LINE, RUN, step_table

        self._step_table = step_table
        self._numba, self._num_threads = numba, max(1, min(num_threads, numba.config.NUMBA_NUM_THREADS))
        wide, half = slab[: slab.numel() // 4 * 4].view(torch.float32), slab.view(torch.uint16)
        self._given = wide.numpy(), half.numpy(), table
        self._taken = np.zeros(_APART, dtype=np.int64)
        self._runs = np.zeros((self._num_threads, RUN), dtype=np.uint16)
        self._lined = slab.data_ptr() % (2 * LINE) == 0
        self._cores = cores

    def step(
        self,
        *,
        steps: Sequence[int],
        options: Sequence[dict[str, Any]],
        decoupled: Sequence[bool],
        factors: Sequence[float] = (),
    ) -> None:
        """One step of everything in the table, in place; steps, options and the kind of decay by group."""
        scalars = np.array(
            [_compute_scalars(*each) for each in zip(options, steps, decoupled, strict=True)],
            dtype=np.float32,
        ).reshape(-1, 9)
        scale = np.array([*factors, 1.0, 1.0][:2], dtype=np.float32)
        self._taken[0] = 0
        self._numba.set_num_threads(self._num_threads)  # of this thread alone
        self._step_table(*self._given, scalars, scale, self._taken, self._runs, self._lined, self._cores)


def adam_step(slab: torch.Tensor, table: np.ndarray[Any, Any], *, num_threads: int, **how: Any) -> None:
    """One step of a table, by a thread that is afterwards as it was."""
    import numba

    launch = AdamLaunch(slab, table, num_threads=num_threads, cores=current_worker_cores())
    before = numba.get_num_threads()
    try:
        with _restore_affinity():
            launch.step(**how)
    finally:
        numba.set_num_threads(before)


@cache
def compile_kernels() -> None:
    """Compile, which takes seconds on a new machine, before a step is timed; once in a process."""
    slab = torch.zeros(64, dtype=torch.uint8)
    weight = slab[:16].view(torch.float32)
    table = table_of(slab, [(0, weight[:1], weight[1:2], weight[2:3], weight[3:4], None)])
    options = {"lr": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    threads = torch.get_num_threads()
    adam_step(slab, table, steps=[1], options=[options], decoupled=[True], num_threads=1)
    torch.set_num_threads(threads)  # numba's own threads change torch's, and with it how sums are rounded


@contextmanager
def _restore_affinity() -> Iterator[None]:
    """The caller, one of the workers meanwhile, is let go afterwards."""
    allowed = os.sched_getaffinity(0) if sys.platform == "linux" else set()
    try:
        yield
    finally:
        if allowed:
            os.sched_setaffinity(0, allowed)


def current_worker_cores() -> np.ndarray[Any, Any]:
    """The cores for workers of who asks, which must be none of them."""
    return worker_cores(os.sched_getaffinity(0) if sys.platform == "linux" else set())


def worker_cores(allowed: set[int]) -> np.ndarray[Any, Any]:
    """All of these cores but an eighth, as a set of bits; none (any may be taken) where there are few."""
    cores = sorted(allowed)
    if len(cores) < _FEW_CORES or cores[-1] >= 8 * _MASK_BYTES:
        return np.zeros(0, dtype=np.uint8)
    mask = np.zeros(8 * _MASK_BYTES, dtype=np.uint8)
    mask[cores[len(cores) // 8 :]] = 1
    return np.packbits(mask, bitorder="little")


def _compute_scalars(options: dict[str, Any], step: int, decoupled: bool) -> list[float]:
    lr, decay = float(options["lr"]), float(options["weight_decay"])
    beta1, beta2 = (float(beta) for beta in options["betas"])
    return [
        1 - beta1,
        beta2,
        1 - beta2,
        math.sqrt(1 - beta2**step),
        float(options["eps"]),
        (1 - lr * decay) if decoupled else 1.0,
        0.0 if decoupled else decay,
        -(lr / (1 - beta1**step)),
        -1.0 if options.get("maximize") else 1.0,
    ]
