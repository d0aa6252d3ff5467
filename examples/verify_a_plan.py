"""Check that a plan gives the model's own numbers, before anything is trained on it."""

import torch
from torch import nn

import loadmaster as lm

torch.manual_seed(0)
model = nn.TransformerEncoderLayer(64, 4, dim_feedforward=128, batch_first=True)
rows = torch.randn(4, 16, 64)

problem = lm.problem(lm.capture(model, (rows,), optimizer=torch.optim.AdamW), "cpu#0-16MB, cpu#1-16MB")
placement = lm.plan(problem, algorithm="round_robin")

report = lm.verify(model, placement, (rows,), loss=lambda out: out.square().mean())
print(report)
assert report.ok

placed = lm.place(model, placement, verify="first-step")  # the same check, within the first batch
placed(rows).mean().backward()
