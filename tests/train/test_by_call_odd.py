"""Models by call that do what shards do not expect: the bits of a plain loop, or a sentence that says why."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from loadmaster.core.errors import InputError, RunError
from loadmaster.shards.model.built_model import build_trial
from tests.train.test_by_call import VOCAB, WIDTH, Layer, Net, by_call, check, trial_of


class OfLayers(Net):
    """A net whose layers are of another kind, and know how many steps there were."""

    Kind: Any = Layer

    def __init__(self) -> None:
        super().__init__()
        self.turns = [0]
        self.layers = nn.ModuleList(self.Kind() for _ in range(4))
        for layer in self.layers:
            layer.turns = self.turns

    def run(self, value: torch.Tensor) -> torch.Tensor:
        self.turns[0] += 1
        return super().run(value)


class DrawingFromPython(OfLayers):
    class Kind(Layer):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return super().forward(value * (2.0 if random.random() < 0.3 else 1.0))


class DrawingFromNumpy(OfLayers):
    class Kind(Layer):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return super().forward(value * (2.0 if np.random.rand() < 0.3 else 1.0))


class WritingBuffersLater(OfLayers):
    class Kind(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(WIDTH))

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            if self.turns[0] > 2:
                with torch.no_grad():
                    self.mean.mul_(0.9).add_(value.detach().mean((0, 1)))
            return super().forward(value * (1 + self.mean.clone()))


class CountingLater(OfLayers):
    class Kind(Layer):
        gain = 1.0

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            if self.turns[0] > 2:
                self.gain = self.gain * 1.1
            return super().forward(value * self.gain)


class CountingInAList(OfLayers):
    class Kind(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[int] = []

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            self.seen.append(1)
            return super().forward(value * (1 + 0.1 * len(self.seen)))


class GivenAGrowingList(OfLayers):
    class Kind(Layer):
        def forward(self, values: list[torch.Tensor]) -> torch.Tensor:
            return super().forward(torch.stack(values).sum(0))

    def run(self, value: torch.Tensor) -> torch.Tensor:
        values = [value]
        for layer in self.layers:
            values.append(layer(values))
        return values[-1]


class Box:
    total: Any = 0.0


class WritingIntoAnObject(OfLayers):
    class Kind(Layer):
        def forward(self, value: torch.Tensor, box: Box) -> torch.Tensor:
            box.total = box.total + value.detach()
            return super().forward(value * torch.tanh(box.total))

    def run(self, value: torch.Tensor) -> torch.Tensor:
        box = Box()
        for layer in self.layers:
            value = layer(value, box)
        return value


class Shelf:
    def __init__(self) -> None:
        self.box, self.rows = Box(), {"seen": []}


class WritingBehindAnObject(OfLayers):
    class Kind(Layer):
        def forward(self, value: torch.Tensor, shelf: Shelf) -> torch.Tensor:
            shelf.box.total = shelf.box.total + value.detach()
            shelf.rows["seen"].append(1)
            return super().forward(value * torch.tanh(shelf.box.total) * len(shelf.rows["seen"]))

    def run(self, value: torch.Tensor) -> torch.Tensor:
        shelf = Shelf()
        for layer in self.layers:
            value = layer(value, shelf)
        return value


class KernelsSetAround(OfLayers):
    class Kind(Layer):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            mixed = nn.functional.scaled_dot_product_attention(value[:, None], value[:, None], value[:, None])
            return super().forward(value + mixed[:, 0])

    def run(self, value: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return super().run(value)


class GivingAwayWeights(OfLayers):
    class Kind(Layer):
        def forward(self, value: torch.Tensor) -> Any:
            return super().forward(value), self.up.weight.t()

    def run(self, value: torch.Tensor) -> torch.Tensor:
        weights = []
        for layer in self.layers:
            value, weight = layer(value)
            weights.append(weight)
        for weight in weights:
            value = value + torch.tanh(value @ weight)[..., :WIDTH]
        return value


class ModeSetAround(Net):
    def run(self, value: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            layer.eval()
            value = layer(value)
            layer.train()
        return value


class CheckpointedInside(OfLayers):
    class Kind(Layer):
        def forward(self, value: torch.Tensor) -> Any:
            return checkpoint(super().forward, value, use_reentrant=False)


class CheckpointedInsideReentrant(OfLayers):
    class Kind(Layer):
        def forward(self, value: torch.Tensor) -> Any:
            return checkpoint(super().forward, value, use_reentrant=True)


class PenaltyOfGradients(Net):
    """Takes gradients inside of its forward, and goes backward through them."""

    def run(self, value: torch.Tensor) -> torch.Tensor:
        made = super().run(value)
        (grad,) = torch.autograd.grad(made.pow(2).sum(), value, create_graph=True)
        return made + grad


@pytest.mark.parametrize("again", ["none", "all"])
@pytest.mark.parametrize(
    "build",
    [
        DrawingFromPython,
        DrawingFromNumpy,
        WritingBuffersLater,
        CountingLater,
        CountingInAList,
        GivenAGrowingList,
        WritingIntoAnObject,
        WritingBehindAnObject,
        KernelsSetAround,
        GivingAwayWeights,
        ModeSetAround,
        CheckpointedInside,
        CheckpointedInsideReentrant,
        PenaltyOfGradients,
    ],
)
def test_odd_model_by_call_has_the_bits_of_a_plain_loop(build: Any, again: str) -> None:
    check(trial_of(build), again=again, placement="host")


@pytest.mark.parametrize("again", ["none", "all"])
def test_weight_read_both_cast_and_plain_in_several_calls_sums_its_gradients_as_plain(again: str) -> None:
    class Mixed(OfLayers):
        class Kind(Layer):
            def forward(self, value: torch.Tensor) -> torch.Tensor:
                return super().forward(value) + value.float() * self.up.weight[:7].sum() * 0.01

        def run(self, value: torch.Tensor) -> torch.Tensor:
            return super().run(super().run(super().run(value)))

    check(trial_of(Mixed, precision="bf16"), again=again)


class Plain(nn.Module):
    """A model that takes a tensor, whose graph could be cut into blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.count, self.last = 0, None

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(value)))


