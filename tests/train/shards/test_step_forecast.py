"""A step on the virtual clock: at the limit where one thing binds, and what plans are chosen by."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import loadmaster.train as lt
from loadmaster.shards.model.built_model import build_trial
from loadmaster.shards.plan.partition import make_plan
from loadmaster.shards.plan.rates import OverlapRates, Rates
from loadmaster.shards.plan.sizes import measure_sizes
from loadmaster.shards.plan.step_forecast import _compute_speeds, _CopyEngine, _Job, forecast_step_s
from loadmaster.shards.plan.step_limits import find_step_limit

_FAST = Rates(
    device="cuda", flops_per_s=1e18, up_bytes_per_s=1e18, down_bytes_per_s=1e18, host_bytes_per_s=1e18,
    host_params_per_s=1e18, compute_s=1e-9,
)  # fmt: skip


def _plan(wish: str, rates: Rates, **more: Any) -> tuple[Any, Any, Any]:
    trial = lt.Trial(
        name="t",
        build=lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(16))),
        loss=nn.functional.mse_loss,
        data=lambda: [(torch.ones(4, 64), torch.zeros(4, 64))] * 4,
        optim=lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
        precision="bf16",
    )
    built = build_trial(trial, device=torch.device("cpu"))
    given = {"cap_bytes": 330_000, "rates": rates, "optimizer_placement": wish, "cuts": range(16)}
    return built, make_plan(built, **{**given, **more}), measure_sizes(built)


@pytest.mark.parametrize(
    ("wish", "slow"),
    [
        ("host", {"compute_s": 1.0}),
        ("host", {"host_params_per_s": 1e5}),
        ("device", {"compute_s": 1.0}),
        ("device", {"down_bytes_per_s": 1e6}),
        ("host", {"host_bytes_per_s": 1e6}),
    ],
)
def test_where_one_thing_binds_a_step_takes_what_that_takes(wish: str, slow: dict[str, float]) -> None:
    """Up to the ends of a step, where the first shards wait for their own update."""
    rates = replace(_FAST, **slow)
    built, plan, sizes = _plan(wish, rates)
    least = find_step_limit(plan.work, rates).seconds
    taken = forecast_step_s(built, plan, sizes, rates)
    assert 0.99 * least <= taken <= 1.02 * least


def test_a_step_takes_the_sum_where_nothing_runs_beside_anything() -> None:
    """One place, all on the host: a shard's weights come after the unit before it; independent arithmetic."""
    rates = replace(_FAST, compute_s=1.0, up_bytes_per_s=16 * 2 * (64 * 64 + 64) / 1.0)
    built, plan, sizes = _plan("host", rates)
    placement = ("host",) * 16
    alone = replace(plan, placement=placement, num_slots=1)
    taken = forecast_step_s(built, alone, sizes, rates)
    loads = 31 / 16  # each shard twice, the last once: seconds of the bus
    assert taken == pytest.approx(1.0 + loads, rel=0.02)


def _even_splits(plan: Any) -> Iterator[Any]:
    """None of what is not pinned on the device, one, two, ... all: spread evenly."""
    free = [at for at, where in enumerate(plan.placement) if where != "pinned"]
    for count in range(len(free) + 1):
        placement = list(plan.placement)
        for order, index in enumerate(free):
            chosen = (order + 1) * count // len(free) > order * count // len(free)
            placement[index] = "device" if chosen else "host"
        yield replace(plan, placement=tuple(placement))


def test_the_plan_has_the_least_forecast_of_all_even_splits() -> None:
    rates = replace(
        _FAST, compute_s=1e-3, up_bytes_per_s=5e8, down_bytes_per_s=5e8, host_bytes_per_s=1.5e9,
        host_params_per_s=3.6e7,
    )  # fmt: skip
    built, plan, sizes = _plan("auto", rates)
    found = [forecast_step_s(built, each, sizes, rates) for each in _even_splits(plan)]
    assert forecast_step_s(built, plan, sizes, rates) <= 1.01 * min(found)
    assert plan.placement.count("host") > 0
    again = make_plan(built, cap_bytes=330_000, rates=rates, cuts=range(16))
    assert again.placement == plan.placement  # exchanges are drawn, and the same every time


