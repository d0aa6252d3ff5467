"""Bytes and loads are what the formulas say, not more."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import loadmaster.train as lt
from loadmaster.core.errors import DeviceMemoryError
from loadmaster.shards.device.arena import Arena
from loadmaster.shards.device.cpu_device import CpuDevice

WIDTH, SHARDS = 64, 12
WEIGHT_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


def _trial(optim: Any) -> lt.Trial:
    return lt.Trial(
        name="t",
        build=lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(SHARDS))),
        loss=F.mse_loss,
        data=lambda: [(torch.ones(2, WIDTH), torch.zeros(2, WIDTH))] * 6,
        optim=optim,
    )


def _last_step(placement: list[Any], optim: Any, *, num_slots: int, depth: int = 0) -> Any:
    device = CpuDevice(cap_bytes=1 << 26)
    runner = lt.open_runner(
        _trial(optim), device=device, placement=placement, num_slots=num_slots, depth=depth, num_threads=1
    )
    done = list(runner.steps(device, 6))[-1]
    runner.close()
    return done


@pytest.mark.parametrize("num_slots", [1, 2, 4, 6, 8])
def test_loads_of_a_long_quantum_are_twice_what_does_not_stay(num_slots: int) -> None:
    """2 (S - K), where the update leaves the slot as the next step wants it."""
    done = _last_step(
        ["device"] * SHARDS, lambda ps: torch.optim.SGD(ps, lr=0.1), num_slots=num_slots, depth=0
    )
    kept = num_slots
    turn = 0 if kept else 1
    # depth 0 refreshes a slot only where the very next unit wants it: the first shard at the turn of a step
    assert done.loads == 2 * SHARDS - 1 - 1 - (kept - 1) + turn


@pytest.mark.parametrize("num_pinned", [0, 3, 11])
def test_a_step_on_the_host_moves_weights_up_twice_and_gradients_down_once(num_pinned: int) -> None:
    placement = ["pinned"] * num_pinned + ["host"] * (SHARDS - num_pinned)
    done = _last_step(placement, torch.optim.AdamW, num_slots=1)
    streamed = SHARDS - num_pinned
    assert done.bytes_up == (2 * streamed - 1) * WEIGHT_BYTES  # the last shard is loaded once
    assert done.bytes_down == streamed * WEIGHT_BYTES


def test_a_step_on_the_device_moves_master_and_state_both_ways_once() -> None:
    done = _last_step(["device"] * SHARDS, torch.optim.AdamW, num_slots=1)
    loads = 2 * SHARDS - 2  # the last shard once, the first still there from its update
    assert done.loads == loads
    assert done.bytes_up == (loads + 3 * SHARDS) * WEIGHT_BYTES
    assert done.bytes_down == 3 * SHARDS * WEIGHT_BYTES


def test_pinned_shards_move_nothing() -> None:
    done = _last_step(["pinned"] * SHARDS, torch.optim.AdamW, num_slots=1)
    assert (done.bytes_up, done.bytes_down, done.loads) == (0, 0, 0)


def test_an_arena_raises_before_its_cap_is_passed_and_says_what_stands_there() -> None:
    arena = Arena("gpu", 1000, lambda size: torch.empty(size, dtype=torch.uint8))
    arena.region("slots", 700)
    with pytest.raises(DeviceMemoryError, match="slots 768 B"):
        arena.book("activations", 300)
    assert arena.peak_bytes == 768
