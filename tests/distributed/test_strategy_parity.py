"""Strategies on real processes: the numbers of plain training, and the bytes that theory says."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from loadmaster.core.strategy import Mode, Sync
from loadmaster.zoo.example import Example
from tests.distributed.pipelines import largest_difference
from tests.distributed.run_models import Pictures, Rows, adamw, square
from tests.distributed.strategies import (
    Found,
    Part,
    Processes,
    joined_state,
    strategy_answer,
    total_sent,
    train_whole,
)

STEPS, CLIP, CLOSE = 5, 0.05, 1e-5
AR, PS = Sync.ALLREDUCE, Sync.PS
DUP, PLACE = Mode.DUPLICATE, Mode.PLACE
LAYERS = ("layers.0.weight", "layers.1.weight", "layers.1.bias", "head.weight", "head.bias")

TWO: dict[str, list[Part]] = {  # of a batch of 8
    "allreduce even": [Part((0, 1), (4, 4), sync=AR)],
    "allreduce uneven": [Part((0, 1), (5, 3), sync=AR)],
    "ps uneven": [Part((0, 1), (5, 3), sync=PS, server=1)],
    "factors uneven": [Part((0, 1), (5, 3), sync=AR, sfb=LAYERS)],
    "duplicate": [Part((0, 1), (8, 8), DUP)],
    "place after place": [Part((0,), (8,), PLACE), Part((1,), (8,), PLACE)],
    "replicate, then place": [Part((0, 1), (5, 3), sync=AR), Part((1,), (8,), PLACE)],
    "other rows": [Part((0, 1), (5, 3), sync=AR), Part((1, 0), (2, 6), sync=PS, server=0)],
    "duplicate, then replicate": [Part((0, 1), (8, 8), DUP), Part((0, 1), (2, 6), sync=AR)],
    "replicate, then duplicate": [Part((0, 1), (7, 1), sync=AR), Part((0, 1), (8, 8), DUP)],
}
QUICK = ("other rows", "duplicate, then replicate")  # of those without a test of their own below
FOUR: dict[str, list[Part]] = {  # of a batch of 10
    "allreduce": [Part((0, 1, 2, 3), (5, 3, 1, 1), sync=AR)],
    "even shares of ten": [Part((0, 1, 2, 3), (3, 3, 2, 2), sync=AR)],
    "ps": [Part((0, 1, 2, 3), (1, 2, 3, 4), sync=PS, server=2)],
    "factors": [Part((0, 1, 2, 3), (5, 3, 1, 1), sync=AR, sfb=LAYERS)],
    "duplicate": [Part((0, 1, 2, 3), (10, 10, 10, 10), DUP)],
    "other ranks and rows": [
        Part((0, 1, 2, 3), (5, 3, 1, 1), sync=AR, sfb=LAYERS[:1]),
        Part((3, 2, 1, 0), (1, 2, 3, 4), sync=AR),
    ],
    "two and two": [Part((0, 1), (7, 3), sync=AR), Part((2, 3), (4, 6), sync=PS, server=3)],
    "overlapping pairs": [Part((0, 1), (7, 3), sync=AR), Part((1, 2, 3), (4, 3, 3), sync=AR)],
    "one, three, all the same": [
        Part((0,), (10,), PLACE),
        Part((1, 2, 3), (2, 3, 5), sync=AR),
        Part((0, 3), (10, 10), DUP),
        Part((0, 1, 2, 3), (4, 3, 2, 1), sync=AR),
    ],
    "duplicates of two kinds": [
        Part((0, 1), (10, 10), DUP),
        Part((1, 2), (10, 10), DUP),
        Part((3,), (10,), PLACE),
    ],
    "from all to one and back": [
        Part((0, 1, 2, 3), (4, 3, 2, 1), sync=PS, server=0),
        Part((2,), (10,), PLACE),
        Part((0, 1, 2, 3), (1, 2, 3, 4), sync=AR),
    ],
}


@pytest.fixture(scope="module")
def pair() -> Iterator[Processes]:
    found = Processes(2)
    yield found
    found.close()


@pytest.fixture(scope="module")
def four() -> Iterator[Processes]:
    found = Processes(4)
    yield found
    found.close()


def _rows_example(batch: int) -> Example:
    torch.manual_seed(2)
    return Example(Rows(), (torch.randn(batch, 16),), loss=square)


def _compare(processes: Processes, parts: list[Part], batch: int, world: int, **extras: Any) -> list[Found]:
    example = _rows_example(batch)
    answer = strategy_answer(example, parts, batch=batch, world=world)
    batches = [torch.randn(batch, 16) for _ in range(STEPS)]
    found = processes.run(answer, example.model, batches, loss=square, optimizer=adamw, clip=CLIP, **extras)
    assert not [one for one in found if isinstance(one, str)], found
    plain = train_whole(example.model, batches, adamw, loss=square, clip=CLIP)
    assert found[0].losses == pytest.approx(plain.losses, rel=CLOSE)
    assert largest_difference(joined_state(found), plain.state) < CLOSE
    assert [one.norm for one in found] == pytest.approx([plain.norm] * world, rel=CLOSE)
    return found


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TWO],
)
def test_two_processes_train_as_one_does(pair: Processes, name: str) -> None:
    _compare(pair, TWO[name], 8, 2, compare_every=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_four_processes_train_as_one_does(four: Processes, name: str) -> None:
    _compare(four, FOUR[name], 10, 4, bucket_bytes=2000)


def test_all_that_is_sent_is_what_theory_says(pair: Processes) -> None:
    batch, width, rows = 8, 16, 5
    weights = 4 * sum(one.numel() for one in Rows().parameters())
    sent = total_sent(_compare(pair, TWO["allreduce uneven"], batch, 2, bucket_bytes=1000))
    assert sent == {"allreduce": 2 * weights}  # 2 (M - 1) n
    sent = total_sent(_compare(pair, TWO["ps uneven"], batch, 2))
    assert sent == {"ps": 2 * weights}  # gradients there, weights back
    made = {name: one.nbytes for name, one in Rows().named_parameters() if name in LAYERS}
    factors = 4 * batch * rows * (2 * (width + width) + (width + 3))  # rows of X and dY of three layers
    sent = total_sent(_compare(pair, TWO["factors uneven"], batch, 2))
    assert sent == {"allreduce": 2 * (weights - sum(made.values())), "sfb": factors}
    assert total_sent(_compare(pair, TWO["duplicate"], batch, 2)) == {}


def test_an_accumulated_batch_meets_once(pair: Processes) -> None:
    example = _rows_example(8)
    answer = strategy_answer(example, [Part((0, 1), (5, 3), sync=AR, sfb=LAYERS)], batch=8)
    batches = [torch.randn(8, 16) for _ in range(4)]
    found = pair.run(
        answer, example.model, batches, loss=square, optimizer=adamw, update=[False, True, False, True]
    )
    own = copy.deepcopy(example.model)
    optimizer = adamw(list(own.parameters()))
    for at, batch in enumerate(batches):
        square(own(batch)).backward()  # type: ignore[no-untyped-call]
        if at % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert largest_difference(joined_state(found), own.state_dict()) < CLOSE


@pytest.mark.slow
def test_factors_of_convolutions(pair: Processes) -> None:
    torch.manual_seed(3)
    example = Example(Pictures(), (torch.randn(6, 3, 8, 8),), loss=square)
    names = ("first.weight", "second.weight", "second.bias")
    for parts in (
        [Part((0, 1), (4, 2), sync=AR, sfb=names)],
        [Part((0, 1), (4, 2), sync=AR, sfb=names[:1]), Part((0,), (6,), PLACE)],
    ):
        answer = strategy_answer(example, parts, batch=6)
        batches = [torch.randn(6, 3, 8, 8) for _ in range(3)]
        found = pair.run(answer, example.model, batches, loss=square, optimizer=adamw)
        plain = train_whole(example.model, batches, adamw, loss=square)
        assert largest_difference(joined_state(found), plain.state) < CLOSE
        assert total_sent(found)["sfb"] > 0


def test_a_last_batch_with_fewer_rows_keeps_the_shares(pair: Processes) -> None:
    example = _rows_example(8)
    answer = strategy_answer(example, TWO["other rows"], batch=8)
    batches = [torch.randn(8, 16), torch.randn(5, 16)]
    found = pair.run(answer, example.model, batches, loss=square, optimizer=adamw)
    plain = train_whole(example.model, batches, adamw, loss=square)
    assert largest_difference(joined_state(found), plain.state) < CLOSE
    refused = pair.run(answer, example.model, [torch.randn(1, 16)], loss=square, optimizer=adamw)
    assert "a batch of 1 rows leaves rank" in refused[0]


class Tokens(nn.Module):
    """Cross entropy over tokens that count, as language models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.head = nn.Linear(16, 11)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(torch.tanh(self.embed(ids)))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}


