"""A batch that is too large for its plan: the error names the device, and a nearer plan makes room."""

import torch
from torch import nn

import loadmaster as lm
from loadmaster.core.errors import DeviceMemoryError


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(6)])


rows, more = torch.randn(8, 64), torch.randn(300, 64)
problem = lm.problem(lm.capture(build(), (rows,), optimizer=torch.optim.AdamW), "cpu#0-650KB, cpu#1-650KB")
placement = lm.plan(problem, algorithm="single_device")
for attempt in range(4):
    placed = lm.place(build(), placement)
    try:
        placed(more).mean().backward()
        break
    except DeviceMemoryError as full:
        print(str(full).splitlines()[0])
        nearest = placed.plan_that_fits()  # room for what is known to be missing by now
        moved = int((nearest.plan.device != placement.plan.device).sum())
        print(f"attempt {attempt}: the nearest plan with room moves {moved} of {problem.graph.num_ops} ops")
        placement = nearest
print(placed.peak_bytes)
