"""What a study of small models takes beside plain loops: three tiny models of transformers in turn.

    OMP_NUM_THREADS=1 python -m benchmarks.small_studies --out benchmarks/results/small-studies.json

Each round trains the same models for the same steps in plain loops and in a study with its defaults (plan,
check of the first step, checkpoints), in turn. The aim is of the whole, planning and saving included.
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

AIM = 2.0
_VOCAB, _ROWS, _LENGTH, _WIDTH, _LAYERS, _HEADS = 1000, 2, 32, 64, 2, 4


def list_models() -> dict[str, Callable[[], nn.Module]]:
    """Builders by name."""
    import transformers as hf

    wide = {"hidden_size": _WIDTH, "num_hidden_layers": _LAYERS, "num_attention_heads": _HEADS}
    wide |= {"intermediate_size": 2 * _WIDTH, "vocab_size": _VOCAB}
    gpt2 = {"n_embd": _WIDTH, "n_layer": _LAYERS, "n_head": _HEADS, "vocab_size": _VOCAB}
    return {
        "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**gpt2, bos_token_id=0, eos_token_id=0)),
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**wide, use_cache=False)),
        "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**wide)),
    }


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """The same for both."""
    return torch.optim.AdamW(parameters, lr=1e-3)


def train_plain(models: dict[str, Callable[[], nn.Module]], data: list[Any]) -> None:
    """A loop that anyone would write."""
    for build in models.values():
        torch.manual_seed(0)
        model: Any = build().train()
        optimizer = make_optimizer(model.parameters())
        for batch in data:
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()


def train_in_study(models: dict[str, Callable[[], nn.Module]], data: list[Any]) -> None:
    """A study with its defaults."""
    import loadmaster.train as lt

    with tempfile.TemporaryDirectory() as folder:
        trials = [
            lt.Trial(name=name, build=build, data=lambda: data, optim=make_optimizer)
            for name, build in models.items()
        ]
        result = lt.Study(trials, dir=folder, devices="cpu").fit(progress=False)
    assert all(each.status == "done" for each in result.trials)


def time_once(work: Callable[[], None]) -> dict[str, float]:
    """Wall clock and processor time."""
    wall, processor = time.perf_counter(), time.process_time()
    work()
    return {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - processor}


def main() -> None:
    """Some rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="of each model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", default="")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    models = list_models()
    made = torch.Generator().manual_seed(0)
    ids = [torch.randint(4, _VOCAB, (_ROWS, _LENGTH), generator=made) for _ in range(asked.steps)]
    data = [{"input_ids": each, "labels": each} for each in ids]
    train_plain(models, data[:2])
    rows = []
    for number in range(asked.rounds):
        plain = time_once(lambda: train_plain(models, data))
        study = time_once(lambda: train_in_study(models, data))
        ratios = {f"ratio_{key[:-2]}": study[key] / plain[key] for key in plain}
        rows.append({"round": number, "plain": plain, "study": study, **ratios})
        print(json.dumps(rows[-1]), flush=True)
    result = {
        "date": str(date.today()),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "script": "benchmarks/small_studies.py",
        "steps": asked.steps,
        "aim": AIM,
        "first_ratio_wall": rows[0]["ratio_wall"],
        "ratio_wall": median(row["ratio_wall"] for row in rows),
        "ratio_cpu": median(row["ratio_cpu"] for row in rows),
        "rounds": rows,
    }
    print(json.dumps({key: value for key, value in result.items() if key != "rounds"}))
    if asked.out:
        Path(asked.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
