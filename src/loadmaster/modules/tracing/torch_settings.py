"""What of torch's own state a forward sets while it runs: seeds, kernels that may be taken, default dtypes.

A graph holds ops alone: it would neither seed a generator again nor run its ops under the settings that the
forward made for them. So a forward that sets any of these is run as Python has it.
"""

import inspect
import types
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch

_FUNCTIONS = (
    "manual_seed", "seed", "set_rng_state", "set_default_dtype", "set_float32_matmul_precision",
    "use_deterministic_algorithms", "set_deterministic_debug_mode", "random.fork_rng", "cuda.manual_seed",
    "cuda.manual_seed_all", "cuda.seed", "cuda.seed_all", "cuda.set_rng_state", "cuda.set_rng_state_all",
    "nn.attention.sdpa_kernel", "backends.set_flags", "backends.ContextProp.__set__",
    "backends.cuda.cuBLASModule.__setattr__", "backends.cuda.enable_flash_sdp",
    "backends.cuda.enable_mem_efficient_sdp", "backends.cuda.enable_math_sdp",
    "backends.cuda.enable_cudnn_sdp", "backends.cuda.sdp_kernel",
)  # fmt: skip
_BACKENDS = ("cudnn", "mkldnn", "mkl", "nnpack", "opt_einsum", "miopen")  # each with its flags
_METHODS = frozenset(("manual_seed", "set_state", "graphsafe_set_state"))  # of generators: compiled code


@cache
def setter_codes() -> dict[types.CodeType, str]:
    """The code of torch's functions that set its state, with their names."""
    found: dict[types.CodeType, str] = {}
    flags = [f"backends.{name}.{one}" for name in _BACKENDS for one in ("flags", "set_flags")]
    for name in (*_FUNCTIONS, *flags):
        made: Any = torch
        for part in name.split("."):
            made = getattr(made, part, None)
        code = getattr(inspect.unwrap(made), "__code__", None) if made is not None else None
        if code is not None:
            found[code] = f"torch.{name}"
    return found


def find_setter(ran: Iterable[types.CodeType], called: Iterable[str]) -> str:
    """The function by which torch's state was set: one of those `called`, or named in code that `ran`."""
    named = [f"{name} of a torch.Generator" for code in ran for name in code.co_names if name in _METHODS]
    return min(called, default="") or min(named, default="")
