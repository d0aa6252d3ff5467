"""Train a model over two unequal devices, neither of which holds it; the loop is the one you had.

The devices are parts of the CPU here, each with a limit of its own. On a machine with two GPUs, leave
`devices` out, or name them: "cuda:0, cuda:1, cpu".
"""

import torch
from torch import nn

import loadmaster as lm


def build() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)]
    return nn.Sequential(*blocks, nn.Linear(256, 10))


def train(model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters())
    chance = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(5):
        rows, labels = torch.randn(64, 256, generator=chance), torch.arange(64) % 10
        loss = nn.functional.cross_entropy(model(rows), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


rows = torch.randn(64, 256)
needs = lm.fit(lm.capture(build(), (rows,)), "cpu#0-1GB", quick=True).devices[0].needs_bytes
devices = f"cpu#0-{int(0.8 * needs)}B, cpu#1-{int(0.5 * needs)}B"
placed = lm.place(build(), (rows,), optimizer=torch.optim.AdamW, devices=devices, budget="50x")

losses = train(placed)
print(placed.explain())
print("losses", losses)
assert losses == train(build()), "the same numbers as without a plan"
