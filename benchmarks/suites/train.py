"""Shard-parallel training: how near to the limit, how much of the copying hidden, how far ahead of the peer.

The GPU figures need CUDA and a host with 128 GB; the peer (FSDP2 with CPU offload and fused AdamW, the same
model and loss) and the resident model run in processes of their own. The CPU figure stretches every copy of
the simulated device. TRAIN_PARTS="calibrate,one" runs some parts only; a part that fails is said, and the
others go on.
"""

import os
import traceback
from collections.abc import Callable

from benchmarks import train_parts
from benchmarks.measure import Report

SUITE = train_parts.SUITE


def run(report: Report) -> None:
    """All figures this machine can give."""
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    import torch

    found = train_parts.Found()
    parts: dict[str, Callable[[Report, train_parts.Found], None]] = {"overlap": train_parts.overlap}
    if torch.cuda.is_available():
        parts |= {
            "calibrate": train_parts.calibrated,
            "resident": train_parts.resident,
            "peer": train_parts.peer,
            "one": train_parts.one_trial,
            "four": train_parts.four_trials,
            "lora": _lora,
        }
    else:
        print(f"{SUITE:10} no CUDA device: the GPU figures are left out")
    wanted = os.environ.get("TRAIN_PARTS", "")
    chosen = [name.strip() for name in wanted.split(",")] if wanted else list(parts)
    for name in chosen:
        if name not in parts:
            print(f"{SUITE:10} no part {name!r} here; parts: {', '.join(parts)}")
            continue
        try:
            parts[name](report, found)
        except Exception:
            print(f"{SUITE:10} part {name} failed:\n{traceback.format_exc()}", flush=True)


def _lora(report: Report, found: train_parts.Found) -> None:
    """Adapter trials on one frozen backbone."""
    try:
        from benchmarks.train_lora import measure
    except ImportError:
        print(f"{SUITE:10} no benchmarks/train_lora.py: the adapter figures are left out")
        return
    measure(report)
