"""Real training steps that no single GPU holds: six models on four clusters of unequal devices.

Each case is a captured step (fp32, AdamW) at the smallest batch, a multiple of 8, that does not fit on any
GPU of its cluster. Captures take seconds, so they are kept in `out/gap/`; delete that folder to take them
again.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from loadmaster.cluster.parse import parse_cluster
from loadmaster.core.graph import Graph
from loadmaster.core.io import load, save
from loadmaster.core.plan import plan_of
from loadmaster.core.problem import FREE, Links, Load, Objective, Problem, Split
from loadmaster.core.question import Question
from loadmaster.cost.roofline import roofline_costs
from loadmaster.questions.problem import build_problem
from loadmaster.simulator.events.engine import prepare

CLUSTERS = {
    "A": "RTX4090, RTX3090, cpu-64GB",
    "B": "2xV100-16GB, 2xT4",
    "C": "A100-40GB, 3xT4, cpu-64GB",
    "D": "RTX3090, RTX2080, GTX1080Ti",
}
CACHE = Path(__file__).resolve().parents[1] / "out" / "gap"
_EVERY = 8  # batches are multiples of it
_TOKENS = 128


def distilbert(batch: int = _EVERY) -> dict[str, Any]:
    """DistilBERT with its masked-word head, 128 tokens."""
    import transformers

    return _text(transformers.DistilBertForMaskedLM, transformers.DistilBertConfig(), batch)


def gpt_neox(batch: int = _EVERY) -> dict[str, Any]:
    """GPT-NeoX of 12 layers of 768, 128 tokens."""
    import transformers

    config = transformers.GPTNeoXConfig(
        num_hidden_layers=12, hidden_size=768, num_attention_heads=12, intermediate_size=3072, use_cache=False
    )
    return _text(transformers.GPTNeoXForCausalLM, config, batch)


def convnext_tiny(batch: int = _EVERY) -> dict[str, Any]:
    """ConvNeXt-T, images of 224 x 224."""
    import transformers

    return _image(transformers.ConvNextForImageClassification, transformers.ConvNextConfig(), batch)


def vit_base(batch: int = _EVERY) -> dict[str, Any]:
    """ViT-B/16, images of 224 x 224."""
    import transformers

    return _image(transformers.ViTForImageClassification, transformers.ViTConfig(), batch)


def whisper_small(batch: int = _EVERY) -> dict[str, Any]:
    """Whisper-small: 30 s of sound, 128 tokens."""
    import torch
    import transformers

    config = transformers.WhisperConfig(
        d_model=768,
        encoder_layers=12,
        decoder_layers=12,
        encoder_attention_heads=12,
        decoder_attention_heads=12,
        encoder_ffn_dim=3072,
        decoder_ffn_dim=3072,
        use_cache=False,
    )
    sound = torch.zeros(batch, 80, 3000, device="meta")
    model = _make(transformers.WhisperForConditionalGeneration, config)
    return {"model": model, "kwargs": {"input_features": sound, "labels": _tokens(batch)}}


def t5_small(batch: int = _EVERY) -> dict[str, Any]:
    """T5-small, 128 tokens in and out."""
    import transformers

    config = transformers.T5Config(use_cache=False)
    config.decoder_start_token_id = 0
    model = _make(transformers.T5ForConditionalGeneration, config)
    return {"model": model, "kwargs": {"input_ids": _tokens(batch), "labels": _tokens(batch)}}


MODELS: dict[str, Callable[[int], dict[str, Any]]] = {
    function.__name__: function
    for function in (distilbert, gpt_neox, convnext_tiny, whisper_small, t5_small, vit_base)
}


@dataclass(frozen=True, slots=True)
class Case:
    """A model on a cluster."""

    model: str
    cluster: str

    def __str__(self) -> str:
        """As in the tables."""
        return f"{self.model} {self.cluster}"


def every_case() -> Iterator[Case]:
    """All of them, model by model."""
    return (Case(model, cluster) for model, cluster in itertools.product(MODELS, CLUSTERS))


def step_problem(case: Case) -> tuple[Problem, int]:
    """The step of a case and its batch."""
    known = sorted(CACHE.glob(f"{case.model}-{case.cluster}-*.json"))
    if known:
        found = load(known[0])
        assert isinstance(found, Problem)
        return found, int(known[0].stem.rsplit("-", 1)[1])
    batch = _smallest_too_large(case)
    problem = _capture(case, batch)
    while _fits_on_a_gpu(problem):
        batch += _EVERY
        problem = _capture(case, batch)
    CACHE.mkdir(parents=True, exist_ok=True)
    save(problem, CACHE / f"{case.model}-{case.cluster}-{batch}.json")
    return problem, batch


def _capture(case: Case, batch: int) -> Problem:
    source = CACHE / f"graph-{case.model}-{batch}.json"
    if not source.exists():
        question = Question(
            f"{__file__}:{case.model}", CLUSTERS[case.cluster], batch=batch, optimizer="adamw", target="cuda"
        )
        CACHE.mkdir(parents=True, exist_ok=True)
        save(build_problem(question).graph, source)
    graph = load(source)
    assert isinstance(graph, Graph)
    cluster = parse_cluster(CLUSTERS[case.cluster])
    return Problem(
        graph=graph,
        cluster=cluster,
        costs=roofline_costs(graph, cluster),
        objective=Objective.STEP,
        links=Links.SHARED,
        split=Split.FREE,
        load=Load.SUM,
        pinned=np.full(graph.num_ops, FREE, dtype=np.int32),
    )


def _smallest_too_large(case: Case) -> int:
    """By two small batches: peaks grow in proportion, or a little less."""
    room = max(_gpu_bytes(_capture(case, _EVERY)))
    peaks = [max(_peaks_alone(_capture(case, batch))) for batch in (_EVERY, 2 * _EVERY)]
    each = (peaks[1] - peaks[0]) / _EVERY
    return max(int((room - peaks[0]) / each) // _EVERY * _EVERY + _EVERY, _EVERY)


def _gpus(problem: Problem) -> list[int]:
    cluster = problem.cluster
    return [d for d in range(cluster.num_devices) if not cluster.on_host[cluster.kind[d]]]


def _gpu_bytes(problem: Problem) -> list[int]:
    return [int(problem.cluster.usable_bytes[d]) for d in _gpus(problem)]


def _peaks_alone(problem: Problem) -> list[int]:
    """Bytes that each GPU would need for everything."""
    roomy = replace(
        problem,
        cluster=replace(problem.cluster, memory_bytes=np.full(problem.cluster.num_devices, 2**50)),
    )
    simulator, num = prepare(roomy), problem.graph.num_ops
    return [
        int(simulator.order_and_score(plan_of(np.full(num, d, dtype=np.int32)))[1].peak_bytes[d])
        for d in _gpus(problem)
    ]


def _fits_on_a_gpu(problem: Problem) -> bool:
    rooms = _gpu_bytes(problem)
    return any(peak <= room for peak, room in zip(_peaks_alone(problem), rooms, strict=True))


def _make(kind: Any, config: Any) -> Any:
    import torch

    with torch.device("meta"):
        model = kind(config)
    model.train()
    return model


def _tokens(batch: int) -> Any:
    import torch

    return torch.zeros(batch, _TOKENS, dtype=torch.int64, device="meta")


def _text(kind: Any, config: Any, batch: int) -> dict[str, Any]:
    return {
        "model": _make(kind, config),
        "kwargs": {"input_ids": _tokens(batch), "labels": _tokens(batch)},
    }


def _image(kind: Any, config: Any, batch: int) -> dict[str, Any]:
    import torch

    images = torch.zeros(batch, 3, 224, 224, device="meta")
    labels = torch.zeros(batch, dtype=torch.int64, device="meta")
    return {"model": _make(kind, config), "kwargs": {"pixel_values": images, "labels": labels}}
