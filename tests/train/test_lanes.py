"""Copies each way have two lanes: what waits in one does not hold up the other."""

import torch

from loadmaster.train.cpu_device import CpuDevice, HostEvent
from loadmaster.train.streams import Copy


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
