"""What the training benchmark says of spans and placements, against plain counting."""

import random

import pytest
from benchmarks.spans import covered, length, union
from benchmarks.train_case import FULL, TINY, by_hand


def test_the_share_of_spans_inside_others_is_what_counting_ticks_gives() -> None:
    chance = random.Random(0)
    for _ in range(200):
        mine, theirs = (
            [(a, a + chance.randint(0, 6)) for a in chance.choices(range(40), k=chance.randint(1, 8))]
            for _ in range(2)
        )
        ticks = [{t for first, last in each for t in range(first, last)} for each in (mine, theirs)]
        assert length(union(mine)) == len(ticks[0])
        if ticks[0]:
            assert covered(mine, theirs) == pytest.approx(len(ticks[0] & ticks[1]) / len(ticks[0]))


def test_the_placement_by_hand_has_a_shard_for_every_block() -> None:
    for case in (FULL, TINY):
        found = by_hand(case)
        assert len(found) == case.layers + 2
        assert found[: case.num_pinned] == ["pinned"] * case.num_pinned
        assert found[-1] == "host"
    assert [by_hand(FULL).count(where) for where in ("pinned", "host", "device")] == [6, 33, 11]
