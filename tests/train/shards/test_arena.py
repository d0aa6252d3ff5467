"""The arena raises before its cap is passed; plans stay below it; what is planned is what is taken."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import loadmaster.train as lt
from loadmaster.core.errors import DeviceMemoryError
from loadmaster.modules.live_storages import LiveBytes
from loadmaster.shards.device.arena import Arena, BookingStack
from loadmaster.shards.device.cpu_device import CpuDevice
from loadmaster.shards.model.built_model import build_trial
from loadmaster.shards.plan.partition import make_plan
from loadmaster.shards.plan.rates import TYPICAL_GPU, Rates
from loadmaster.shards.plan.slot_needs import MemoryNeed
from loadmaster.train.execute.device_slots import DeviceSlots


def _arena(cap_bytes: int) -> Arena:
    return Arena("gpu", cap_bytes, lambda size: torch.empty(size, dtype=torch.uint8))


def test_what_is_given_back_can_be_taken_again_and_the_peak_stays() -> None:
    arena = _arena(1024)
    region = arena.region("a", 1000)
    with pytest.raises(DeviceMemoryError, match="a 1"):
        arena.book("b", 1)
    arena.give_back(region)
    arena.book("b", 512)
    assert (arena.used_bytes, arena.peak_bytes, arena.held) == (512, 1024, {"b": 512})


def test_books_are_given_back_in_the_other_order_and_after_an_exception() -> None:
    arena = _arena(1000)
    booked = BookingStack(arena, "boundaries")
    booked.push(300)
    booked.push(200)
    booked.pop()
    assert arena.used_bytes == 300
    with pytest.raises(ValueError, match="x"), arena.hold("activations", 700):
        raise ValueError("x")
    booked.clear()
    assert arena.used_bytes == 0


def test_slots_grow_for_who_needs_larger_ones_and_shrink_when_it_leaves() -> None:
    device = CpuDevice(cap_bytes=10_000)
    slots = DeviceSlots(device)
    small, large = MemoryNeed((), 256, 2), MemoryNeed((1024,), 512, 3, 256, 2)
    slots.join("small", small)
    assert device.arena.used_bytes == 512
    slots.join("large", large)
    assert device.arena.used_bytes == 1024 + 3 * 512 + 2 * 256
    with pytest.raises(DeviceMemoryError, match="slots for shards"):
        slots.join("huge", MemoryNeed((9_000,), 256, 2))
    assert device.arena.used_bytes == 1024 + 3 * 512 + 2 * 256
    slots.leave("large", None)
    assert device.arena.used_bytes == 512
    slots.leave("small", None)
    assert device.arena.used_bytes == 0


def test_live_bytes_are_those_of_tensors_that_live() -> None:
    with LiveBytes() as live:
        a = torch.ones(100)
        b = a + a  # noqa: F841
        del a
        c = torch.ones(25)  # noqa: F841
    assert (live.now_bytes, live.peak_bytes) == (500, 800)


class _Hungry(nn.Module):
    """Makes something much larger than it keeps or gives."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.linear(x).detach().repeat(1, 200)
        return x + self.linear(x) + wide.sum() * 0


def _trial(block: Any = lambda: nn.Linear(64, 64), *, loss: Any = F.mse_loss, **more: Any) -> lt.Trial:
    return lt.Trial(
        name="t",
        build=lambda: nn.Sequential(*(block() for _ in range(12))),
        loss=loss,
        data=lambda: [(torch.ones(4, 64), torch.zeros(4, 64))] * 4,
        optim=lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
        **more,
    )


def _wide_loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(out, target) + (out.detach().repeat(1, 100) * 2).mean() * 0


@pytest.mark.parametrize("wish", ["auto", "host", "device"])
@pytest.mark.parametrize("share", [1, 3])
def test_what_is_planned_is_what_is_taken(wish: str, share: int) -> None:
    device = CpuDevice(cap_bytes=300_000)
    runners = [
        lt.open_runner(_trial(seed=at), device=device, optimizer_placement=wish, share=share, num_threads=1)
        for at in range(share)
    ]
    plan = make_plan(
        build_trial(_trial(), device=torch.device("cpu")), cap_bytes=300_000, rates=_SLOW,
        optimizer_placement=wish, share=share,
    )  # fmt: skip
    for _ in lt.interleave(runners, device, 3):
        assert len(device.tenants) <= share
    assert len(device.tenants) == share  # nobody had to leave
    assert plan.peak_bytes <= 300_000
    assert 0.75 * plan.peak_bytes <= device.arena.peak_bytes <= 300_000
    for runner in runners:
        runner.close()


_SLOW = Rates(
    device="cpu", flops_per_s=5e10, up_bytes_per_s=5e9, down_bytes_per_s=5e9, host_bytes_per_s=1e10,
    host_params_per_s=3e8,
)  # fmt: skip


@pytest.mark.parametrize("hungry", [_trial(_Hungry), _trial(loss=_wide_loss)], ids=["workspace", "loss"])
def test_what_blocks_and_the_loss_make_for_a_moment_is_counted(hungry: lt.Trial) -> None:
    cpu = torch.device("cpu")
    plans = [
        make_plan(build_trial(trial, device=cpu), cap_bytes=1 << 30, rates=_SLOW)
        for trial in (_trial(), hungry)
    ]
    assert plans[1].peak_bytes - plans[0].peak_bytes >= 4 * 64 * 100 * 4


def _host(params_per_s: float) -> dict[str, Any]:
    assert TYPICAL_GPU.beside is not None
    beside = {ways: replace(each, params_per_s=params_per_s) for ways, each in TYPICAL_GPU.beside.items()}
    return {"host_params_per_s": params_per_s, "beside": beside}


def test_the_split_follows_the_rates() -> None:
    """A fast host steps all that streams; a slow one nothing that the bus can carry."""
    built = build_trial(_trial(precision="bf16"), device=torch.device("cpu"))

    def counts(**rates: Any) -> tuple[int, int]:
        found = make_plan(built, cap_bytes=300_000, rates=replace(TYPICAL_GPU, **rates)).placement
        return found.count("host"), found.count("device")

    host, device = counts(host_bytes_per_s=1e14, **_host(1e14), flops_per_s=1e20)
    assert (host > 0, device) == (True, 0)
    host, device = counts(**_host(1e6), flops_per_s=1e20)
    assert (host, device > 0) == (0, True)
