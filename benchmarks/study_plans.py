"""`Study.plan()` against what a step then takes, over ten models, on a CPU or a GPU.

    OMP_NUM_THREADS=1 python -m benchmarks.study_plans --out benchmarks/results/study-plans.json
    python -m benchmarks.study_plans --device cuda --out result.json

Each model is a study of one trial under a third of what it needs; the plan is made first, by the study, from
what it knows by then. Measured is the median step of the same study, its first steps left out. On a GPU each
model is also planned with rates that were measured there (`calibrate`).
"""

import argparse
import json
import os
import platform
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

AIM = 0.20


def lm(config: str, model: str, rows: int, length: int, vocab: int, **sizes: Any) -> Callable[[], Any]:
    """A language model of transformers with its own loss."""

    def make() -> tuple[Callable[[], nn.Module], Any, list[Any]]:
        import transformers

        def build() -> nn.Module:
            made = getattr(transformers, config)(vocab_size=vocab, use_cache=False, **sizes)
            return getattr(transformers, model)(made)

        chance = torch.Generator().manual_seed(0)
        batches = [torch.randint(4, vocab, (rows, length), generator=chance) for _ in range(40)]
        return build, None, [{"input_ids": each, "labels": each} for each in batches]

    return make


def images(config: str, model: str, rows: int, size: int, **sizes: Any) -> Callable[[], Any]:
    """A vision model of transformers."""

    def make() -> tuple[Callable[[], nn.Module], Any, list[Any]]:
        import transformers

        def build() -> nn.Module:
            return getattr(transformers, model)(getattr(transformers, config)(num_labels=10, **sizes))

        chance = torch.Generator().manual_seed(0)
        return (
            build,
            None,
            [
                {
                    "pixel_values": torch.randn(rows, 3, size, size, generator=chance),
                    "labels": torch.randint(0, 10, (rows,), generator=chance),
                }
                for _ in range(40)
            ],
        )

    return make


def perceptron(rows: int, width: int, layers: int) -> Callable[[], Any]:
    """nn.Linear layers in a row."""

    def make() -> tuple[Callable[[], nn.Module], Any, list[Any]]:
        def build() -> nn.Module:
            parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
            return nn.Sequential(*parts)

        chance = torch.Generator().manual_seed(0)
        x = [torch.randn(rows, width, generator=chance) for _ in range(40)]
        return build, nn.functional.mse_loss, [(each, each) for each in x]

    return make


