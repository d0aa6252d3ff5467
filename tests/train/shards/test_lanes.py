"""Copies each way have two lanes: what waits in one does not hold up the other."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import loadmaster.train as lt
from loadmaster.shards.device.cpu_device import CpuDevice, HostEvent
from loadmaster.shards.device.streams import Copy


def test_gradients_land_while_stepped_state_waits_for_its_update() -> None:
    device = CpuDevice(cap_bytes=1 << 20)
    stepped = HostEvent()
    state, grads = torch.zeros(4), torch.zeros(4)
    home = device.down([Copy(state, torch.ones(4))], after=[stepped], label="state", lane=1)
    landed = device.down([Copy(grads, torch.ones(4))], after=[], label="gradients")
    landed.wait()
    assert grads.tolist() == [1.0] * 4
    assert not home.done()
    stepped.set()
    home.wait()
    assert state.tolist() == [1.0] * 4
    assert [span[:2] for span in device.spans()] == [("down", "gradients"), ("down", "state")]
    device.close()


def test_weights_arrive_while_state_waits_for_a_ring() -> None:
    device = CpuDevice(cap_bytes=1 << 20)
    free = HostEvent()
    state, weights = torch.zeros(4), torch.zeros(4)
    brought = device.up([Copy(state, torch.ones(4))], after=[free], label="state", lane=1)
    device.up([Copy(weights, torch.ones(4))], after=[], label="weights").wait()
    assert weights.tolist() == [1.0] * 4
    assert not brought.done()
    free.set()
    brought.wait()
    device.close()


def test_the_newest_copy_of_the_first_lane_is_known() -> None:
    device = CpuDevice(cap_bytes=1 << 20)
    assert device.latest("up") is None
    one = device.up([Copy(torch.zeros(4), torch.ones(4))], after=[], label="weights")
    device.up([Copy(torch.zeros(4), torch.ones(4))], after=[], label="state", lane=1).wait()
    assert device.latest("up") is one
    assert device.latest("up", back=1) is None
    two = device.up([Copy(torch.zeros(4), torch.ones(4))], after=[], label="weights")
    assert (device.latest("up"), device.latest("up", back=1)) == (two, one)
    assert device.latest("down") is None
    device.close()


class Asking(CpuDevice):
    """Notes whether what goes in the second lane waits for what the first was sent, but the last weights."""

    waits: ClassVar[list[bool]] = []

    def up(self, copies: Any, *, after: Any, label: str, lane: int = 0) -> Any:
        self._note("up", after, lane)
        return super().up(copies, after=after, label=label, lane=lane)

    def down(self, copies: Any, *, after: Any, label: str, lane: int = 0) -> Any:
        self._note("down", after, lane)
        return super().down(copies, after=after, label=label, lane=lane)

    def _note(self, way: str, after: Any, lane: int) -> None:
        sent = self.latest(way, back=1 if way == "up" else 0)
        if lane == 1 and sent is not None:
            self.waits.append(any(each is sent for each in after))


def test_state_goes_after_the_weights_and_gradients_sent_before_it() -> None:
    trial = lt.Trial(
        name="t",
        build=lambda: nn.Sequential(*(nn.Linear(16, 16) for _ in range(8))),
        loss=F.mse_loss,
        data=lambda: [(torch.ones(4, 16), torch.zeros(4, 16))] * 4,
        optim=lambda ps: torch.optim.AdamW(ps),
    )
    device = Asking(cap_bytes=1 << 20)
    placement: Any = ["host", "device"] * 4
    runner = lt.open_runner(trial, device=device, cuts=list(range(8)), placement=placement, num_threads=1)
    assert len(list(runner.steps(device, 4))) == 4
    assert len(Asking.waits) >= 2 * 4 * 4
    assert all(Asking.waits)
    runner.close()
    device.close()


class Clocked(CpuDevice):
    """As a GPU does, it tells only what was gathered; asked so, what was done since remains."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self._gathered: list[tuple[str, str, float, float]] = []

    def gather(self) -> None:
        self._gathered += super().spans()

    def spans(self, *, gathered: bool = False) -> list[tuple[str, str, float, float]]:
        if not gathered:
            self.gather()
        found, self._gathered = self._gathered, []
        return found


def test_every_unit_is_told_once_where_the_data_ends_before_the_steps_do() -> None:
    rows = [(torch.ones(2, 8), torch.zeros(2, 8))] * 3
    for data in (lambda: rows, lambda: iter(rows)):  # whose length is known, or is not
        trial = lt.Trial(
            name="t",
            build=lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))),
            loss=F.mse_loss,
            data=data,
            optim=lambda ps: torch.optim.SGD(ps, lr=0.1),
            verify=False,
        )
        device = Clocked(cap_bytes=1 << 20)
        runner = lt.open_runner(trial, device=device, cuts=[0, 1, 2], placement=["host"] * 3)
        spans = [span for done in runner.steps(device, 99) for span in done.spans]
        runner.close()
        device.close()
        units = [label for kind, label, *_ in spans if kind == "compute"]
        assert sorted(units) == sorted(["t F0", "t F1", "t L2", "t B1", "t B0"] * 3)
