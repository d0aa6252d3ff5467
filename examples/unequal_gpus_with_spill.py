"""Two unequal GPUs that are too small together: weights wait in host memory while their ops run on a GPU.

Planning needs no GPU. On a machine with GPUs, `lm.place(model, batch, spill="host")` plans and runs it, and
the training loop stays as it was (docs/running.md).
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import loadmaster as lm


def build() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=12, n_embd=512, n_head=8, vocab_size=1000, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


ids = torch.randint(0, 1000, (2, 64))
batch = {"input_ids": ids, "labels": ids}
graph = lm.capture(build(), kwargs=batch, optimizer=torch.optim.AdamW, target="cuda")
gpus = "RTX3090-300MB, T4-200MB, cpu-64GB"  # the step needs about 800 MB

for spill in (None, "host"):
    found = lm.plan(graph, gpus, spill=spill, budget="60x")
    used = dict(zip(found.problem.cluster.device_name, (found.peak_bytes // 10**6).tolist(), strict=True))
    print(f"spill={spill}: {1e3 * found.score_s:.1f} ms, {found.algorithm}, peaks in MB: {used}")
