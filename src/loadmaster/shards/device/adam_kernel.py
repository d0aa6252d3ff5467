"""The loop over blocks that `host_kernels` runs: Adam's arithmetic, bf16 in and out, threads on their cores.

Importing this module imports numba; the first call compiles, or reads what an earlier process compiled.
"""

import math
import sys
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from loadmaster.simulator.jit import kernel, kernel_part

GROUP, SIZE, PARAM, MEAN, SQUARE, GRAD, NARROW, COPY = range(8)  # columns of a table
LINE = 32  # elements of a compute copy in a cache line
RUN = 16 * LINE  # that are written at once, past the caches


@intrinsic  # type: ignore[untyped-decorator]
def _fma(_typing: Any, a: Any, b: Any, c: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def _as_float(_typing: Any, bits: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic  # type: ignore[untyped-decorator]
def _as_bits(_typing: Any, number: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@kernel_part
def _round_to_bf16(number: Any) -> Any:
    bits = _as_bits(number)
    up = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.uint16(0x7FC0) if number != number else np.uint16(up)


@kernel_part
def _widen_bf16(value: Any) -> Any:
    return _as_float(np.uint32(value) << np.uint32(16))


@kernel_part
def _step_element(p: Any, m: Any, v: Any, i: Any, slope: Any, s: Any) -> Any:
    if s[6] != np.float32(0):
        slope = _fma(p[i], s[6], slope)
    mean = _fma(s[0], slope - m[i], m[i])
    square = _fma(s[2] * slope, slope, v[i] * s[1])
    value = p[i] * s[5] + (s[7] * mean) / (np.float32(math.sqrt(square)) / s[3] + s[4])
    m[i] = mean
    v[i] = square
    p[i] = value
    return value


@intrinsic  # type: ignore[untyped-decorator]
def _take_next(_typing: Any, taken: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.atomic_rmw("add", array.data, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(taken), generate


@intrinsic  # type: ignore[untyped-decorator]
def _put_line(_typing: Any, target: Any, at: Any, source: Any, first: Any) -> Any:
    """A cache line of 16-bit numbers past the caches: it is not read before it is written."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        line = ir.VectorType(ir.IntType(16), LINE).as_pointer()
        where = []
        for kind, array, index in ((signature.args[0], *args[:2]), (signature.args[2], *args[2:])):
            data = context.make_array(kind)(context, builder, array).data
            where.append(builder.bitcast(builder.gep(data, [index]), line))
        stored = builder.store(builder.load(where[1], align=2), where[0], align=2 * LINE)
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _fence_stores(_typing: Any) -> Any:
    """Lines on their way are there for whoever reads next, a bus too."""

    def generate(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@kernel(nogil=True)
def _step_lines(p: Any, m: Any, v: Any, g: Any, half: Any, at: Any, scale: Any, s: Any, run: Any) -> int:
    """As many whole runs as there are; their copies leave by lines. Gives the elements that are done."""
    one, two = scale
    whole = p.shape[0] // RUN * RUN
    for first in range(0, whole, RUN):
        pp, mm, vv, gg = p[first:], m[first:], v[first:], g[first:]
        for i in range(RUN):
            run[i] = _round_to_bf16(_step_element(pp, mm, vv, i, _widen_bf16(gg[i]) * one * two, s))
        for i in range(0, RUN, LINE):
            _put_line(half, at + first + i, run, i)
    return whole


@kernel(nogil=True)
def _step_block(wide: Any, half: Any, row: Any, line: Any, scale: Any, run: Any, lined: Any) -> None:
    size = row[SIZE]
    s = (line[0], line[1], line[2], line[3], line[4], line[5], line[6], line[7])
    one, two = scale[0] * line[8], scale[1]
    p = wide[row[PARAM] : row[PARAM] + size]
    m = wide[row[MEAN] : row[MEAN] + size]
    v = wide[row[SQUARE] : row[SQUARE] + size]
    if row[NARROW] and row[COPY] >= 0:
        g = half[row[GRAD] : row[GRAD] + size]
        c = half[row[COPY] : row[COPY] + size]
        done = 0
        if lined and row[COPY] % LINE == 0:
            done = _step_lines(p, m, v, g, half, row[COPY], (one, two), s, run)
        for i in range(done, size):
            c[i] = _round_to_bf16(_step_element(p, m, v, i, _widen_bf16(g[i]) * one * two, s))
    elif row[NARROW]:
        g = half[row[GRAD] : row[GRAD] + size]
        for i in range(size):
            _step_element(p, m, v, i, _widen_bf16(g[i]) * one * two, s)
    elif row[COPY] >= 0:
        f = wide[row[GRAD] : row[GRAD] + size]
        c = half[row[COPY] : row[COPY] + size]
        for i in range(size):
            c[i] = _round_to_bf16(_step_element(p, m, v, i, f[i] * one * two, s))
    else:
        f = wide[row[GRAD] : row[GRAD] + size]
        for i in range(size):
            _step_element(p, m, v, i, f[i] * one * two, s)


@intrinsic  # type: ignore[untyped-decorator]
def _keep_to(_typing: Any, cores: Any) -> Any:
    """Moves the thread that calls it to a set of cores; does nothing where there is no such thing.

    The system's function is called by its name: compiled code that holds an address is kept by no cache.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if sys.platform != "linux":
            return ir.Constant(ir.IntType(32), 0)
        array = context.make_array(signature.args[0])(context, builder, args[0])
        size = builder.extract_value(array.shape, 0)
        number, word, place = ir.IntType(32), size.type, ir.IntType(8).as_pointer()
        kind = ir.FunctionType(number, [number, word, place])
        move = cgutils.get_or_insert_function(builder.module, kind, "sched_setaffinity")
        return builder.call(move, [ir.Constant(number, 0), size, builder.bitcast(array.data, place)])

    return types.int32(cores), generate


@kernel(parallel=True, nogil=True)
def step_table(
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
    """One step of every block of a table: each thread takes the next one until none is left."""
    for thread in prange(runs.shape[0]):
        if cores.shape[0] > 0:
            _keep_to(cores)
        block = _take_next(taken)
        while block < table.shape[0]:
            row = table[block]
            _step_block(wide, half, row, scalars[row[GROUP]], scale, runs[thread], lined)
            block = _take_next(taken)
        _fence_stores()
