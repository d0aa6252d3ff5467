"""Several trials on one device, step by step in turn: same bits as alone, one set of places, one trace."""

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import loadmaster.train as lt
from loadmaster.shards.device.cpu_device import CpuDevice
from loadmaster.shards.device.update_thread import HostUpdater

WIDTH, SHARDS = 16, 12


class Block(nn.Module):
    """Dropout and batch norm, so that a wrong generator or buffer shows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(F.relu(self.norm(self.linear(x))))


def _data() -> list[Any]:
    made = torch.Generator().manual_seed(3)
    return [(torch.randn(6, WIDTH, generator=made), torch.randn(6, WIDTH, generator=made)) for _ in range(4)]


def _trial(name: str, *, lr: float, blocks: int = 5, **more: Any) -> lt.Trial:
    return lt.Trial(
        name=name,
        build=lambda: nn.Sequential(*(Block() for _ in range(blocks))),
        loss=F.mse_loss,
        data=_data,
        optim=lambda ps: torch.optim.AdamW(ps, lr=lr),
        epochs=2,
        **more,
    )


TRIALS = [
    _trial("a", lr=1e-2, seed=1),
    _trial("b", lr=3e-2, seed=2, clip_norm=0.5),
    _trial("c", lr=1e-3, seed=3, accumulate=2, blocks=7),
]


def _open(trials: list[lt.Trial], device: CpuDevice, kind: list[Any], **more: Any) -> list[Any]:
    updater = HostUpdater()
    found = []
    for trial in trials:
        count = len(trial.build())  # type: ignore[arg-type]
        placement = [kind[at % len(kind)] for at in range(count)]
        found.append(
            lt.open_runner(trial, device=device, placement=placement, num_threads=1, updater=updater, **more)
        )
    return found


@pytest.mark.parametrize("kind", [["device"], ["host"], ["host", "pinned", "device"]], ids=str)
def test_three_trials_in_turn_each_end_with_the_bits_of_the_reference(kind: list[Any]) -> None:
    device = CpuDevice(cap_bytes=1 << 24, jitter_s=2e-4)
    runners = _open(TRIALS, device, kind, num_slots=3, depth=2)
    losses: dict[str, list[float]] = {trial.name: [] for trial in TRIALS}
    for runner, done in lt.interleave(runners, device, 99):
        losses[runner.trial.name].append(done.loss)
    for runner in runners:
        names = runner.state.chain.parameter_name
        pieces = [h for h in runner.state.pieces if runner.config.placement[h.piece.index] == "host"]
        on_host = [names[number] for host in pieces for number in host.piece.parameters]
        plain = lt.reference(runner.trial, host=on_host)
        assert losses[runner.trial.name] == list(plain.losses)
        ours = runner.state_dict()
        assert all(torch.equal(tensor, ours[name]) for name, tensor in plain.state_dict.items())
        runner.close()
    assert device.arena.used_bytes == 0
    device.close()


def test_trials_on_a_device_share_its_places() -> None:
    """A second and third trial take their pinned pieces and nothing else."""
    device = CpuDevice(cap_bytes=1 << 24)
    runners = _open([_trial(f"t{at}", lr=0.01) for at in range(3)], device, ["host", "device"], num_slots=3)
    used = []
    for runner in runners:
        next(runner.steps(device, 1))
        used.append(device.arena.used_bytes)
    assert used[0] == used[1] == used[2] > 0
    for runner in runners:
        runner.close()
    assert device.arena.used_bytes == 0


def test_the_trace_of_every_step_shows_two_trials_or_more() -> None:
    device = CpuDevice(cap_bytes=1 << 24, copy_bytes_per_s=2e6)
    runners = _open([_trial(f"t{at}", lr=0.01) for at in range(3)], device, ["host"], num_slots=3, depth=2)
    steps = [done for _, done in lt.interleave(runners, device, 6)]
    seen = [{label.split()[0] for _, label, _, _ in done.spans} for done in steps]
    assert all(len(each) >= 2 for each in seen[3:])
    for runner in runners:
        runner.close()


def _plain(name: str) -> lt.Trial:
    return lt.Trial(
        name=name,
        build=lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(SHARDS))),
        loss=F.mse_loss,
        data=lambda: [(torch.ones(2, WIDTH), torch.zeros(2, WIDTH))] * 40,
        optim=lambda ps: torch.optim.SGD(ps, lr=0.1),
    )


@pytest.mark.parametrize("hinted", [False, True])
@pytest.mark.parametrize("per_turn", [1, 2, 4])
@pytest.mark.parametrize("num_slots", [2, 4, 6])
def test_loads_of_trials_that_take_turns_are_those_of_the_formula(
    num_slots: int, per_turn: int, hinted: bool
) -> None:
    """2 (S - K) + K / q a step: K slots keep what both passes use; a new turn finds none of it."""
    device = CpuDevice(cap_bytes=1 << 24)
    runners = _open(
        [_plain(f"t{at}") for at in range(3)], device, ["device"], num_slots=num_slots, depth=2 * num_slots
    )
    loads: list[int] = []
    for turn in range(3):
        for at, runner in enumerate(runners):
            after = runners[(at + 1) % 3] if hinted else None
            taken = [done.loads for done in runner.steps(device, per_turn, after=after)]
            if turn > 0:
                loads += taken
    assert sum(loads) / len(loads) == 2 * (SHARDS - num_slots) + num_slots / per_turn
    for runner in runners:
        runner.close()


def test_a_program_that_closes_nothing_ends_without_an_abort() -> None:
    script = """
import torch, loadmaster.train as lt
from tests.train.coordination.test_interleave import _trial
from loadmaster.train.shard_engine import ShardEngine
engine = ShardEngine(memory_cap_bytes=1 << 24, optimizer_placement="host")
device = engine.open_device("cpu")
next(engine.open_runner(_trial("x", lr=0.1), device).steps(device, 1))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
