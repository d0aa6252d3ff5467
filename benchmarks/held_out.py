"""python -m benchmarks.held_out [--out FILE]: predicted steps of models that set no constant, on a GPU.

Each case is a model, a batch and a precision. The real step is the plain eager loop with AdamW, timed before
and after the prediction, as a host has its moods; the prediction rests on costs measured op by op. The GPU is
the limit where its ops take longer than the host needs to issue them, as predicted. Needs CUDA.
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import loadmaster as lm
from benchmarks.measure import Report, machine
from benchmarks.suites.gpu import real_step
from loadmaster.core.plan import plan_of
from loadmaster.cost.error_bar import step_error
from loadmaster.zoo.hf import SIZES, Size, build_example

_SUITE = "held out"
_GPU_AIM, _HOST_AIM, _HELD_AIM, _WIDTH_AIM = 0.10, 0.15, 0.9, 0.20
_MODELS = {
    "gpt-neox-410m": Size(
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        "text",
        {
            "num_hidden_layers": 24,
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
            "vocab_size": 50304,
        },
    ),
    "distilbert": Size("DistilBertConfig", "DistilBertForMaskedLM", "text", {"vocab_size": 30522}),
    "electra": Size("ElectraConfig", "ElectraForMaskedLM", "text", {"vocab_size": 30522}),
    "qwen2-small": Size(
        "Qwen2Config",
        "Qwen2ForCausalLM",
        "text",
        {
            "num_hidden_layers": 12,
            "hidden_size": 768,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "intermediate_size": 2048,
            "vocab_size": 32000,
        },
    ),
    "phi-small": Size(
        "PhiConfig",
        "PhiForCausalLM",
        "text",
        {
            "num_hidden_layers": 8,
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
            "vocab_size": 32000,
        },
    ),
    "t5-base": SIZES["t5-base"],
    "vit-base": SIZES["vit-base"],
    "bert-large": SIZES["bert-large"],
}
_SHAPES = {"text": ((1, 128), (8, 256)), "image": ((4, 1), (32, 1))}


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A model at a batch, in a precision."""

    name: str
    batch: int
    seq: int
    precision: str

    def __str__(self) -> str:
        """As figures name it."""
        return f"{self.name}, {self.batch} x {self.seq}, {self.precision}"

    def example(self, device: str) -> Any:
        """The model and its inputs."""
        return build_example(_MODELS[self.name], batch=self.batch, seq=self.seq, device=device)


def main() -> None:
    """All cases, then the result file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="")
    given = parser.parse_args()
    report, rows = Report(), []
    with tempfile.TemporaryDirectory() as folder:
        for name, size in _MODELS.items():
            for batch, seq in _SHAPES[size.inputs]:
                for precision in ("fp32", "bf16-mixed"):
                    case = HeldOut(name, batch, seq, precision)
                    rows.append(_compare(report, case, Path(folder) / "costs.sqlite"))
                    _write(report, given.out)
    _summarise(report, rows)
    _write(report, given.out)


def _write(report: Report, out: str) -> None:
    """What there is so far: a run that is cut off has its cases."""
    if out:
        text = json.dumps({"machine": machine(), "figures": report.figures}, indent=1)
        Path(out).write_text(text + "\n", encoding="utf-8")


def _compare(report: Report, case: HeldOut, path: Path) -> tuple[float, float, bool]:
    """The error of a prediction, its error bar, and whether the GPU is the limit."""
    before: Any = real_step(case)  # type: ignore[arg-type]
    made = case.example("meta")
    autocast = torch.bfloat16 if case.precision == "bf16-mixed" else None
    graph = lm.capture(made.model, made.args, made.kwargs, loss=made.loss, target="cuda", autocast=autocast)
    kind = "H200" if "H200" in torch.cuda.get_device_name() else torch.cuda.get_device_name().split()[-1]
    problem = lm.problem(graph, kind, costs="measured", measure_budget=60.0, database=path)
    order = np.arange(graph.num_ops, dtype=np.int32)
    plan = plan_of(np.zeros_like(order), order)
    predicted_s = lm.simulate(problem, plan).step_s
    after: Any = real_step(case)  # type: ignore[arg-type]
    real_s = statistics.mean((before["step_s"], after["step_s"]))
    error, bar = predicted_s / real_s - 1, step_error(problem, plan) or 0.0
    on_gpu = float(problem.costs.compute_s[:, 0].sum()) > float(problem.costs.issue_s.sum())
    aim = _GPU_AIM if on_gpu else _HOST_AIM
    report.add(_SUITE, f"{case}: step measured", 1e3 * real_s, "ms")
    where = "GPU" if on_gpu else "host"
    name = f"{case}: error, the {where} is the limit"
    report.add(_SUITE, name, error, "ratio", aim=f"within {aim:.2f}", reached=abs(error) <= aim)
    report.add(_SUITE, f"{case}: error bar", bar, "ratio")
    return error, bar, on_gpu


def _summarise(report: Report, rows: list[tuple[float, float, bool]]) -> None:
    held = statistics.mean(float(abs(error) <= bar) for error, bar, _ in rows)
    width = statistics.median(bar for _, bar, _ in rows)
    reached = held >= _HELD_AIM
    name = f"cases within their error bar, of {len(rows)}"
    report.add(_SUITE, name, held, "ratio", aim=">= 0.9", reached=reached)
    report.add(_SUITE, "median half-width", width, "ratio", aim="<= 0.20", reached=width <= _WIDTH_AIM)
    for where, on_gpu, aim in (("GPU", True, _GPU_AIM), ("host", False, _HOST_AIM)):
        errors = [abs(error) for error, _, at in rows if at == on_gpu]
        if errors:
            share = statistics.mean(float(error <= aim) for error in errors)
            report.add(
                _SUITE, f"within {aim:.2f} where the {where} is the limit, of {len(errors)}", share, "ratio"
            )


if __name__ == "__main__":
    main()
