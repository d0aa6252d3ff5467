"""Moves of rows between ranks: every row arrives once, from a rank that has it."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.runtime.distributed.strategy.drift import checksum, relative_difference
from loadmaster.runtime.distributed.strategy.layout import RowShare
from loadmaster.runtime.distributed.strategy.moves import (
    moves_back_of_whole,
    moves_of_rows,
    moves_of_whole,
)


@st.composite
def shares(draw: Any, batch: int = 12) -> RowShare:
    ranks = tuple(draw(st.permutations(range(4)))[: draw(st.integers(1, 4))])
    if len(ranks) == 1 or draw(st.booleans()):
        return RowShare(tuple(sorted(ranks)), (batch,) * len(ranks), whole=True)
    cuts = sorted(draw(st.sets(st.integers(1, batch - 1), min_size=len(ranks) - 1, max_size=len(ranks) - 1)))
    return RowShare(ranks, tuple(np.diff([0, *cuts, batch]).tolist()), whole=False)


def test_the_example_of_the_docstring() -> None:
    before, after = RowShare((0, 1, 2, 3), (5, 3, 1, 1), False), RowShare((0, 1, 2, 3), (1, 2, 3, 4), False)
    moves = [(one.source, one.target, one.begin, one.end) for one in moves_of_rows(before, after)]
    assert moves == [
        (0, 0, 0, 1),
        (0, 1, 1, 3),
        (0, 2, 3, 5),
        (1, 2, 5, 6),
        (1, 3, 6, 8),
        (2, 3, 8, 9),
        (3, 3, 9, 10),
    ]


@given(shares(), shares())
def test_every_rank_gets_its_rows_once_from_one_who_has_them(before: RowShare, after: RowShare) -> None:
    got: dict[int, list[int]] = {rank: [] for rank in after.ranks}
    for move in moves_of_rows(before, after):
        begin, end = before.bounds(move.source)
        assert begin <= move.begin < move.end <= end
        got[move.target] += range(move.begin, move.end)
        first, last = before.bounds(move.target) if move.target in before.ranks else (0, 0)
        own = first <= move.begin < last
        assert move.is_local == own  # what a rank has is not sent to it
    for rank, rows in got.items():
        assert rows == list(range(*after.bounds(rank)))


@given(shares(), shares(), st.integers(0, 2**31))
def test_gradients_of_a_tensor_without_rows_add_up(before: RowShare, after: RowShare, seed: int) -> None:
    """One number w goes to all ranks; each multiplies its rows: d(sum of rows) / dw is the sum of rows."""
    rows = np.random.default_rng(seed).integers(0, 100, 12)
    assert sorted(target for _, target in moves_of_whole(before, after)) == sorted(after.ranks)
    own = {rank: int(rows[slice(*after.bounds(rank))].sum()) for rank in after.ranks}
    found = dict.fromkeys(before.ranks, 0)
    for source, target in moves_back_of_whole(before, after):
        found[target] += own[source]
    if before.whole:  # each rank needs all of it
        assert set(found.values()) == {int(rows.sum())}
    else:  # what its ranks have is added up later
        assert sum(found.values()) == int(rows.sum())


def test_shares_of_a_smaller_batch_keep_their_proportions() -> None:
    assert RowShare((0, 1), (6, 2), False).scaled(4, 8).rows == (3, 1)
    assert RowShare((0, 1), (8, 8), True).scaled(3, 8).rows == (3, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_changed_bit_changes_the_checksum(dtype: torch.dtype) -> None:
    one = torch.randn(50, generator=torch.Generator().manual_seed(0)).to(dtype)
    other = one.clone()
    assert checksum(one) == checksum(other)
    other[7] = torch.nextafter(one[7].double(), torch.tensor(9.0).double()).to(dtype) + (
        0.25 if dtype != torch.float64 else 0
    )
    assert checksum(one) != checksum(other)
    assert relative_difference(one, other) > 0
