"""A sweep over LoRA adapters: peft wraps the model as usual, Loadmaster trains the trials under one cap."""

import tempfile
import warnings

import torch

try:
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel
except ImportError:
    print("this example needs peft and transformers: pip install peft transformers")
    raise SystemExit(0) from None

import loadmaster.train as lt

warnings.simplefilter("ignore")  # of the libraries


def build(rank: int) -> torch.nn.Module:
    """The frozen model with an adapter of this rank."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=3, n_embd=48, n_head=4, vocab_size=200, bos_token_id=0, eos_token_id=0)
    lora = LoraConfig(r=rank, target_modules=["c_attn"], lora_dropout=0.0, task_type="CAUSAL_LM")
    return get_peft_model(GPT2LMHeadModel(config), lora)


def data() -> list[dict[str, torch.Tensor]]:
    """Six batches of tokens, each its own labels."""
    rows = torch.randint(0, 200, (6, 4, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": ids, "labels": ids} for ids in rows]


trials = [
    lt.Trial(
        name=f"rank{rank}-lr{rate:g}",
        build=lambda rank=rank: build(rank),
        data=data,
        optim=lambda weights, rate=rate: torch.optim.AdamW(weights, lr=rate),
        epochs=2,
    )
    for rank in (2, 8)
    for rate in (1e-2, 1e-3)
]
with tempfile.TemporaryDirectory() as folder:
    result = lt.Study(trials, dir=folder, devices="cpu", memory_cap="4MiB").fit(progress=False)
    for each in result:
        print(f"{each.name}: {each.status}, loss {each.loss:.4f}")
    print("best:", result.best.name)
