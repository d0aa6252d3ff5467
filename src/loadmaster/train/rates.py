"""What a machine achieves: bus, host memory, optimizer and compute, measured together as a step uses them."""

import time
from dataclasses import dataclass

import torch

from loadmaster.train.host_kernels import adam_step, table_of
from loadmaster.train.store import host_memory

_KERNEL_BYTES = 28  # a parameter: master and two moments read and written, gradient read, copy written
_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates of one device and its host. The host's are taken while copies run both ways."""

    device: str
    flops_per_s: float
    up_bytes_per_s: float
    down_bytes_per_s: float
    host_bytes_per_s: float
    host_params_per_s: float  # fused Adam
    spread: float = 0.0  # (largest - smallest) / median of the optimizer's rate
    compute_s: float | None = None  # of a whole step, where it was measured: FLOPs then do not count


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
    up_bytes_per_s=4.7e10,
    down_bytes_per_s=4.7e10,
    host_bytes_per_s=1.3e11,
    host_params_per_s=3.2e9,
)


def calibrate(device: str = "cuda:0", *, num_threads: int, num_params: int = 30_000_000) -> Rates:
    """Measure a GPU and its host: a layer alone, copies both ways, and the optimizer beside the copies."""
    where = torch.device(device)
    flops = _block_flops_per_s(where)
    slab = host_memory(num_params * 16)
    boxes = [host_memory(num_params * 4) for _ in range(2)]
    cudart = torch.cuda.cudart()
    for box in boxes:
        box.zero_()
        cudart.cudaHostRegister(box.data_ptr(), box.numel(), 1)
    try:
        alone = _duplex(where, boxes, lambda: time.sleep(0.5))
        rates: list[float] = []
        both = _duplex(where, boxes, lambda: rates.extend(_adam_rates(slab, num_params, num_threads)))
    finally:
        for box in boxes:
            cudart.cudaHostUnregister(box.data_ptr())
    middle = sorted(rates)[len(rates) // 2]
    return Rates(
        device=device,
        flops_per_s=flops,
        up_bytes_per_s=alone,
        down_bytes_per_s=alone,
        host_bytes_per_s=_KERNEL_BYTES * middle + 2 * both,
        host_params_per_s=middle,
        spread=(max(rates) - min(rates)) / middle,
    )


def _adam_rates(slab: torch.Tensor, num_params: int, num_threads: int) -> list[float]:
    """Parameters per second of the one-pass kernel, several times after a first."""
    wide = slab[: num_params * 12].view(torch.float32).view(3, num_params)
    half = slab[num_params * 12 :].view(torch.bfloat16).view(2, num_params)
    table = table_of(slab, [(0, wide[0], wide[1], wide[2], half[0], half[1])])
    found = []
    for _ in range(8):
        began = time.perf_counter()
        adam_step(slab, table, steps=[5], options=[_ADAM], decoupled=[True], num_threads=num_threads)
        found.append(num_params / (time.perf_counter() - began))
    return found[2:]


def _duplex(where: torch.device, boxes: list[torch.Tensor], meanwhile: object) -> float:
    """Bytes per second each way while something else runs."""
    import threading

    near = [torch.empty(boxes[0].numel(), dtype=torch.uint8, device=where) for _ in range(2)]
    up, down = torch.cuda.Stream(where), torch.cuda.Stream(where)
    stop, moved = threading.Event(), [0]

    def copy() -> None:
        while not stop.is_set():
            with torch.cuda.stream(up):
                near[0].copy_(boxes[0], non_blocking=True)
            with torch.cuda.stream(down):
                boxes[1].copy_(near[1], non_blocking=True)
            up.synchronize()
            down.synchronize()
            moved[0] += boxes[0].numel()

    thread = threading.Thread(target=copy)
    thread.start()
    began = time.perf_counter()
    meanwhile()  # type: ignore[operator]
    taken = time.perf_counter() - began
    stop.set()
    thread.join()
    return moved[0] / taken


def _block_flops_per_s(where: torch.device, *, width: int = 1600, heads: int = 25) -> float:
    """What a transformer layer sustains over 8 x 1024 tokens, recomputed: forward, forward, backward."""
    from torch.nn import functional

    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    weights = [torch.randn(s, device=where, dtype=torch.bfloat16).mul_(0.02).requires_grad_() for s in shapes]
    x = torch.randn(8, 1024, width, device=where, dtype=torch.bfloat16, requires_grad=True)

    def forward() -> torch.Tensor:
        normed = functional.layer_norm(x, (width,))
        q, k, v = functional.linear(normed, weights[0]).view(8, 1024, 3, heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = x + functional.linear(mixed.transpose(1, 2).reshape(x.shape), weights[1])
        inner = functional.gelu(functional.linear(functional.layer_norm(y, (width,)), weights[2]))
        return y + functional.linear(inner, weights[3])

    times = []
    for _ in range(12):
        torch.cuda.synchronize(where)
        began = time.perf_counter()
        with torch.no_grad():
            forward()
        forward().backward(x.detach())
        torch.cuda.synchronize(where)
        times.append(time.perf_counter() - began)
    flops = 8 * 8192 * (12 * width * width + 1024 * width)  # half of the attention is masked
    return flops / sorted(times[4:])[4]
