"""Updates on the host go on with what they made in earlier steps, to the numbers of a plain loop."""

import copy
import os
import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import loadmaster.train as lt
from loadmaster.shards.device import host_kernels
from loadmaster.shards.device.cpu_device import CpuDevice
from loadmaster.train.execute import optimizer_step

WIDTH = 16


class Sometimes(nn.Module):
    """A layer whose odd-sized and whose even-sized parameters are left out now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.rare, self.odd = (nn.Linear(WIDTH, out) for out in (WIDTH, WIDTH, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.always(x))
        if len(x) % 2 == 0:
            y = y + self.rare(x)
        if len(x) > 4:
            y = y + self.odd(x).sum(1, keepdim=True)
        return y


def _rows() -> list[Any]:
    made = torch.Generator().manual_seed(3)
    sizes = [6, 6, 6, 5, 4, 5, 3, 6, 4]  # first all of it, thrice
    return [tuple(torch.randn(2, size, WIDTH, generator=made)) for size in sizes]


def _by_groups(ps: Any) -> torch.optim.Optimizer:
    given = list(ps)
    groups = [{"params": given[::2], "weight_decay": 0.1}, {"params": given[1::2], "betas": (0.8, 0.9)}]
    return torch.optim.AdamW(groups, lr=1e-2, fused=True)


class Cycle(torch.optim.lr_scheduler.LRScheduler):
    """Rate, decay and betas change from step to step."""

    def get_lr(self) -> list[float]:
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.01 * (self.last_epoch % 4)
            group["betas"] = (0.9, 0.99) if self.last_epoch % 3 else (0.4, 0.95)  # 0.4: not by the kernel
        return [1e-2 / (1 + self.last_epoch)] * len(self.optimizer.param_groups)


def _trial(*, sometimes: bool = False, **more: Any) -> lt.Trial:
    def build() -> nn.Module:
        middle = Sometimes() if sometimes else nn.Linear(WIDTH, WIDTH)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), middle, nn.Linear(WIDTH, WIDTH))

    given: dict[str, Any] = {
        "build": build,
        "loss": F.mse_loss,
        "data": _rows,
        "optim": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    }
    return lt.Trial(name="t", **(given | more))


def _runner(trial: lt.Trial, device: CpuDevice, placement: Any = ("host",) * 3) -> Any:
    return lt.open_runner(trial, device=device, cuts=[0, 1, 2], placement=placement, num_threads=2)


def _kept(runner: Any) -> Any:
    tensors, facts = runner.snapshot()
    return {name: each.clone() for name, each in tensors.items()}, copy.deepcopy(facts)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"precision": "bf16"},
        {"optim": _by_groups},
        {"lr_schedule": Cycle},
        {"optim": _by_groups, "clip_norm": 0.5, "precision": "fp16"},
        {"accumulate": 2, "clip_norm": 0.5},
    ],
)
@pytest.mark.parametrize("sometimes", [False, True])
def test_steps_equal_the_plain_loop_also_after_a_snapshot_is_put_back(more: Any, sometimes: bool) -> None:
    trial = _trial(sometimes=sometimes, **more)
    device = CpuDevice(cap_bytes=1 << 24)
    runner = _runner(trial, device)
    names = runner.state.chain.parameter_name
    plain = lt.reference(trial, host=list(names))
    kept, losses = {0: _kept(runner)}, []
    for done in runner.steps(device, 99):
        losses.append(done.loss)
        kept[done.step] = _kept(runner)
    assert losses == list(plain.losses)
    for step in (2, 0, 4):
        runner.restore(*kept[step])
        assert [done.loss for done in runner.steps(device, 99)] == losses[step:], f"after step {step}"
        ours = runner.state_dict()
        assert all(torch.equal(each, ours[name]) for name, each in plain.state_dict.items())
    runner.close()
    device.close()


def test_a_piece_goes_on_where_it_was_when_it_moves_between_host_and_device() -> None:
    trial, device = _trial(sometimes=True), CpuDevice(cap_bytes=1 << 24)
    plain = lt.reference(trial, host=["0.weight"])
    runner = _runner(trial, device)
    losses = [done.loss for done in runner.steps(device, 3)]
    other = _runner(trial, device, ("device", "pinned", "host"))
    for one, following in ((runner, other), (other, runner)):
        kept = _kept(one)
        one.leave()
        following.restore(*kept)
        losses += [done.loss for done in following.steps(device, 3)]
    assert losses == list(plain.losses)
    runner.close()
    other.close()
    device.close()


@pytest.mark.skipif(sys.platform != "linux", reason="threads are moved between cores on Linux alone")
def test_the_cores_of_updates_do_not_become_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one core: there is nothing to keep off")
    asked: list[set[int]] = []

    def all_but_one(allowed: set[int]) -> Any:
        asked.append(set(allowed))
        mask = np.zeros(1024, dtype=np.uint8)
        mask[sorted(allowed)[1:] or sorted(allowed)] = 1
        return np.packbits(mask, bitorder="little")

    monkeypatch.setattr(host_kernels, "worker_cores", all_but_one)
    device = CpuDevice(cap_bytes=1 << 24)
    runner = _runner(_trial(sometimes=True), device)
    for _ in runner.steps(device, 5):
        pass
    runner.close()
    device.close()
    assert {frozenset(each) for each in asked} == {frozenset(before)}
    assert os.sched_getaffinity(0) == before


def test_what_the_kernel_steps_is_laid_out_once_also_beside_what_it_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right, made = optimizer_step.table_of, []
    monkeypatch.setattr(optimizer_step, "table_of", lambda *given: made.append(1) or right(*given))
    trial = _trial(
        build=lambda: nn.Sequential(*(nn.Linear(WIDTH, size) for size in (WIDTH, WIDTH, 3))),
        data=lambda: [(x, x[:, :3]) for x, _ in _rows()],
    )
    device = CpuDevice(cap_bytes=1 << 24)
    runner = _runner(trial, device)
    for _ in runner.steps(device, 5):
        pass
    runner.close()
    device.close()
    assert len(made) == 3, "pieces; the last has a bias of three elements"