def _sizes(gpu: bool) -> dict[str, Callable[[], Any]]:
    """Ten models, of sizes for a GPU or for one thread of a CPU."""
    w, n, rows, length = (1024, 12, 8, 512) if gpu else (128, 4, 2, 64)
    vocab, heads = (32000, 16) if gpu else (2000, 4)
    llama = {
        "hidden_size": w,
        "intermediate_size": 3 * w,
        "num_hidden_layers": n,
        "num_attention_heads": heads,
    }
    encoder = llama | {"intermediate_size": 4 * w}
    t5 = {"d_model": w, "d_ff": 4 * w, "num_layers": n // 2, "num_heads": heads, "d_kv": w // heads}
    bart = {
        "d_model": w,
        "encoder_layers": n // 2,
        "decoder_layers": n // 2,
        "encoder_ffn_dim": 4 * w,
        "decoder_ffn_dim": 4 * w,
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
    }
    size = 224 if gpu else 64
    vit = encoder | {"image_size": size, "patch_size": 16}
    resnet = {} if gpu else {"embedding_size": 16, "hidden_sizes": [32, 64, 96, 128], "depths": [2, 2, 2, 2]}
    moe = llama | {"num_key_value_heads": heads // 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    return {
        "gpt2": lm("GPT2Config", "GPT2LMHeadModel", rows, length, vocab, n_embd=w, n_layer=n, n_head=heads),
        "llama": lm("LlamaConfig", "LlamaForCausalLM", rows, length, vocab, **llama),
        "qwen2": lm(
            "Qwen2Config", "Qwen2ForCausalLM", rows, length, vocab, **llama, num_key_value_heads=heads // 2
        ),
        "opt": lm(
            "OPTConfig",
            "OPTForCausalLM",
            rows,
            length,
            vocab,
            hidden_size=w,
            ffn_dim=4 * w,
            num_hidden_layers=n,
            num_attention_heads=heads,
            word_embed_proj_dim=w,
        ),
        "mixtral": lm("MixtralConfig", "MixtralForCausalLM", rows, length, vocab, **moe),
        "bert": lm("BertConfig", "BertForMaskedLM", rows, length, vocab, **encoder),
        "t5": lm(
            "T5Config", "T5ForConditionalGeneration", rows, length, vocab, **t5, decoder_start_token_id=0
        ),
        "bart": lm("BartConfig", "BartForConditionalGeneration", rows, length, vocab, **bart),
        "vit": images("ViTConfig", "ViTForImageClassification", 4 * rows, size, **vit),
        "resnet": images("ResNetConfig", "ResNetForImageClassification", 4 * rows, size, **resnet),
        "perceptron": perceptron(512 if gpu else 32, 4096 if gpu else 512, 12),
    }


class _Steps:
    """A callback that notes the seconds of every step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step(self, _trial: str, done: Any, *_: Any) -> None:
        """One more."""
        self.seconds.append(done.seconds)


def try_model(name: str, make: Callable[[], Any], device: str, rates: Any) -> dict[str, Any]:
    """Planned, then measured."""
    import loadmaster.train as lt
    from loadmaster.train.shard_engine import ShardEngine

    build, loss, batches = make()
    row: dict[str, Any] = {"model": name}
    trial = lt.Trial(
        name=name,
        build=build,
        loss=loss,
        data=lambda: batches,
        optim=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        precision="bf16" if device == "cuda" else "fp32",
        max_steps=12 if device == "cuda" else 24,
        verify=False,
    )
    steps = _Steps()
    with tempfile.TemporaryDirectory() as folder:

        def study(number: int, cap: int | None, **more: Any) -> Any:
            where = "cuda:0" if device == "cuda" else "cpu"
            return lt.Study(
                trial,
                dir=f"{folder}/{number}",
                devices=where,
                memory_cap=cap,
                launcher="inline",
                checkpoint_every=10**6,
                **more,
            )

        whole = study(0, None).plan().trials[0].peak_bytes
        cap, asked = whole // 3, None
        for share in (3, 2.5, 2, 1.5, 1.2, 1.0):  # where the largest part does not let it be a third
            cap = int(whole / share)
            asked = study(1, cap, callbacks=[steps])
            try:
                if not asked.plan().problems:
                    break
            except Exception as problem:
                row["why"] = str(problem)[:120]
        began = time.perf_counter()
        assert asked is not None
        plan = asked.plan().trials[0]
        row |= {"cap_mb": cap / 1e6, "share": share, "shards": plan.num_shards, "predicted_s": plan.step_s}
        if rates is not None:
            engine = ShardEngine(memory_cap_bytes=cap, rates=rates)
            row["predicted_at_measured_rates_s"] = study(2, cap, engine=engine).plan().trials[0].step_s
        result = asked.fit(progress=False)[name]
        row |= {"status": str(result.status), "error": result.error[-400:]}
    kept = steps.seconds[4:]
    if kept:
        row |= {
            "measured_s": median(kept),
            "least_s": min(kept),
            "most_s": max(kept),
            "first_s": steps.seconds[0],
            "took_s": time.perf_counter() - began,
            "off": plan.step_s / median(kept) - 1,
        }
        if rates is not None:
            row["off_at_measured_rates"] = row["predicted_at_measured_rates_s"] / row["measured_s"] - 1
    return row


def main() -> None:
    """All models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--out", default="")
    asked, begun = parser.parse_args(), time.monotonic()
    warnings.simplefilter("ignore")
    rates = None
    if asked.device == "cuda":
        from loadmaster.shards.plan.rates import calibrate
        from loadmaster.train.execute.runner import default_threads

        rates = calibrate(num_threads=default_threads())
    models = _sizes(asked.device == "cuda")
    rows: list[dict[str, Any]] = []
    for name in asked.models or models:
        if time.monotonic() - begun > asked.seconds:
            break
        try:
            rows.append(try_model(name, models[name], asked.device, rates))
        except Exception as problem:
            rows.append({"model": name, "error": f"{type(problem).__name__}: {problem}"[:600]})
        print(json.dumps(rows[-1]), flush=True)
        within = [abs(row["off"]) <= AIM for row in rows if "off" in row]
        head = {
            "date": str(date.today()),
            "machine": torch.cuda.get_device_name(0) if asked.device == "cuda" else platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "torch": str(torch.__version__),
            "script": "benchmarks/study_plans.py",
            "aim": AIM,
            "within": sum(within),
            "of": len(rows),
        }
        if asked.out:
            Path(asked.out).write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
    print(f"{sum(within)} of {len(rows)} within {AIM:.0%}")


if __name__ == "__main__":
    main()
