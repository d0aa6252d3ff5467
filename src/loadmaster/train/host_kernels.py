"""Adam and AdamW on the host in one pass over memory: bf16 or fp32 gradient in, bf16 compute copy out.

`torch.optim.AdamW(fused=True)` wants the gradient in the parameter's dtype and writes no second copy, so a
bf16 gradient and a bf16 compute copy would cost two further passes. The arithmetic below is that kernel's,
operation by operation (where it fuses a multiply with an add, so does this), and a test holds the two equal
to the bit.

Compiled code and its threads belong to numba; importing this module compiles nothing.
"""

import math
from functools import cache
from typing import Any

import numpy as np
import torch

BLOCK = 1 << 14  # elements a thread takes at a time: its five streams stay inside a core's cache
_NOTHING = np.zeros(0, dtype=np.uint16)


def adam_step(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    compute: torch.Tensor | None,
    *,
    step: int,
    options: dict[str, Any],
    decoupled: bool,
    num_threads: int,
) -> None:
    """One step of flat fp32 host tensors in place; `compute` gets the parameter rounded to bf16."""
    lr, eps, decay = float(options["lr"]), float(options["eps"]), float(options["weight_decay"])
    beta1, beta2 = (float(beta) for beta in options["betas"])
    scalars = np.array(
        [
            1 - beta1,
            beta2,
            1 - beta2,
            math.sqrt(1 - beta2**step),
            eps,
            (1 - lr * decay) if decoupled else 1.0,
            0.0 if decoupled else decay,
            -(lr / (1 - beta1**step)),
            -1.0 if options.get("maximize") else 1.0,
        ],
        dtype=np.float32,
    )
    narrow = grad.dtype == torch.bfloat16
    kernel = _kernel(narrow=narrow, copies=compute is not None)
    arrays = [tensor.numpy() for tensor in (param, exp_avg, exp_avg_sq)]
    gradient = grad.view(torch.uint16).numpy() if narrow else grad.numpy()
    copy = _NOTHING if compute is None else compute.view(torch.uint16).numpy()
    import numba

    before = numba.get_num_threads()
    numba.set_num_threads(max(1, min(num_threads, numba.config.NUMBA_NUM_THREADS)))
    try:
        kernel(*arrays, gradient, copy, scalars)
    finally:
        numba.set_num_threads(before)


@cache
def _kernel(*, narrow: bool, copies: bool) -> Any:
    """The compiled loop for one kind of gradient, with or without the bf16 copy."""
    from llvmlite import ir
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
    def rounded(number: Any) -> Any:
        bits = as_bits(number)
        up = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        return np.uint16(0x7FC0) if number != number else np.uint16(up)

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def widened(value: Any) -> Any:
        return as_float(np.uint32(value) << np.uint32(16)) if narrow else np.float32(value)

    @njit(parallel=True, nogil=True, fastmath=False, error_model="numpy")  # type: ignore[untyped-decorator]
    def loop(param: Any, exp_avg: Any, exp_avg_sq: Any, grad: Any, compute: Any, scalars: Any) -> None:
        size = param.size
        for block in prange((size + BLOCK - 1) // BLOCK):
            keep1, beta2, keep2, root, eps = scalars[0], scalars[1], scalars[2], scalars[3], scalars[4]
            shrink, decay, move, sign = scalars[5], scalars[6], scalars[7], scalars[8]
            first = block * BLOCK
            count = min(BLOCK, size - first)
            p, m = param[first : first + count], exp_avg[first : first + count]
            v, g = exp_avg_sq[first : first + count], grad[first : first + count]
            c = compute[first : first + count]
            for i in range(count):
                slope = widened(g[i]) * sign
                if decay != np.float32(0):
                    slope = fma(p[i], decay, slope)
                mean = fma(keep1, slope - m[i], m[i])
                square = fma(keep2 * slope, slope, v[i] * beta2)
                value = p[i] * shrink + (move * mean) / (np.float32(math.sqrt(square)) / root + eps)
                m[i] = mean
                v[i] = square
                p[i] = value
                if copies:
                    c[i] = rounded(value)

    return loop
