"""Adapter trials on one frozen backbone: tokens a second of eight at once against one after another.

The backbone is Llama-like (32 layers of width 4096, 6.7 B parameters in bf16, 12.6 GiB) with adapters of rank
8 on the attention's projections, under 8 GiB of device memory and 512 tokens a trial and step. "One after
another" is the same code with a group of one, which has more of the cap for the backbone. Alone:

    python -m benchmarks.train_lora
"""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from benchmarks.measure import Report

SUITE = "train"
CAP_GIB, RATIO_AIM = 8.0, 4.0
WARM_STEPS, NUM_STEPS = 4, 6


@dataclass(frozen=True)
class Size:
    """How large the backbone and the batch are."""

    num_layers: int = 32
    width: int = 4096
    num_heads: int = 32
    hidden: int = 11008
    vocab: int = 32000
    num_tokens: int = 512
    rank: int = 8
    dtype: torch.dtype = torch.bfloat16


TINY = Size(num_layers=6, width=64, num_heads=4, hidden=128, vocab=96, num_tokens=16, rank=2)


class Layer(nn.Module):
    """Attention and gated MLP; the four projections of attention have adapters."""

    def __init__(self, size: Size, frozen: dict[str, nn.Parameter]) -> None:
        super().__init__()
        self.num_heads = size.num_heads
        for name, weight in frozen.items():
            self.register_parameter(name, weight)
        for name in ("q", "k", "v", "o"):
            self.register_parameter(f"{name}_down", nn.Parameter(torch.randn(size.rank, size.width) / 64))
            self.register_parameter(f"{name}_up", nn.Parameter(torch.randn(size.width, size.rank) / 1024))
        head = size.width // size.num_heads
        turns = torch.outer(torch.arange(size.num_tokens), 1e4 ** -(torch.arange(0, head, 2) / head))
        angles = torch.cat([turns, turns], dim=-1)
        self.register_buffer("cos", angles.cos().to(size.dtype), persistent=False)
        self.register_buffer("sin", angles.sin().to(size.dtype), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Causal, with rotated positions."""
        batch, length, width = x.shape
        inner = F.rms_norm(x, (width,), self.norm1)
        q, k, v = (
            self._adapted(name, inner).view(batch, length, self.num_heads, -1).transpose(1, 2)
            for name in ("q", "k", "v")
        )
        mixed = F.scaled_dot_product_attention(self._turned(q), self._turned(k), v, is_causal=True)
        x = x + self._adapted("o", mixed.transpose(1, 2).reshape(batch, length, width))
        inner = F.rms_norm(x, (width,), self.norm2)
        return x + F.linear(F.silu(F.linear(inner, self.gate)) * F.linear(inner, self.wide), self.narrow)

    def _adapted(self, name: str, x: torch.Tensor) -> torch.Tensor:
        low = F.linear(x, getattr(self, f"{name}_down"))
        return F.linear(x, getattr(self, name)) + F.linear(low, getattr(self, f"{name}_up"))

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat([-second, first], dim=-1) * self.sin


class Embed(nn.Module):
    """Frozen token vectors."""

    def __init__(self, frozen: dict[str, nn.Parameter]) -> None:
        super().__init__()
        self.weight = frozen["embed"]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Look them up."""
        return F.embedding(tokens, self.weight)


class Head(nn.Module):
    """Frozen norm and output."""

    def __init__(self, frozen: dict[str, nn.Parameter]) -> None:
        super().__init__()
        self.norm, self.weight = frozen["norm"], frozen["head"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        return F.linear(F.rms_norm(x, (x.shape[-1],), self.norm), self.weight)


def backbone(size: Size) -> tuple[list[dict[str, nn.Parameter]], dict[str, nn.Parameter]]:
    """Frozen weights in host memory: one layer's worth is drawn, the others are copies of it."""
    made = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=made) / shape[-1] ** 0.5).to(size.dtype)

    def kept(tensor: torch.Tensor) -> nn.Parameter:
        return nn.Parameter(torch.empty_like(tensor).copy_(tensor), requires_grad=False)

    width, hidden = size.width, size.hidden
    first = {name: drawn(width, width) for name in ("q", "k", "v", "o")}
    first |= {"gate": drawn(hidden, width), "wide": drawn(hidden, width), "narrow": drawn(width, hidden)}
    first |= {name: torch.ones(width, dtype=size.dtype) for name in ("norm1", "norm2")}
    layers = [{name: kept(tensor) for name, tensor in first.items()} for _ in range(size.num_layers)]
    ends = {"embed": drawn(size.vocab, width), "head": drawn(size.vocab, width)}
    ends["norm"] = torch.ones(width, dtype=size.dtype)
    return layers, {name: kept(tensor) for name, tensor in ends.items()}