def test_exchanges_beat_every_even_split_where_the_host_falls_behind() -> None:
    rates = replace(
        _FAST, compute_s=5e-4, up_bytes_per_s=5e8, down_bytes_per_s=5e8, host_bytes_per_s=1.5e9,
        host_params_per_s=3.6e7,
    )  # fmt: skip
    built, plan, sizes = _plan("auto", rates)
    found = [forecast_step_s(built, each, sizes, rates) for each in _even_splits(plan)]
    assert forecast_step_s(built, plan, sizes, rates) < 0.97 * min(found)


def test_one_more_slot_is_taken_where_it_fits_and_weights_come_sooner_for_it() -> None:
    rates = replace(_FAST, compute_s=0.05, up_bytes_per_s=4e6, down_bytes_per_s=8e6, host_params_per_s=1e6)
    built, plan, sizes = _plan("auto", rates, cap_bytes=500_000)
    assert plan.num_slots == 5
    assert plan.peak_bytes <= 500_000
    fewer = replace(plan, num_slots=4, depth=plan.depth - 1)
    assert forecast_step_s(built, plan, sizes, rates) < 0.97 * forecast_step_s(built, fewer, sizes, rates)
    assert _plan("auto", rates)[1].num_slots == 4, "no room for more"


_BESIDE = {  # the host's rates with copies beside the optimizer: none, one way, both
    "": OverlapRates(0.0, 0.0, 4.5e9),
    "up": OverlapRates(43e9, 0.0, 3.5e9),
    "down": OverlapRates(0.0, 49e9, 2.9e9),
    "up down": OverlapRates(34e9, 48e9, 2.6e9),
}


def test_without_copies_beside_it_the_optimizer_has_the_rate_it_has_alone() -> None:
    slow = {ways: replace(each, params_per_s=5e4) for ways, each in _BESIDE.items()}
    endless = {ways: replace(each, up_bytes_per_s=1e18, down_bytes_per_s=1e18) for ways, each in slow.items()}
    rates = replace(_FAST, host_params_per_s=5e4, beside={**endless, "": OverlapRates(0.0, 0.0, 1e5)})
    built, plan, sizes = _plan("host", rates)
    numbers = [n for p in plan.layout.pieces if plan.placement[p.index] == "host" for n in p.parameters]
    least = sum(sizes.numel[n] for n in numbers) / 1e5
    assert 0.99 * least <= forecast_step_s(built, plan, sizes, rates) <= 1.02 * least
    assert find_step_limit(plan.work, rates).terms["optimizer"] == pytest.approx(least)


@pytest.mark.parametrize("ways", _BESIDE)
def test_with_the_same_copies_beside_the_optimizer_the_measured_rates_come_back(ways: str) -> None:
    rates = replace(_FAST, up_bytes_per_s=50e9, down_bytes_per_s=51e9, beside=_BESIDE)
    lanes = [f"{way} 0" for way in ways.split()]
    jobs = [_Job(stream, 1.0) for stream in (*lanes, "host", "compute")]
    found = dict(zip(("host", *lanes), _compute_speeds([jobs[-2], *jobs[:-2]], rates), strict=True))
    expected = _BESIDE[ways]
    assert found["host"] == expected.params_per_s
    assert found.get("up 0", 0.0) == expected.up_bytes_per_s
    assert found.get("down 0", 0.0) == expected.down_bytes_per_s
    assert _compute_speeds(jobs, rates)[-1] == 1.0


def test_without_the_optimizer_copies_have_the_whole_bus() -> None:
    rates = replace(_FAST, up_bytes_per_s=50e9, down_bytes_per_s=51e9, beside=_BESIDE)
    jobs = [_Job(stream, 1.0) for stream in ("up 1", "down 0", "compute")]
    assert _compute_speeds(jobs, rates) == [50e9, 51e9, 1.0]


def test_an_engine_ends_its_copy_and_stays_with_a_lane_that_has_more() -> None:
    lanes = {
        "up 0": [_Job("up 0", 1.0)],
        "up 1": [_Job("up 1", 1.0), _Job("up 1", 1.0)],
    }
    first, second = lanes["up 1"]
    engine = _CopyEngine("up", lane=1)
    assert engine.pick_copy(lanes) is first
    assert engine.pick_copy(lanes) is first  # not done yet
    first.done = True
    lanes["up 1"].remove(first)
    assert engine.pick_copy(lanes) is second  # though weights wait
    second.done = True
    lanes["up 1"].remove(second)
    assert engine.pick_copy(lanes) is lanes["up 0"][0]
