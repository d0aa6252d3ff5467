"""The measured peak counts the sum of a tied weight's gradients beside both of its terms."""

import gc
import weakref

import pytest

import loadmaster as lm

torch = pytest.importorskip("torch", exc_type=ImportError)
from torch import nn  # noqa: E402

ROWS, WIDTH = 4096, 32
WEIGHT_BYTES = 4 * ROWS * WIDTH


class Tied(nn.Module):
    """An embedding that is also the head, as language models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.table(x), self.table.weight)


def place_tied() -> "lm.Placed":
    given = torch.arange(4).reshape(1, 4)
    return lm.place(Tied(), given, devices="cpu#0-64MB", optimizer="sgd", budget="20x", loss=torch.sum)


def test_the_measured_peak_of_a_tied_weight_is_the_predicted_one() -> None:
    placed = place_tied()
    placed(torch.arange(4).reshape(1, 4)).sum().backward()
    (measured,) = placed.peak_bytes.values()
    assert measured >= 4 * WEIGHT_BYTES, "the weight, two gradients and their sum"
    (predicted,) = placed.placement.peak_bytes.tolist()
    assert measured == pytest.approx(predicted, rel=0.1)


class Averaged(nn.Module):
    """A tied table whose rows are averaged: the gradient of the rows is as large as that of the table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.table(x).mean(1), self.table.weight)


def test_what_a_node_was_given_is_gone_when_what_it_made_is_added_up() -> None:
    given = torch.arange(ROWS).reshape(1, ROWS)
    placed = lm.place(Averaged(), given, devices="cpu#0-64MB", optimizer="sgd", budget="20x", loss=torch.sum)
    placed(given).sum().backward()
    (measured,), (predicted,) = placed.peak_bytes.values(), placed.placement.peak_bytes.tolist()
    assert 4 * WEIGHT_BYTES <= measured <= predicted < 4.5 * WEIGHT_BYTES


def test_counting_sums_holds_no_graph_alive() -> None:
    placed = place_tied()
    out = placed(torch.arange(4).reshape(1, 4))
    held = weakref.ref(out)
    out.sum().backward()
    del out
    gc.collect()
    assert held() is None
    before = placed._engine.accounts.live_bytes[0]
    for _ in range(3):
        placed.zero_grad()
        placed(torch.arange(4).reshape(1, 4)).sum().backward()
    gc.collect()
    assert placed._engine.accounts.live_bytes[0] == before
