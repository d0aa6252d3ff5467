"""A model's own forward against a chain of blocks, on a GPU under the same cap: seconds a step and memory.

    python -m benchmarks.by_call chain-gpt call-gpt chain-hf call-hf [--cap 6.5] [--hf-cap 14]

`gpt` is the benchmark's GPT of 1.64 B weights (its loss never holds all logits), as the chain it is or behind
a forward of its own; `hf` is GPT-2 of transformers in the same size with its own loss, with blocks written by
hand or as it is. 8 x 1024 tokens, bf16 autocast, fused AdamW.
"""

import argparse
import copy
import cProfile
import gc
import io
import json
import pstats
import statistics
import time
from typing import Any

import torch
from torch import nn


class OwnForward(nn.Module):
    """The chain's modules behind a forward that nothing sees into."""

    def __init__(self, chain: nn.Module) -> None:
        super().__init__()
        first, *layers, last = chain.children()
        self.embed, self.layers, self.head = first, nn.ModuleList(layers), last

    def forward(self, tokens: torch.Tensor) -> Any:
        """One after the other."""
        value = self.embed(tokens)
        for layer in self.layers:
            value = layer(value)
        if value.numel() < 0:  # no graph of it can be traced
            print(float(value.sum()))
        return self.head(value)


def make_hf(layers: int) -> nn.Module:
    """GPT-2 of transformers, 1.6 B weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(n_layer=layers, n_embd=1600, n_head=25, use_cache=False, attn_implementation="sdpa")
    )


class First(nn.Module):
    """Embeddings, as blocks written by hand have them."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = model.wte, model.wpe, model.drop

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The residual stream."""
        at = torch.arange(tokens.shape[1], device=tokens.device)
        return self.drop(self.wte(tokens) + self.wpe(at))


class Last(nn.Module):
    """Norm and head."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.norm, self.head = model.transformer.ln_f, model.lm_head

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """The logits."""
        return self.head(self.norm(value))


def hf_loss(out: Any, targets: torch.Tensor) -> torch.Tensor:
    """As transformers takes it."""
    logits = out if isinstance(out, torch.Tensor) else out.logits
    flat = logits.float()[:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(flat, targets[:, 1:].flatten())


def make_trial(kind: str, layers: int, template: nn.Module | None) -> Any:
    import loadmaster.train as lt
    from benchmarks.gpt import gpt, gpt_loss, tokens

    common: dict[str, Any] = {
        "name": kind, "precision": "bf16", "verify": False,
        "optim": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
    }  # fmt: skip
    if kind.endswith("gpt"):
        data = tokens(40, batch=8, length=1024, vocab=50257)
        if kind == "call-gpt":
            return lt.Trial(build=lambda: OwnForward(gpt(layers)), loss=gpt_loss, data=data, **common)
        return lt.Trial(build=lambda: gpt(layers), loss=gpt_loss, data=data, **common)
    build = (lambda: copy.deepcopy(template)) if template is not None else (lambda: make_hf(layers))
    made = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 50257, (8, 1024), generator=made) for _ in range(40)]
    if kind == "chain-hf":
        return lt.Trial(
            build=build, loss=hf_loss, data=lambda: [(each, each) for each in batches],
            blocks=lambda m: [First(m.transformer), *m.transformer.h, Last(m)], **common,
        )  # fmt: skip
    return lt.Trial(
        build=build, data=lambda: [{"input_ids": each, "labels": each} for each in batches], **common
    )


def list_slowest(profile: cProfile.Profile, most: int = 40) -> list[str]:
    """The functions that took longest, with what they called."""
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("cumulative").print_stats(most)
    return [line for line in text.getvalue().splitlines() if line.strip()]


def measure(
    kind: str, cap_gib: float, layers: int, steps: int, template: nn.Module | None, *, profiled: bool
) -> dict[str, Any]:
    """Build, plan, train, and what it took; `profiled`: also where the time up to the first step went."""
    from loadmaster.shards.device.cuda_device import CudaDevice
    from loadmaster.train.execute.runner import open_runner

    row: dict[str, Any] = {"kind": kind, "cap_gib": cap_gib}
    device = CudaDevice(cap_bytes=int(cap_gib * 2**30), trace=False)
    torch.cuda.reset_peak_memory_stats()
    profile = cProfile.Profile()
    try:
        if profiled:
            profile.enable()
        began = time.perf_counter()
        runner = open_runner(make_trial(kind, layers, template), device=device)
        row["build_and_plan_s"] = time.perf_counter() - began
        layout = runner.plan.layout
        row |= {
            "by_call": runner.state.chain.by_call, "shards": layout.num_shards,
            "again": sum(layout.recompute),
            "predicted_s": runner.plan.step_s, "peak_gib": runner.plan.peak_bytes / 2**30,
            "slots": runner.plan.num_slots, "rings": runner.plan.num_rings,
            "placement": {w: runner.plan.placement.count(w) for w in ("pinned", "host", "device")},
        }  # fmt: skip
        began, times, losses, waited = time.perf_counter(), [], [], []
        for done in runner.steps(device, steps):
            times.append(time.perf_counter() - began)
            losses.append(done.loss)
            profile.disable()
            began = time.perf_counter()
        executor = runner._executor
        waited.append(executor.ledger.waited_s if executor else 0)
        row |= {
            "first_s": times[0], "build_to_first_s": row["build_and_plan_s"] + times[0],
            "step_s": statistics.median(times[4:]), "least_s": min(times),
            "losses": losses[:4],
            "reserved_gib": torch.cuda.max_memory_reserved() / 2**30, "waited_s": waited,
            "notes": runner.notes,
            "retries": device.num_retries(), "times": [round(each, 3) for each in times],
        }  # fmt: skip
        if profiled:
            row["slowest"] = list_slowest(profile)
        runner.close()
    except Exception as problem:
        import traceback

        row["error"] = traceback.format_exc()[-1500:]
        del problem
    finally:
        device.close()
        gc.collect()
        torch.cuda.empty_cache()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="+")
    parser.add_argument("--cap", type=float, default=6.5)
    parser.add_argument("--hf-cap", type=float, default=14.0)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--profile", action="store_true", help="what the first step waits for")
    parser.add_argument("--json", default="")
    given = parser.parse_args()
    template, rows = None, []
    for kind in given.kinds:
        if kind.endswith("hf") and template is None:
            began = time.perf_counter()
            template = make_hf(given.layers)
            print("template built in", time.perf_counter() - began, flush=True)
        cap = given.hf_cap if kind.endswith("hf") else given.cap
        near = template if kind.endswith("hf") else None
        rows.append(measure(kind, cap, given.layers, given.steps, near, profiled=given.profile))
        print(json.dumps(rows[-1]), flush=True)
        if given.json:
            with open(given.json, "w") as out:
                json.dump(rows, out, indent=1)


if __name__ == "__main__":
    main()
