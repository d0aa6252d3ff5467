"""Adam and AdamW on the host in one pass over memory: bf16 or fp32 gradient in, bf16 compute copy out.

`torch.optim.AdamW(fused=True)` wants the gradient in the parameter's dtype and writes no second copy, so a
bf16 gradient and a bf16 compute copy would cost two further passes. The arithmetic below is that kernel's,
operation by operation (where it fuses a multiply with an add, so does this), and a test holds the two equal
to the bit.

A whole piece is one call: a table says where in its slab each block of each parameter lies, so the thread
that runs it asks for Python's lock once. Threads take blocks from a common counter, not shares laid down
beforehand: one that the system sets aside for a while delays one block, not its share of the whole. On Linux
they keep off some cores, where the threads that issue a device's work are then never behind them. Compiled
code and its threads belong to numba; importing this module compiles nothing.
"""

import ctypes
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
_GROUP, _SIZE, _PARAM, _MEAN, _SQUARE, _GRAD, _NARROW, _COPY = range(8)  # columns of a table
NO_COPY = -1
_APART = 16  # words of the counter's array: nothing else lies on its cache line
_LINE = 32  # elements of a compute copy in a cache line
_RUN = 16 * _LINE  # that are written at once, past the caches
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

        self._numba, self._num_threads = numba, max(1, min(num_threads, numba.config.NUMBA_NUM_THREADS))
        wide, half = slab[: slab.numel() // 4 * 4].view(torch.float32), slab.view(torch.uint16)
        self._given = wide.numpy(), half.numpy(), table
        self._taken = np.zeros(_APART, dtype=np.int64)
        self._runs = np.zeros((self._num_threads, _RUN), dtype=np.uint16)
        self._lined = slab.data_ptr() % (2 * _LINE) == 0
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
        _compile_kernel()(*self._given, scalars, scale, self._taken, self._runs, self._lined, self._cores)


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
    """Compile, which takes seconds, before a step is timed; once in a process."""
    slab = torch.zeros(64, dtype=torch.uint8)
    weight = slab[:16].view(torch.float32)
    table = table_of(slab, [(0, weight[:1], weight[1:2], weight[2:3], weight[3:4], None)])
    options = {"lr": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    adam_step(slab, table, steps=[1], options=[options], decoupled=[True], num_threads=1)


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


def _make_affinity_setter() -> Any:
    """Moves the thread that calls it to a set of cores; does nothing where there is no such thing."""
    if sys.platform != "linux":
        from numba import njit

        return njit(lambda thread, size, mask: 0)
    move = ctypes.CDLL(None).sched_setaffinity
    move.argtypes, move.restype = [ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p], ctypes.c_int
    return move


@cache
def _compile_kernel() -> Any:
    """The compiled loop."""
    from llvmlite import ir  # type: ignore[import-untyped]
    from numba import njit, prange, types
    from numba.extending import intrinsic

    @intrinsic  # type: ignore[untyped-decorator]
    def fma(_typing: Any, a: Any, b: Any, c: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return builder.fma(*args)

        return types.float32(types.float32, types.float32, types.float32), generate

    @intrinsic  # type: ignore[untyped-decorator]
    def as_float(_typing: Any, bits: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], ir.FloatType())

        return types.float32(types.uint32), generate

    @intrinsic  # type: ignore[untyped-decorator]
    def as_bits(_typing: Any, number: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], ir.IntType(32))

        return types.uint32(types.float32), generate

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def round_to_bf16(number: Any) -> Any:
        bits = as_bits(number)
        up = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        return np.uint16(0x7FC0) if number != number else np.uint16(up)

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def widen_bf16(value: Any) -> Any:
        return as_float(np.uint32(value) << np.uint32(16))

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def step_element(p: Any, m: Any, v: Any, i: Any, slope: Any, s: Any) -> Any:
        if s[6] != np.float32(0):
            slope = fma(p[i], s[6], slope)
        mean = fma(s[0], slope - m[i], m[i])
        square = fma(s[2] * slope, slope, v[i] * s[1])
        value = p[i] * s[5] + (s[7] * mean) / (np.float32(math.sqrt(square)) / s[3] + s[4])
        m[i] = mean
        v[i] = square
        p[i] = value
        return value

    @intrinsic  # type: ignore[untyped-decorator]
    def take_next(_typing: Any, taken: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            array = context.make_array(signature.args[0])(context, builder, args[0])
            return builder.atomic_rmw("add", array.data, ir.Constant(ir.IntType(64), 1), "monotonic")

        return types.int64(taken), generate

    @intrinsic  # type: ignore[untyped-decorator]
    def put_line(_typing: Any, target: Any, at: Any, source: Any, first: Any) -> Any:
        """A cache line of 16-bit numbers past the caches: it is not read before it is written."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            line = ir.VectorType(ir.IntType(16), _LINE).as_pointer()
            where = []
            for kind, array, index in ((signature.args[0], *args[:2]), (signature.args[2], *args[2:])):
                data = context.make_array(kind)(context, builder, array).data
                where.append(builder.bitcast(builder.gep(data, [index]), line))
            stored = builder.store(builder.load(where[1], align=2), where[0], align=2 * _LINE)
            stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
            return context.get_dummy_value()

        return types.void(target, types.int64, source, types.int64), generate

    @intrinsic  # type: ignore[untyped-decorator]
    def fence_stores(_typing: Any) -> Any:
        """Lines on their way are there for whoever reads next, a bus too."""

        def generate(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
            builder.fence("seq_cst")
            return context.get_dummy_value()

        return types.void(), generate

    @njit(nogil=True, fastmath=False, error_model="numpy")  # type: ignore[untyped-decorator]
    def step_lines(p: Any, m: Any, v: Any, g: Any, half: Any, at: Any, scale: Any, s: Any, run: Any) -> int:
        """As many whole runs as there are; their copies leave by lines. Gives the elements that are done."""
        one, two = scale
        whole = p.shape[0] // _RUN * _RUN
        for first in range(0, whole, _RUN):
            pp, mm, vv, gg = p[first:], m[first:], v[first:], g[first:]
            for i in range(_RUN):
                run[i] = round_to_bf16(step_element(pp, mm, vv, i, widen_bf16(gg[i]) * one * two, s))
            for i in range(0, _RUN, _LINE):
                put_line(half, at + first + i, run, i)
        return whole

    @njit(nogil=True, fastmath=False, error_model="numpy")  # type: ignore[untyped-decorator]
    def step_block(wide: Any, half: Any, row: Any, line: Any, scale: Any, run: Any, lined: Any) -> None:
        size = row[_SIZE]
        s = (line[0], line[1], line[2], line[3], line[4], line[5], line[6], line[7])
        one, two = scale[0] * line[8], scale[1]
        p = wide[row[_PARAM] : row[_PARAM] + size]
        m = wide[row[_MEAN] : row[_MEAN] + size]
        v = wide[row[_SQUARE] : row[_SQUARE] + size]
        if row[_NARROW] and row[_COPY] >= 0:
            g = half[row[_GRAD] : row[_GRAD] + size]
            c = half[row[_COPY] : row[_COPY] + size]
            done = 0
            if lined and row[_COPY] % _LINE == 0:
                done = step_lines(p, m, v, g, half, row[_COPY], (one, two), s, run)
            for i in range(done, size):
                c[i] = round_to_bf16(step_element(p, m, v, i, widen_bf16(g[i]) * one * two, s))
        elif row[_NARROW]:
            g = half[row[_GRAD] : row[_GRAD] + size]
            for i in range(size):
                step_element(p, m, v, i, widen_bf16(g[i]) * one * two, s)
        elif row[_COPY] >= 0:
            f = wide[row[_GRAD] : row[_GRAD] + size]
            c = half[row[_COPY] : row[_COPY] + size]
            for i in range(size):
                c[i] = round_to_bf16(step_element(p, m, v, i, f[i] * one * two, s))
        else:
            f = wide[row[_GRAD] : row[_GRAD] + size]
            for i in range(size):
                step_element(p, m, v, i, f[i] * one * two, s)

    keep_to = _make_affinity_setter()

    @njit(parallel=True, nogil=True, fastmath=False, error_model="numpy")  # type: ignore[untyped-decorator]
    def loop(
        wide: Any,
        half: Any,
        table: Any,
        scalars: Any,
        scale: Any,
        taken: Any,
        runs: Any,
        lined: Any,
        cores: Any,
    ) -> None:
        for thread in prange(runs.shape[0]):
            if cores.shape[0] > 0:
                keep_to(0, cores.shape[0], cores.ctypes)
            block = take_next(taken)
            while block < table.shape[0]:
                row = table[block]
                step_block(wide, half, row, scalars[row[_GROUP]], scale, runs[thread], lined)
                block = take_next(taken)
            fence_stores()

    return loop