def loss(out: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the next token."""
    return F.cross_entropy(out.view(-1, out.shape[-1]).float(), targets.view(-1))


def trials(size: Size, count: int) -> list[Any]:
    """Trials that differ in seed and learning rate; their models hold the same frozen tensors."""
    import loadmaster.train as lt

    layers, ends = backbone(size)

    def build() -> nn.Module:
        middle = [Layer(size, frozen) for frozen in layers]
        return nn.Sequential(Embed(ends), *middle, Head(ends))

    def data(seed: int) -> Callable[[], list[Any]]:
        made = torch.Generator().manual_seed(seed)
        drawn = torch.randint(size.vocab, (2, 1, size.num_tokens), generator=made)
        return lambda: [(drawn[0], drawn[1])] * 64

    def optim(lr: float) -> Callable[[Any], torch.optim.Optimizer]:
        return lambda parameters: torch.optim.AdamW(parameters, lr=lr, fused=True)

    return [
        lt.Trial(
            name=f"lora{n}", build=build, loss=loss, data=data(n), optim=optim(1e-4 * (n + 1)),
            precision="bf16", seed=n, rng="counter", replay=True, verify=False,
        )
        for n in range(count)
    ]  # fmt: skip


def compared(size: Size, device: Any, count: int) -> dict[str, float]:
    """Seconds and bytes of a step of a group of one, then of all."""
    from loadmaster.shards.model.built_model import build_trial
    from loadmaster.train.backbone.group import Group

    began = time.perf_counter()
    group = Group(device)
    found: dict[str, float] = {}
    waiting = trials(size, count)
    for number, trial in enumerate(waiting):
        if group.join(build_trial(trial, device=device.torch_device)) is None:
            raise RuntimeError(f"{trial.name} does not share the backbone of the others")
        if number == 0:
            found["setup_s"] = time.perf_counter() - began
            found |= {f"one_{key}": value for key, value in _stepped(group).items()}
    found |= {f"all_{key}": value for key, value in _stepped(group).items()}
    tokens = size.num_tokens
    found["one_tokens_per_s"] = tokens / found["one_step_s"]
    found["all_tokens_per_s"] = count * tokens / found["all_step_s"]
    found["ratio"] = found["all_tokens_per_s"] / found["one_tokens_per_s"]
    group.leave()
    return found


def _stepped(group: Any) -> dict[str, float]:
    """Median step of the group as it is."""
    times, up, last = [], 0, 0.0
    for _ in range(WARM_STEPS + NUM_STEPS):
        began = time.perf_counter()
        told = group.step(group.states)
        group.device.mark().wait()
        times.append(time.perf_counter() - began)
        problem = next((each.error for each in told if each.error is not None), None)
        if problem is not None:
            raise problem
        up, last = sum(each.bytes_up for each in told), told[0].loss
    return {
        "step_s": statistics.median(times[WARM_STEPS:]),
        "gb_up": up / 1e9,
        "loss": last,
        "num_places": group.plan.num_places,
        "planned_gib": group.plan.peak_bytes / 2**30,
        "num_recorded": _num_recorded(group),
    }


def _num_recorded(group: Any) -> int:
    """Units on the tapes; says why, where recording failed."""
    tapes = [member.tape for member in group._members.values() if member.tape is not None]
    for why in {tape.why_not for tape in tapes if tape.why_not}:
        print(f"{SUITE:10} not recorded: {why}")
    return sum(tape.num_recorded for tape in tapes)


def measure(report: Report) -> None:
    """Eight trials under the cap on this machine's GPU."""
    from loadmaster.shards.device.cuda_device import CudaDevice

    device = CudaDevice(cap_bytes=int(CAP_GIB * 2**30))
    torch.cuda.reset_peak_memory_stats()  # only now is there something to reset
    try:
        found = compared(Size(), device, 8)
    finally:
        device.close()
    reserved = torch.cuda.max_memory_reserved() / 2**30
    ratio = found["ratio"]
    report.add(SUITE, "lora, 6.7 B frozen bf16, one trial: tokens", found["one_tokens_per_s"], "1/s")
    report.add(SUITE, "... eight trials at once: tokens", found["all_tokens_per_s"], "1/s")
    report.add(
        SUITE, "... faster than one after another", ratio, "x",
        aim=f">= {RATIO_AIM:g}", reached=ratio >= RATIO_AIM,
    )  # fmt: skip
    report.add(
        SUITE, "... reserved on the device", reserved, "GiB",
        aim=f"<= {CAP_GIB:g}", reached=reserved <= CAP_GIB,
    )  # fmt: skip
    for key in ("setup_s", "one_step_s", "all_step_s", "one_gb_up", "all_gb_up", "one_num_places",
                "all_num_places", "all_planned_gib", "all_num_recorded"):  # fmt: skip
        report.add(SUITE, f"... {key}", found[key], key.rsplit("_", 1)[-1])


if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    measure(Report())
