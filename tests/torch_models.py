"""The nine models of the capture tests, tiny: a model, its inputs, and what kind of loss it has."""

import functools
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="capture needs the extra [torch]")
from torch import nn  # noqa: E402

from loadmaster.core.graph import Graph  # noqa: E402
from loadmaster.graph.capture import capture  # noqa: E402
from loadmaster.zoo.example import Example, random_tokens  # noqa: E402
from loadmaster.zoo.hf import Size, build_example  # noqa: E402
from loadmaster.zoo.recurrent import Lstm  # noqa: E402
from loadmaster.zoo.vision import ResNet  # noqa: E402

VOCAB, WIDTH, HEADS, LAYERS, BATCH, SEQ = 101, 32, 4, 2, 3, 16
_DECODER = {
    "num_hidden_layers": LAYERS,
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
}
_ENCODER = {
    "num_hidden_layers": LAYERS,
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "intermediate_size": 64,
}
_GPT2 = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": HEADS, "vocab_size": VOCAB, "n_positions": 64}
_T5 = {
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "vocab_size": VOCAB,
    "decoder_start_token_id": 0,
}
_VIT = {**_ENCODER, "image_size": 32, "patch_size": 8, "num_labels": 10}
_BERT = {**_ENCODER, "vocab_size": VOCAB, "max_position_embeddings": 64}
_SIZES = {
    "gpt2": Size("GPT2Config", "GPT2LMHeadModel", "text", _GPT2),
    "llama": Size("LlamaConfig", "LlamaForCausalLM", "text", _DECODER),
    "mixtral": Size("MixtralConfig", "MixtralForCausalLM", "text", {**_DECODER, "num_local_experts": 4}),
    "t5": Size("T5Config", "T5ForConditionalGeneration", "text", _T5),
    "bert": Size("BertConfig", "BertForMaskedLM", "text", _BERT),
    "vit": Size("ViTConfig", "ViTForImageClassification", "image", _VIT),
}


class Branching(nn.Module):
    """Which way it goes depends on the values it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Any) -> Any:
        y = self.first(x)
        if y.sum() > 0:
            return self.last(torch.relu(y))
        return self.last(self.down(torch.tanh(self.up(y))))


def _hf(name: str) -> Callable[[], Example]:
    return lambda: hf_tiny(name, "cpu")


def hf_tiny(name: str, device: str) -> Example:
    """A model of transformers on a device."""
    pytest.importorskip("transformers", reason="hf: models need the extra [hf]")
    return build_example(_SIZES[name], batch=BATCH, seq=SEQ, device=device)


def _resnet() -> Example:
    return Example(ResNet((1, 1), width=8, num_classes=10), (torch.randn(BATCH, 3, 32, 32),))


def _lstm() -> Example:
    return Example(
        Lstm(vocab=VOCAB, width=WIDTH, num_layers=2), (random_tokens(BATCH, SEQ, VOCAB, device="cpu"),)
    )


def _branching() -> Example:
    return Example(Branching(), (torch.randn(64, 16),))


BUILDERS: dict[str, Callable[[], Example]] = {
    **{name: _hf(name) for name in _SIZES},
    "resnet": _resnet,
    "lstm": _lstm,
    "branching": _branching,
}
NAMES = tuple(BUILDERS)


@functools.cache
def example_graph(name: str) -> Graph:
    """What `capture` says of an example, found once in each process."""
    built = example(name)
    return capture(built.model, built.args, built.kwargs)


def example(name: str) -> Example:
    """The same model with the same weights every time, in training mode."""
    torch.manual_seed(7)
    built = BUILDERS[name]()
    built.model.train()
    return built
