"""What a machine achieves: bus, host memory, optimizer and compute, measured together as a step uses them."""

from dataclasses import dataclass
from statistics import median

import torch

from loadmaster.train.gpu_rates import Traffic, layer_flops_per_s, recomputed_layer, release
from loadmaster.train.host_rates import make_pieces, rates_beside

_KERNEL_BYTES = 28  # a parameter: master and two moments read and written, gradient read, copy written
_NUM_PIECES = 4  # stepped in turn, a GB in all: one alone would stay in the cache in part
_NUM_UPDATES = 24
_ALONE_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates of one device and its host. The host's are taken beside copies both ways and units."""

    device: str
    flops_per_s: float
    up_bytes_per_s: float
    down_bytes_per_s: float
    host_bytes_per_s: float
    host_params_per_s: float  # fused Adam
    spread: float = 0.0  # (largest - smallest) / median of the optimizer's rate
    compute_s: float | None = None  # of a whole step, where it was measured: FLOPs then do not count
    alone_params_per_s: float | None = None  # the optimizer beside units, without copies
    bus_beside: float = 1.0  # share of the bus's rate that copies keep beside the optimizer


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
    host_params_per_s=2.5e9,
    alone_params_per_s=3.8e9,
    bus_beside=0.88,
)


def calibrate(device: str = "cuda:0", *, num_threads: int, num_params: int = 16_000_000) -> Rates:
    """Measure a GPU and its host: a layer alone, copies both ways, and the optimizer beside both."""
    where = torch.device(device)
    layer = recomputed_layer(where)
    flops = layer_flops_per_s(where, layer)
    with Traffic(where, box_bytes=8 * num_params) as traffic:
        alone = traffic.alone_bytes_per_s(_ALONE_S)
        traffic.layer = layer
        pieces = make_pieces(_NUM_PIECES, num_params)
        traffic.start(copying=False)
        quiet = rates_beside(pieces, traffic.issue, num_threads=num_threads, num_updates=_NUM_UPDATES)
        traffic.start()
        rates = rates_beside(pieces, traffic.issue, num_threads=num_threads, num_updates=_NUM_UPDATES)
        moved = traffic.bytes_per_s()
    del layer, traffic
    release()
    middle = median(rates)
    return Rates(
        device=device,
        flops_per_s=flops,
        up_bytes_per_s=alone,
        down_bytes_per_s=alone,
        host_bytes_per_s=_KERNEL_BYTES * middle + moved,
        host_params_per_s=middle,
        spread=(max(rates) - min(rates)) / middle,
        alone_params_per_s=max(median(quiet), middle),
        bus_beside=min(1.0, moved / (2 * alone)),
    )
