"""A GPU kept busy as a step keeps it: a layer recomputed, and copies both ways, all issued by one thread."""

import gc
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch
from torch.nn import functional

from loadmaster.shards.plan.host_store import allocate_host_memory

_BATCH, _LENGTH, _WIDTH, _HEADS = 8, 1024, 1600, 25
_NUM_BOXES = 4
_WAYS = ("up", "down")
_QUEUED = 3  # copies each way, and layers, that are issued ahead
_NAP_S = 5e-4


def make_recomputed_layer(where: torch.device) -> Callable[[], None]:
    """A transformer layer over 8 x 1024 tokens as a step runs it: forward, forward, backward."""
    shapes = [(3 * _WIDTH, _WIDTH), (_WIDTH, _WIDTH), (4 * _WIDTH, _WIDTH), (_WIDTH, 4 * _WIDTH)]
    weights = [torch.randn(s, device=where, dtype=torch.bfloat16).mul_(0.02).requires_grad_() for s in shapes]
    x = torch.randn(_BATCH, _LENGTH, _WIDTH, device=where, dtype=torch.bfloat16, requires_grad=True)

    def forward() -> torch.Tensor:
        normed = functional.layer_norm(x, (_WIDTH,))
        joint = functional.linear(normed, weights[0]).view(_BATCH, _LENGTH, 3, _HEADS, -1)
        q, k, v = joint.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = x + functional.linear(mixed.transpose(1, 2).reshape(x.shape), weights[1])
        inner = functional.gelu(functional.linear(functional.layer_norm(y, (_WIDTH,)), weights[2]))
        return y + functional.linear(inner, weights[3])

    def run() -> None:
        with torch.no_grad():
            forward()
        forward().backward(x.detach())
        for leaf in (x, *weights):
            leaf.grad = None

    return run


def measure_layer_flops_per_s(where: torch.device, layer: Callable[[], None]) -> float:
    """What the layer sustains by itself."""
    times = []
    for _ in range(12):
        torch.cuda.synchronize(where)
        began = time.perf_counter()
        layer()
        torch.cuda.synchronize(where)
        times.append(time.perf_counter() - began)
    # a forward is 2 FLOPs for each weight and token, a step four of it; half of the attention is masked
    flops = 8 * _BATCH * _LENGTH * (12 * _WIDTH * _WIDTH + _LENGTH * _WIDTH)
    return flops / sorted(times[4:])[4]


class Traffic:
    """Copies both ways through pinned memory, and a layer where one is given; `issue` keeps them going."""

    def __init__(self, where: torch.device, *, box_bytes: int) -> None:
        self.layer: Callable[[], None] | None = None
        self._where, self._box_bytes = where, box_bytes
        self._boxes = [allocate_host_memory(box_bytes, for_gpu=True) for _ in range(_NUM_BOXES)]
        self._near = [torch.empty(box_bytes, dtype=torch.uint8, device=where) for _ in range(2)]
        self._lanes = [torch.cuda.Stream(where) for _ in range(2)]
        self._compute = torch.cuda.Stream(where)
        self._waiting: list[list[torch.cuda.Event]] = [[], []]
        self._layers: list[torch.cuda.Event] = []
        self._ways: tuple[str, ...] = _WAYS
        self._turn = 0
        self._moved_bytes = [0, 0]
        self._began_s = 0.0

    def __enter__(self) -> Self:
        """Pin the boxes."""
        for box in self._boxes:
            box.zero_()
            _cudart().cudaHostRegister(box.data_ptr(), box.numel(), 1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let everything arrive, and unpin."""
        torch.cuda.synchronize(self._where)
        for box in self._boxes:
            _cudart().cudaHostUnregister(box.data_ptr())

    def start(self, ways: tuple[str, ...] = _WAYS) -> None:
        """Begin with full queues of copies these ways, what was under way arrived; count again."""
        torch.cuda.synchronize(self._where)
        self._ways = ways
        self.issue()
        self._moved_bytes, self._began_s = [0, 0], time.perf_counter()

    def issue(self) -> None:
        """One more layer, and copies for those that have arrived."""
        for lane in range(2):
            self._refill(lane)
        if self.layer is None:
            time.sleep(_NAP_S)
            return
        with torch.cuda.stream(self._compute):
            self.layer()
        self._layers.append(self._compute.record_event())
        while len(self._layers) > _QUEUED:
            if self._layers[0].query():
                self._layers.pop(0)
                continue
            for lane in range(2):
                self._refill(lane)
            time.sleep(_NAP_S)

    def measure_bytes_per_s(self, seconds: float) -> tuple[float, float]:
        """Bytes per second up and down, both at once, with nothing beside them."""
        self.start()
        while time.perf_counter() - self._began_s < seconds:
            self.issue()
        return self.bytes_per_s()

    def bytes_per_s(self) -> tuple[float, float]:
        """Up and down since the start."""
        taken = time.perf_counter() - self._began_s
        return self._moved_bytes[0] / taken, self._moved_bytes[1] / taken

    def _refill(self, lane: int) -> None:
        stream, waiting = self._lanes[lane], self._waiting[lane]
        while waiting and waiting[0].query():
            waiting.pop(0)
            self._moved_bytes[lane] += self._box_bytes
        while _WAYS[lane] in self._ways and len(waiting) < _QUEUED:
            self._turn += 1
            box = self._boxes[self._turn // 2 % _NUM_BOXES]
            target, source = (self._near[0], box) if lane == 0 else (box, self._near[1])
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
            waiting.append(stream.record_event())


def release_gpu_memory() -> None:
    """Give back what measuring took of a GPU, workspaces of libraries too: a cap may come after."""
    gc.collect()
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()
    torch.cuda.empty_cache()


def _cudart() -> Any:
    return torch.cuda.cudart()