def count_tokens(batch: dict[str, torch.Tensor], _: Any) -> float:
    return float((batch["labels"] != -100).sum())


def test_a_loss_by_tokens_is_weighted_by_tokens_or_refused(pair: Processes) -> None:
    torch.manual_seed(4)
    ids, labels = torch.randint(0, 11, (6, 7)), torch.randint(0, 11, (6, 7))
    labels[:3, 2:] = -100  # the first rows have few
    given = {"ids": ids, "labels": labels}
    example = Example(Tokens(), (), given)
    answer = strategy_answer(example, [Part((0, 1), (3, 3), sync=AR)], batch=6)
    batches = [((), given, None)] * 3
    refused = pair.run(answer, example.model, batches, loss=None, optimizer=adamw)
    assert "pass weight=" in refused[0]
    found = pair.run(answer, example.model, batches, loss=None, optimizer=adamw, weight=count_tokens)
    plain = train_whole(example.model, [given] * 3, adamw, loss=None)
    assert found[0].losses == pytest.approx(plain.losses, rel=CLOSE)
    assert largest_difference(joined_state(found), plain.state) < CLOSE


class Crossed(nn.Module):
    """Rows depend on one another: carries the batch in its shapes, and cannot be split."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return torch.softmax(x @ x.t(), dim=1) @ x


def test_rows_that_depend_on_one_another_are_found(pair: Processes) -> None:
    example = Example(Crossed(), (torch.randn(8, 16),), loss=square)
    answer = strategy_answer(example, [Part((0, 1), (4, 4), sync=AR)], batch=8)
    refused = pair.run(answer, example.model, [torch.randn(8, 16)], loss=square, optimizer=adamw)
    assert "rows depend on one another" in refused[1]


def test_factors_of_what_is_no_layer_are_refused(pair: Processes) -> None:
    example = _rows_example(8)
    for name, words in (
        ("where", "only linear, addmm and conv2d"),
        ("layers.0.bias", "no layer made factors"),
    ):
        answer = strategy_answer(example, [Part((0, 1), (4, 4), sync=AR, sfb=(name,))], batch=8)
        refused = pair.run(answer, example.model, [torch.randn(8, 16)], loss=square, optimizer=adamw)
        assert words in refused[0]


def test_a_number_made_of_all_rows_does_not_cross(pair: Processes) -> None:
    example = Example(Centred(), (torch.randn(8, 16),), loss=square)
    answer = strategy_answer(example, [Part((0, 1), (4, 4), sync=AR), Part((1,), (8,), PLACE)], batch=8)
    refused = pair.run(answer, example.model, [torch.randn(8, 16)], loss=square, optimizer=adamw)
    assert "makes one number of all rows" in refused[0]


class Centred(nn.Module):
    """Takes the mean over the batch away, half-way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = torch.tanh(self.first(x)).mean(0)
        return self.second(x) * mean + torch.tanh(x)


class Drifting(nn.Module):
    """As unlike devices: rank 1 computes a little else."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (1.0 + (1e-3 * dist.get_rank() if self.training else 0.0))


def test_copies_that_drift_are_found_and_made_equal(pair: Processes) -> None:
    example = Example(nn.Linear(16, 16), (torch.randn(8, 16),), loss=square)
    answer = strategy_answer(example, [Part((0, 1), (8, 8), DUP)], batch=8)
    batches = [torch.randn(8, 16) for _ in range(4)]
    found = pair.run(answer, Drifting(), batches, loss=square, optimizer=adamw, compare_every=4)
    assert [one.drift.checks for one in found] == [1, 1]
    assert found[1].drift.mended == 2  # weight and bias
    assert 0 < found[1].drift.largest < 0.1
    again = pair.run(answer, example.model, batches, loss=square, optimizer=adamw, compare_every=1)
    assert [one.drift.largest for one in again] == [0.0, 0.0]
