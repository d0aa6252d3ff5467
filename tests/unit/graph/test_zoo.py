"""The bundled models have the published numbers of weights and operations."""

import pytest

torch = pytest.importorskip("torch", reason="the zoo needs the extra [torch]")

from loadmaster.core.errors import InputError, UnknownNameError  # noqa: E402
from loadmaster.graph.capture import capture  # noqa: E402
from loadmaster.graph.models import CaptureOptions  # noqa: E402
from loadmaster.graph.source import read_source  # noqa: E402
from loadmaster.zoo.hf import SIZES, hf_example  # noqa: E402
from loadmaster.zoo.named import MODELS, zoo_example  # noqa: E402
from loadmaster.zoo.recurrent import Gnmt  # noqa: E402


def num_weights(model: torch.nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize(
    ("name", "num"), [("resnet50", 25_557_032), ("vgg16", 138_357_544), ("inception_v3", 23_834_568)]
)
def test_vision_models_have_the_published_number_of_weights(name: str, num: int) -> None:
    assert num_weights(zoo_example(name, batch=1, seq=1).model) == num


def test_resnet_50_takes_the_published_operations() -> None:
    e = zoo_example("resnet50", batch=1, seq=1)
    graph = capture(e.model, e.args, train=False)
    assert graph.flops.sum() == pytest.approx(2 * 4.09e9, rel=0.01)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt2", 0.124),
        ("gpt2-xl", 1.558),
        ("bert-base", 0.110),
        ("bert-large", 0.335),
        ("llama-7b", 6.738),
        ("llama-70b", 68.977),
        ("mixtral-8x7b", 46.703),
        ("t5-base", 0.223),
        ("vit-base", 0.0866),
    ],
)
def test_named_models_have_the_published_number_of_weights(name: str, billions: float) -> None:
    pytest.importorskip("transformers", reason="hf: models need the extra [hf]")
    model = hf_example(name, batch=1, seq=4).model
    assert num_weights(model) / 1e9 == pytest.approx(billions, rel=0.01)
    assert all(weight.is_meta for weight in model.parameters())


def test_unknown_models_are_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'gpt2'"):
        read_source("hf:gpt3")
    with pytest.raises(UnknownNameError, match="did you mean 'resnet50'"):
        read_source("zoo:resnet18")
    assert set(SIZES) | set(MODELS)


def test_a_sequence_longer_than_the_model_takes_is_refused() -> None:
    pytest.importorskip("transformers", reason="hf: models need the extra [hf]")
    with pytest.raises(InputError, match="at most 1024 tokens, not 2048"):
        read_source("hf:gpt2", asked=CaptureOptions(seq=2048))


def test_a_source_of_the_zoo_is_captured_at_its_sizes() -> None:
    graph = read_source("zoo:lstm", asked=CaptureOptions(batch=2, seq=3)).graph
    assert graph.name == "lstm, batch 2, seq 3"
    assert graph.capture.startswith("joint")
    assert any(row.startswith("input int64[2,3]") for row in graph.signature_table)


def test_a_translator_is_unrolled() -> None:
    model = Gnmt(vocab=31, width=8, num_layers=3)
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    graph = capture(model, (tokens, tokens.clone()))
    cells = 4 * (2 + 2 + 1 + 2)  # every layer, every step
    assert graph.op_kind.count("lstm_cell") == cells
