"""What a machine achieves: bus, host memory, optimizer and compute, measured together as a step uses them."""

from dataclasses import dataclass, replace
from statistics import median

import torch

from loadmaster.shards.plan.gpu_rates import (
    Traffic,
    make_recomputed_layer,
    measure_layer_flops_per_s,
    release_gpu_memory,
)
from loadmaster.shards.plan.host_rates import make_pieces, measure_rates_beside

_KERNEL_BYTES = 28  # a parameter: master and two moments read and written, gradient read, copy written
_NUM_PIECES = 4  # stepped in turn, a GB in all: one alone would stay in the cache in part
_NUM_UPDATES = 24
_ALONE_S = 0.5


@dataclass(frozen=True, slots=True)
class OverlapRates:
    """Rates while the optimizer runs on the host, with copies under way: none, up, down or both."""

    up_bytes_per_s: float
    down_bytes_per_s: float
    params_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates of one device and its host. The host's are taken beside copies both ways and units."""

    device: str
    flops_per_s: float
    up_bytes_per_s: float  # both ways at once, without the optimizer
    down_bytes_per_s: float
    host_bytes_per_s: float
    host_params_per_s: float  # fused Adam
    spread: float = 0.0  # (largest - smallest) / median of the optimizer's rate
    compute_s: float | None = None  # of a whole step, where it was measured: FLOPs then do not count
    beside: dict[str, OverlapRates] | None = None  # ["", "up", "down" or "up down"]: the copies under way

    @property
    def most_params_per_s(self) -> float:
        """The optimizer beside units, without copies."""
        return self.host_params_per_s if self.beside is None else self.beside[""].params_per_s


SIMULATED = Rates(
    device="cpu",
    flops_per_s=5e10,
    up_bytes_per_s=5e9,
    down_bytes_per_s=5e9,
    host_bytes_per_s=1e10,
    host_params_per_s=3e8,
)
TYPICAL_GPU = Rates(  # until calibrate() has been asked
    device="cuda",
    flops_per_s=3.9e14,
    up_bytes_per_s=4.8e10,
    down_bytes_per_s=4.8e10,
    host_bytes_per_s=1.55e11,
    host_params_per_s=2.6e9,
    beside={
        "": OverlapRates(0.0, 0.0, 3.8e9),
        "up": OverlapRates(4.2e10, 0.0, 3.5e9),
        "down": OverlapRates(0.0, 4.8e10, 2.9e9),
        "up down": OverlapRates(3.4e10, 4.8e10, 2.6e9),
    },
)

_TYPICAL_PEAK = 9.895e14  # of the GPU of those rates, bf16
_TYPICAL_BUS = 6.3e10
_FP32_SHARE = 0.7  # of the peak that products of fp32 reach; nothing else of a step is far behind them
_TYPICAL_FP32_PEAK = 6.7e13


def typical_rates(
    precision: str = "bf16", *, peak_flops_per_s: float | None = None, bus_bytes_per_s: float | None = None
) -> Rates:
    """Rates of a GPU that nobody has measured; with other peaks than those of the typical one, in proportion.

    The host is a typical one, too: 16 cores, and memory for them.
    """
    narrow = precision != "fp32"
    whole = _TYPICAL_PEAK if narrow else _TYPICAL_FP32_PEAK
    share = TYPICAL_GPU.flops_per_s / _TYPICAL_PEAK if narrow else _FP32_SHARE
    bus = 1.0 if bus_bytes_per_s is None else bus_bytes_per_s / _TYPICAL_BUS
    beside = {
        ways: replace(
            each, up_bytes_per_s=bus * each.up_bytes_per_s, down_bytes_per_s=bus * each.down_bytes_per_s
        )
        for ways, each in (TYPICAL_GPU.beside or {}).items()
    }
    return replace(
        TYPICAL_GPU,
        flops_per_s=share * (whole if peak_flops_per_s is None else peak_flops_per_s),
        up_bytes_per_s=bus * TYPICAL_GPU.up_bytes_per_s,
        down_bytes_per_s=bus * TYPICAL_GPU.down_bytes_per_s,
        beside=beside,
    )


def default_rates(device: torch.device, precision: str = "bf16") -> Rates:
    """Rates until a machine has been measured."""
    return typical_rates(precision) if device.type == "cuda" else SIMULATED


def calibrate(device: str = "cuda:0", *, num_threads: int, num_params: int = 16_000_000) -> Rates:
    """Measure a GPU and its host: a layer alone, copies both ways, and the optimizer beside both."""
    where = torch.device(device)
    layer = make_recomputed_layer(where)
    flops = measure_layer_flops_per_s(where, layer)
    beside, steps = {}, []
    with Traffic(where, box_bytes=8 * num_params) as traffic:
        up, down = traffic.measure_bytes_per_s(_ALONE_S)
        traffic.layer = layer
        pieces = make_pieces(_NUM_PIECES, num_params)
        for ways in (), ("up",), ("down",), ("up", "down"):
            traffic.start(ways)
            steps = measure_rates_beside(
                pieces, traffic.issue, num_threads=num_threads, num_updates=_NUM_UPDATES
            )
            beside[" ".join(ways)] = OverlapRates(*traffic.bytes_per_s(), median(steps))
    del layer, traffic
    release_gpu_memory()
    everything = beside["up down"]
    middle = everything.params_per_s
    most = max(each.params_per_s for each in beside.values())
    beside[""] = OverlapRates(0.0, 0.0, most)
    copied = everything.up_bytes_per_s + everything.down_bytes_per_s
    return Rates(
        device=device,
        flops_per_s=flops,
        up_bytes_per_s=up,
        down_bytes_per_s=down,
        host_bytes_per_s=_KERNEL_BYTES * middle + copied,
        host_params_per_s=middle,
        spread=(max(steps) - min(steps)) / middle,
        beside=beside,
    )
