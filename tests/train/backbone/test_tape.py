"""Recorded units, their graph played by hand: memory that stays gives the numbers of memory that does not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import loadmaster.train as lt
from loadmaster.shards.device.cpu_device import CpuDevice
from loadmaster.train.backbone import group as groups
from loadmaster.train.backbone.cuda_graphs import UnitTape
from loadmaster.train.backbone.group import Group, open_group, steps
from loadmaster.train.backbone.group_member_executor import GroupMemberExecutor
from loadmaster.train.backbone.weight_stream import WeightStream
from tests.train.lora_trials import NUM_LAYERS, build, lora

EACH_BLOCK = list(range(NUM_LAYERS + 2))


class Played:
    """Stands for a CUDA graph: does the recorded work on the memory it was recorded on."""

    def __init__(self, units: Any, work: Callable[[Any], None], bind: Any) -> None:
        self._units, self._work, self._bind = units, work, bind

    def replay(self) -> None:
        self._units.recording = True
        try:
            with self._bind() as leaves:
                self._work(leaves)
        finally:
            self._units.recording = False


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "GroupMemberExecutor", member_with_pool)
    monkeypatch.setattr(UnitTape, "_record_unit", lambda self, work, bind: Played(self._units, work, bind))


def member_with_pool(state: Any, device: Any, *, pool: Any, **more: Any) -> GroupMemberExecutor:
    return GroupMemberExecutor(state, device, pool=object() if state.trial.replay else None, **more)


def still() -> torch.nn.Module:
    """Without dropout: what draws is not recorded."""
    model = build()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def swept(**more: Any) -> list[lt.Trial]:
    return [lora(f"t{n}", lr=1e-2 / (n + 1), seed=n, epochs=3, **more) for n in range(3)]


def equal_their_plain_loops(group: Group) -> list[UnitTape]:
    states = list(group.states)
    found: dict[str, list[float]] = {state.trial.name: [] for state in states}
    for told in steps(group, 99):
        for each in told:
            if each.error is not None:
                raise each.error
            if not each.over:
                found[each.state.trial.name].append(each.loss)
    tapes = [member.tape for member in group._members.values()]
    for state in states:
        group.settle(state)
        plain = lt.reference(state.trial)
        assert found[state.trial.name] == list(plain.losses)
        ours = state.chain.model.state_dict()
        assert [n for n, tensor in plain.state_dict.items() if not torch.equal(tensor, ours[n])] == []
    return tapes


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("more", [{}, {"precision": "bf16"}, {"clip_norm": 0.1}], ids=str)
def test_replayed_trials_equal_their_plain_loops(more: dict[str, Any]) -> None:
    device = CpuDevice(cap_bytes=1 << 20, jitter_s=2e-4)
    trials = swept(replay=True, build=still, **more)
    group = open_group(trials, device=device, cuts=EACH_BLOCK, num_places=3)
    tapes = equal_their_plain_loops(group)
    assert [tape.num_recorded for tape in tapes] == [2 * NUM_LAYERS + 1] * 3, "F0, and F and B of each layer"
    group.leave()
    assert device.arena.used_bytes == 0
    assert device.arena.peak_bytes <= device.arena.cap_bytes
    device.close()


@pytest.mark.usefixtures("played")
def test_a_batch_of_another_size_is_not_replayed() -> None:
    uneven = [(torch.arange(2 * n).view(n, 2) % 11, torch.arange(2 * n) % 11) for n in (3, 3, 3, 3, 2)]
    device = CpuDevice(cap_bytes=1 << 20)
    group = open_group(
        swept(replay=True, build=still, data=lambda: uneven), device=device, cuts=EACH_BLOCK, num_places=3
    )
    tapes = equal_their_plain_loops(group)
    assert [tape.num_recorded for tape in tapes] == [2 * NUM_LAYERS + 1] * 3
    group.leave()
    device.close()


@pytest.mark.usefixtures("played")
def test_shards_that_draw_are_not_recorded() -> None:
    device = CpuDevice(cap_bytes=1 << 20)
    group = open_group(swept(replay=True), device=device, cuts=EACH_BLOCK, num_places=3)
    tapes = equal_their_plain_loops(group)
    assert [tape.num_recorded for tape in tapes] == [1] * 3, "the embedding"
    group.leave()
    device.close()


@pytest.mark.usefixtures("played")
def test_shards_that_draw_from_python_are_not_recorded() -> None:
    import random

    class Shaky(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            random.random()
            return x * self.weight

    def shaky() -> torch.nn.Module:
        model = still()
        return torch.nn.Sequential(*model[:3], Shaky(), *model[3:])

    device = CpuDevice(cap_bytes=1 << 20)
    group = open_group(swept(replay=True, build=shaky), device=device, cuts=[*EACH_BLOCK, NUM_LAYERS + 2])
    tapes = equal_their_plain_loops(group)
    assert [tape.num_recorded for tape in tapes] == [2 * NUM_LAYERS + 1] * 3
    group.leave()
    device.close()


def test_without_the_users_word_nothing_is_recorded() -> None:
    device = CpuDevice(cap_bytes=1 << 20)
    group = open_group(swept(build=still), device=device, cuts=EACH_BLOCK)
    for _ in steps(group, 3):
        pass
    assert [member.tape for member in group._members.values()] == [None] * 3
    group.leave()
    device.close()


@pytest.mark.parametrize("num_places", [2, 3, 5])
def test_a_shard_stands_at_the_same_address_at_every_step(
    num_places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[int, set[int]] = {}
    right = WeightStream.take

    def take(self: WeightStream, position: int) -> Any:
        found = right(self, position)
        for piece, views in found.items():
            seen.setdefault(piece, set()).add(views[0].data_ptr())
        return found

    monkeypatch.setattr(WeightStream, "take", take)
    device = CpuDevice(cap_bytes=1 << 20)
    group = open_group(swept(), device=device, cuts=EACH_BLOCK, num_places=num_places)
    for _ in steps(group, 6):
        pass
    assert {len(addresses) for addresses in seen.values()} == {1}
    group.leave()
    device.close()
