"""What a plan did not foresee is found before the first step changes anything; the bits stay."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import loadmaster.train as lt
from loadmaster.core.errors import DeviceMemoryError
from loadmaster.shards.device.cpu_device import CpuDevice
from tests.train.metered_device import MeteredDevice

WIDTH, ROWS = 64, 32


class _Unseen(torch.autograd.Function):
    """A loss whose backward cannot be followed without numbers, and takes much memory for a moment."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(out, target)
        return (out - target).square().mean()

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor, None]:
        out, target = ctx.saved_tensors
        scale = float(slope)  # reads a number
        wide = (out - target).repeat(1, 26)
        return wide[:, : out.shape[1]] * (2 * scale / out.numel()), None


def _unseen(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return _Unseen.apply(out, target)  # type: ignore[no-any-return]


def _wide(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Its parts stand eight times as wide as what it is given, one after another."""
    return F.mse_loss(out, target) + sum((out.detach().repeat(1, 8) * k).sum() * 0 for k in range(3))


class _Draws(nn.Module):
    """Draws, and keeps a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(F.relu(self.norm(self.linear(x))), 0.1, self.training)


def _trial(loss: Any = F.mse_loss, optim: Any = torch.optim.AdamW, **more: Any) -> lt.Trial:
    made = torch.Generator().manual_seed(0)
    batches = [torch.randn(2, ROWS, WIDTH, generator=made).unbind() for _ in range(4)]
    return lt.Trial(
        name="t",
        build=lambda: nn.Sequential(*(_Draws() for _ in range(10))),
        loss=loss,
        data=lambda: batches,
        optim=lambda ps: optim(ps, lr=0.01),
        seed=3,
        verify=False,  # it keeps gradients in host memory, which the meter cannot tell from the device's
        **more,
    )


def _trained(trial: lt.Trial, device: CpuDevice, **more: Any) -> tuple[dict[str, torch.Tensor], list[str]]:
    more = {"num_threads": 1, "optimizer_placement": "device", **more}
    runner = lt.open_runner(trial, device=device, **more)
    assert len(list(runner.steps(device, 9))) == 4 // trial.accumulate
    found, notes = {name: tensor.clone() for name, tensor in runner.state_dict().items()}, runner.notes
    runner.close()
    device.close()
    return found, notes


def _same(one: dict[str, torch.Tensor], other: Any) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items()) and len(one) == len(other)


@pytest.mark.parametrize(
    "more",
    [
        {}, {"loss": _wide}, {"accumulate": 2}, {"clip_norm": 0.1}, {"precision": "bf16"},
        {"optim": torch.optim.RMSprop},
    ],
    ids=["plain", "wide loss", "accumulate", "clipping", "bf16", "an optimizer that makes its own state"],
)  # fmt: skip
def test_what_is_planned_is_enough_for_every_real_byte(more: dict[str, Any]) -> None:
    """The plan fills the cap; the meter, which knows of no plan, never sees more; and it is no waste."""
    trial = _trial(**more)
    cap = 420_000
    device = MeteredDevice(cap_bytes=cap)
    found, notes = _trained(trial, device)
    assert notes == []
    assert 0.5 * cap < device.meter.most_bytes <= cap
    assert _same(found, lt.reference(trial).state_dict)


def test_a_step_that_does_not_fit_is_planned_anew_before_it_changes_anything() -> None:
    """No profile sees this loss: the plan is a rule of thumb, and too small; the rehearsal finds out."""
    trial = _trial(_unseen)
    with pytest.warns(RuntimeWarning, match=r"rehearsed .* ran out of memory .* more kept free"):
        found, notes = _trained(trial, MeteredDevice(cap_bytes=425_000))
    assert notes
    assert _same(found, lt.reference(trial).state_dict)


def test_a_rehearsal_leaves_no_trace_in_weights_draws_buffers_and_bytes() -> None:
    trial = _trial()
    quiet, metered = CpuDevice(cap_bytes=1 << 22), MeteredDevice(cap_bytes=1 << 22)
    runners = [
        lt.open_runner(trial, device=device, num_threads=1, optimizer_placement="host")
        for device in (quiet, metered)
    ]
    told = [
        [(done.loss, done.bytes_up, done.bytes_down, done.loads) for done in runner.steps(device, 4)]
        for runner, device in zip(runners, (quiet, metered), strict=True)
    ]
    assert told[0] == told[1]
    assert _same(*[runner.state_dict() for runner in runners])
    for runner in runners:
        runner.close()


def test_a_cap_no_plan_can_keep_is_said_with_what_to_do() -> None:
    device = MeteredDevice(cap_bytes=310_000)
    runner = lt.open_runner(_trial(_unseen), device=device, num_threads=1, optimizer_placement="device")
    before = {name: tensor.clone() for name, tensor in runner.state_dict().items()}
    with pytest.raises(DeviceMemoryError, match="raise memory_cap"), pytest.warns(RuntimeWarning):
        next(runner.steps(device, 1))
    assert _same(before, runner.state_dict())
    runner.close()