class Counting(Plain):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return super().forward(value * (1 + 0.1 * self.count))


class Remembering(Plain):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        out = super().forward(value if self.last is None else value + self.last)
        self.last = out.detach()
        return out


class Seeding(Plain):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return super().forward(nn.functional.dropout(value, 0.5))


class Branching(Plain):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if torch.rand(()) < 0.5 or value.sum() > 3:
            return self.second(value)
        return super().forward(value)


class Skipping(Plain):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return super().forward(value if random.random() < 0.5 else 2 * value)


class Spare(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.ones(3))


class Optional(Plain):
    def forward(self, value: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(value if scale is None else scale * value)


class Forces(Plain):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = value.detach().requires_grad_()
        energy = super().forward(value)
        (force,) = torch.autograd.grad(energy.pow(2).sum(), value, create_graph=True)
        return energy + force


class ReversedBackward(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.second.register_full_backward_hook(lambda module, given, out: (-given[0],))


_CHANGING = [Counting, Remembering, Seeding, Branching, Skipping, Spare, Optional, Forces, ReversedBackward]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("build", _CHANGING)
def test_forward_that_no_one_graph_tells_is_not_cut_into_blocks(build: Any) -> None:
    def rows() -> list[Any]:
        made = torch.Generator().manual_seed(2)
        return [(torch.randn(4, WIDTH, generator=made),) * 2 for _ in range(4)]

    trial = trial_of(build, data=rows, loss=nn.functional.mse_loss)
    torch.manual_seed(trial.seed)
    random.seed(trial.seed)
    model = build()
    optimizer = trial.optim(model.parameters())
    wanted = []
    for value, target in rows():
        loss = nn.functional.mse_loss(model(value), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(loss.item())
    assert by_call(trial)[0] == wanted


class Renormed(Net):
    def __init__(self) -> None:
        super().__init__(tied=False)
        self.embed = nn.Embedding(VOCAB, WIDTH, max_norm=1.0)


class Clamped(OfLayers):
    """A clamp that changes nothing in the first step, so that a comparison of numbers cannot see it."""

    class Kind(Layer):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            self.up.weight.data.clamp_(-10.0, 10.0)
            return super().forward(value)


class ClampedLater(OfLayers):
    class Kind(Layer):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            if self.turns[0] > 2:
                with torch.no_grad():
                    self.up.weight.clamp_(-0.2, 0.2)
            return super().forward(value)


@pytest.mark.parametrize("build", [Renormed, Clamped, ClampedLater])
def test_forward_that_writes_a_weight_is_refused_by_its_name(build: Any) -> None:
    with pytest.raises(InputError, match=r"writes parameter '.*weight'"):
        check(trial_of(build))


def test_gradients_taken_inside_of_a_later_forward_are_refused_with_a_sentence() -> None:
    class Later(OfLayers):
        def run(self, value: torch.Tensor) -> torch.Tensor:
            made = super().run(value)
            if self.turns[0] > 2:
                made = made + torch.autograd.grad(made.pow(2).sum(), value, retain_graph=True)[0]
            return made

    with pytest.raises(RunError, match="inside of a forward"):
        check(trial_of(Later), placement="host")


class KeepingRows(nn.Module):
    """Scales by how often it was called, which it keeps in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.seen.append(1)
        return value + self.inner(value) * (0.5 * len(self.seen))


def test_planning_a_chain_leaves_lists_of_its_modules_alone() -> None:
    built = build_trial(
        trial_of(
            lambda: nn.Sequential(*(KeepingRows() for _ in range(3))),
            data=lambda: [(torch.ones(2, WIDTH), torch.ones(2, WIDTH))],
            loss=nn.functional.mse_loss,
        ),
        device=torch.device("cpu"),
    )
    assert not built.chain.by_call
    assert [each.seen for each in built.chain.model] == [[], [], []]
