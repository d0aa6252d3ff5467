"""The peer of the training figures: PyTorch FSDP2 with CPU offload and fused CPU AdamW, one rank, same model.

python -m benchmarks.offload_peer [STEPS]: prints one JSON line. Also the same model resident, for scale.
"""

import json
import os
import statistics
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.gpt import gpt, gpt_loss, tokens


class _Peer(nn.Module):
    """The model with its loss inside, as FSDP's hooks want it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.embed, *layers, head = model
        self.layers = nn.ModuleList(layers)
        self.head = _HeadLoss(head)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss."""
        x = self.embed(inputs)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x, targets)


class _HeadLoss(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return gpt_loss(self.head(x), targets)


def _steps(model: nn.Module, optimizer: Any, num_steps: int) -> dict[str, float]:
    times, loss = [], torch.zeros(())
    for inputs, targets in tokens(num_steps)():
        began = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(inputs.cuda(), targets.cuda())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_reserved() / 2**30
    return {"step_s": statistics.median(times[2:]), "peak_gib": peak, "loss": float(loss.detach())}


def offloaded(num_steps: int) -> dict[str, float]:
    """FSDP2 with everything on the host between uses."""
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29611", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1)
    model = _Peer(gpt())
    policy = CPUOffloadPolicy(pin_memory=True)
    for module in (model.embed, *model.layers, model.head):
        fully_shard(module, offload_policy=policy)
    fully_shard(model, offload_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    found = _steps(model, optimizer, num_steps)
    dist.destroy_process_group()
    return found


def resident(num_steps: int) -> dict[str, float]:
    """The same model whole on the GPU."""
    model = _Peer(gpt()).cuda()
    return _steps(model, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True), num_steps)


if __name__ == "__main__":
    kind, count = [*sys.argv[1:], "offloaded"][0], int([*sys.argv[2:], "8"][0])
    print(json.dumps({kind: {"offloaded": offloaded, "resident": resident}[kind](count)}))
