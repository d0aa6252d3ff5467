"""`zoo:NAME`: our own models by name, with inputs and a loss."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from loadmaster.core.errors import UnknownNameError
from loadmaster.zoo.example import Example, random_tokens
from loadmaster.zoo.inception import InceptionV3
from loadmaster.zoo.recurrent import Gnmt, Lstm, UnrolledLstm
from loadmaster.zoo.vision import ResNet, Vgg


def _image_example(build: Callable[[], nn.Module], side: int) -> Callable[[int, int, str], Example]:
    def example(batch: int, seq: int, device: str) -> Example:
        with torch.device(device):
            labels = torch.zeros(batch, dtype=torch.int64)
            return Example(build(), (torch.zeros(batch, 3, side, side),), {}, _CrossEntropy(labels))

    return example


def _text_example(
    build: Callable[[], nn.Module], vocab: int, num_inputs: int
) -> Callable[[int, int, str], Example]:
    def example(batch: int, seq: int, device: str) -> Example:
        with torch.device(device):
            model = build()
        args = tuple(random_tokens(batch, seq, vocab, device=device, seed=at) for at in range(num_inputs))
        return Example(
            model, args, {}, _CrossEntropy(random_tokens(batch, seq, vocab, device=device, seed=9))
        )

    return example


class _CrossEntropy:
    """Cross entropy of scores against labels."""

    def __init__(self, labels: torch.Tensor) -> None:
        self.labels = labels

    def __call__(self, scores: Any) -> torch.Tensor:
        """The mean over all labels."""
        return nn.functional.cross_entropy(scores.flatten(0, -2), self.labels.flatten())


MODELS: dict[str, Callable[[int, int, str], Example]] = {
    "resnet50": _image_example(ResNet, 224),
    "inception_v3": _image_example(InceptionV3, 299),
    "vgg16": _image_example(Vgg, 224),
    "lstm": _text_example(Lstm, 10000, 1),
    "lstm_unrolled": _text_example(UnrolledLstm, 10000, 1),
    "gnmt": _text_example(Gnmt, 32000, 2),
}


def zoo_example(name: str, *, batch: int, seq: int, device: str = "meta") -> Example:
    """A model of the zoo with a batch of inputs."""
    if name not in MODELS:
        raise UnknownNameError("model", name, MODELS, see="zoo:NAME")
    return MODELS[name](batch, seq, device)
