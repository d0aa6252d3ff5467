"""Trials on one frozen backbone: streamed once for all, each to the bits it would have alone."""

from typing import Any

import pytest
import torch
from torch import nn

import loadmaster.train as lt
from loadmaster.core.errors import DeviceMemoryError, InputError
from loadmaster.shards.device.cpu_device import CpuDevice
from loadmaster.train.backbone.group import Group, open_group, steps
from loadmaster.train.execute.trial_state import TrialState
from loadmaster.train.shard_engine import ShardEngine
from tests.train.lora_trials import NUM_LAYERS, WIDTH, lora, tokens

SHARD_BYTES = WIDTH * WIDTH * 4
EACH_BLOCK = list(range(NUM_LAYERS + 2))


def _sweep(**more: Any) -> list[lt.Trial]:
    return [lora(f"t{n}", lr=lr, seed=n, **more) for n, lr in enumerate((1e-2, 3e-3, 1e-3))]


def _device(cap_bytes: int = 1 << 20) -> CpuDevice:
    return CpuDevice(cap_bytes=cap_bytes, jitter_s=2e-4)


def _run(group: Group, num_steps: int = 99) -> dict[str, list[Any]]:
    told: dict[str, list[Any]] = {state.trial.name: [] for state in group.states}
    for step in steps(group, num_steps):
        for each in step:
            told[each.state.trial.name].append(each)
    return told


def _losses(told: list[Any]) -> list[float]:
    return [each.loss for each in told if not each.over and each.error is None]


def _equal(state: TrialState, group: Group, losses: list[float]) -> None:
    group.settle(state)
    plain = lt.reference(state.trial)
    assert losses == list(plain.losses)
    ours = state.chain.model.state_dict()
    assert [name for name, tensor in plain.state_dict.items() if not torch.equal(tensor, ours[name])] == []


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"accumulate": 2, "rng": "counter"},
        {"clip_norm": 0.1},
        {"precision": "bf16"},
        {"precision": "fp16"},
    ],
    ids=lambda more: str(more),
)
def test_three_trials_on_one_backbone_each_equal_their_plain_loop(more: dict[str, Any]) -> None:
    device = _device()
    group = open_group(_sweep(**more), device=device, cuts=EACH_BLOCK, num_places=3)
    told = _run(group)
    for state in list(group.states):
        _equal(state, group, _losses(told[state.trial.name]))
    group.leave()
    assert device.arena.used_bytes == 0
    assert device.arena.peak_bytes <= device.arena.cap_bytes
    device.close()


def test_the_backbone_goes_up_once_a_step_however_many_trials_share_it() -> None:
    per_trial = {}
    for count in (1, 3):
        device = _device()
        group = open_group(_sweep()[:count], device=device, cuts=EACH_BLOCK, num_places=2)
        told = _run(group, 3)
        per_trial[count] = told["t0"][-1].bytes_up
        assert {each[-1].loads for each in told.values()} == {told["t0"][-1].loads}
        group.leave()
        device.close()
    assert per_trial[1] >= 2 * (NUM_LAYERS - 1) * SHARD_BYTES
    assert per_trial[3] == per_trial[1] // 3


def test_boundaries_go_to_host_memory_where_the_cap_leaves_no_room_and_the_bits_stay() -> None:
    trials = _sweep(data=lambda: [(torch.arange(400).view(8, 50) % 11, torch.arange(400) % 11)] * 3)
    roomy = _device(1 << 22)
    group = open_group(trials, device=roomy, cuts=EACH_BLOCK)
    next(iter(steps(group, 1)))
    assert group.plan is not None
    assert group.plan.on_device
    needed = group.plan.peak_bytes
    group.leave()
    tight = _device(needed - 8 * SHARD_BYTES - 8 * 400 * WIDTH * 4)
    group = open_group(trials, device=tight, cuts=EACH_BLOCK)
    told = _run(group)
    assert group.plan is not None
    assert not group.plan.on_device
    for state in list(group.states):
        _equal(state, group, _losses(told[state.trial.name]))
    assert tight.arena.peak_bytes <= tight.arena.cap_bytes
    group.leave()
    assert tight.arena.used_bytes == 0


def test_a_member_that_fails_in_the_middle_leaves_the_others_bit_equal() -> None:
    trials = _sweep()
    calls = []

    def broken(out: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 3:
            raise ValueError("the user's own mistake")
        return out.float().mean()

    trials[1] = lora("t1", seed=1, loss=broken, verify=False)
    device = _device()
    group = open_group(trials, device=device, cuts=EACH_BLOCK, num_places=3)
    calls.clear()
    told = _run(group)
    assert "own mistake" in str(told["t1"][3].error)
    assert len(told["t1"]) == 4
    assert [state.trial.name for state in group.states] == ["t0", "t2"]
    for state in list(group.states):
        _equal(state, group, _losses(told[state.trial.name]))
    group.leave()
    assert device.arena.used_bytes == 0


def test_a_member_that_is_stopped_leaves_the_others_bit_equal() -> None:
    device = _device()
    group = open_group(_sweep(), device=device, cuts=EACH_BLOCK, num_places=3)
    first = _run(group, 2)
    group.remove_member(group.states[0])
    rest = _run(group)
    assert len(group.states) == 2
    for state in list(group.states):
        name = state.trial.name
        _equal(state, group, _losses(first[name]) + _losses(rest[name]))
    group.leave()


def test_another_backbone_is_refused_and_a_shared_one_is_held_once() -> None:
    device = _device()
    with pytest.raises(InputError, match="cannot join the group of 'a'"):
        open_group([lora("a"), lora("b", backbone=1)], device=device)
    group = open_group([lora("a"), lora("b", seed=3)], device=device)
    weights = [state.chain.model.get_parameter("1.weight").data_ptr() for state in group.states]
    assert weights[0] == weights[1]


def test_a_cap_that_holds_no_group_is_said() -> None:
    with pytest.raises(DeviceMemoryError, match="raise memory_cap"):
        open_group(_sweep(), device=_device(3000))


def test_the_benchmark_of_adapters_runs_small_and_moves_the_backbone_once_for_all() -> None:
    from benchmarks.train_lora import TINY, compared

    device = CpuDevice(cap_bytes=800_000)
    found = compared(TINY, device, 3)
    assert device.arena.used_bytes == 0
    assert found["all_loss"] != found["one_loss"]  # it goes on from where it was alone
    assert 0 < found["one_gb_up"] <= found["all_gb_up"] < 2 * 8 * 90e-6  # twice eight shards, not thrice that
    device.close()


def test_a_study_puts_adapter_trials_on_one_backbone_and_each_ends_with_its_own_bits(tmp_path: Any) -> None:
    trials = _sweep(eval_every=3, evaluate=lambda predict: {"x": predict(torch.arange(5)[None]).sum().item()})
    study = lt.Study(trials, dir=tmp_path, devices="cpu", memory_cap=1 << 20, checkpoint_every=3)
    result = study.fit()
    for trial in trials:
        plain = lt.reference(trial)
        ours = result[trial.name].state_dict()
        assert [n for n, tensor in plain.state_dict.items() if not torch.equal(tensor, ours[n])] == []
        assert result[trial.name].loss == plain.losses[-1]
    shared = [span for span in result.spans if "load" in span.name and "+" in span.name]
    assert shared, "one load served several trials"


def test_a_member_whose_steps_were_done_ahead_is_seen_where_its_study_thinks_it_is() -> None:
    from loadmaster.shards.model.built_model import build_trial
    from loadmaster.train.backbone.group_runner import GroupRegistry

    device = _device()
    groups = GroupRegistry()
    one, two = (
        groups.runner(build_trial(trial, device=device.torch_device), device) for trial in _sweep()[:2]
    )
    assert len(list(one.steps(device, 3))) == 3
    assert (one.step, two.step, two.state.step) == (3, 0, 3)
    assert [done.step for done in two.steps(device, 1)] == [1]
    after_one = {name: tensor.clone() for name, tensor in two.state_dict().items()}
    assert two.step == two.state.step == 1
    plain = lt.reference(lora("t1", lr=3e-3, seed=1, max_steps=1))
    assert all(torch.equal(tensor, after_one[name]) for name, tensor in plain.state_dict.items())
    list(two.steps(device, 99))
    list(one.steps(device, 99))
    for runner, trial in ((one, _sweep()[0]), (two, _sweep()[1])):
        ours = runner.state_dict()
        assert all(torch.equal(tensor, ours[n]) for n, tensor in lt.reference(trial).state_dict.items())
        runner.close()
    assert device.arena.used_bytes == 0


@pytest.mark.parametrize(("cap", "size"), [(50_000, 2), (1 << 20, 3)])
def test_a_study_predicts_shares_of_groups_not_trials_alone(cap: int, size: int, tmp_path: Any) -> None:
    plan = lt.Study(_sweep(), dir=tmp_path, devices="cpu", memory_cap=cap).plan()
    assert max(each.num_together for each in plan.trials) == size
    assert f"up to {size} trials share a frozen backbone" in str(plan)
    share = max(each.bytes_up for each in plan.trials)
    assert (share > 0) == (size == 2), "three find all there"
    device = CpuDevice(cap_bytes=cap)
    group = open_group(_sweep()[:size], device=device)
    told = _run(group, 6)
    for name in told:
        assert [each.bytes_up for each in told[name][2:6]] == pytest.approx([share] * 4, rel=0.1)
    group.leave()
    device.close()


@pytest.mark.parametrize("cap", [20_000, 24_000, 30_000, 40_000])
def test_trials_whose_backbone_leaves_no_room_for_a_group_stream_it_by_themselves(
    cap: int, tmp_path: Any
) -> None:
    trials = _sweep(build=_wide)
    study = lt.Study(trials, dir=tmp_path, devices="cpu", memory_cap=cap, optimizer_placement="device")
    plan = study.plan()
    assert {each.num_together for each in plan.trials} == {1}
    result = study.fit()
    backbone_bytes = sum(p.nbytes for p in _wide().parameters() if not p.requires_grad)
    for trial, planned in zip(trials, plan.trials, strict=True):
        plain = lt.reference(trial)
        ours = result[trial.name].state_dict()
        assert result[trial.name].error == ""
        assert [n for n, tensor in plain.state_dict.items() if not torch.equal(tensor, ours[n])] == []
        assert planned.host_bytes > backbone_bytes  # nobody holds it for them


def _wide() -> torch.nn.Module:
    """Layers so large that a cap which streams them has no room for two and a group's own needs."""
    from tests.train.lora_trials import Adapted, Frozen

    frozen = [Adapted(WIDTH, frozen_seed=n, dtype=torch.float32) for n in range(4)]
    for layer in frozen:
        layer.rest = torch.nn.Parameter(torch.ones(WIDTH * 60), requires_grad=False)
    return torch.nn.Sequential(Frozen(11, embed=True), *frozen, Frozen(11, embed=False))


@pytest.mark.parametrize("cap", [30_000, 36_000])
def test_a_group_beside_another_has_room_for_a_whole_step_not_for_its_weights_alone(
    cap: int, tmp_path: Any
) -> None:
    """Each cap holds one trial's step and two trials' weights: they must not stand there together."""
    trials = [*_sweep(), lora("t3", seed=3, optim=lambda ps: torch.optim.SGD(ps, lr=1e-2))]
    result = lt.Study(trials, dir=tmp_path, devices="cpu", memory_cap=cap).fit()
    for trial in trials:
        assert result[trial.name].error == ""
        ours = result[trial.name].state_dict()
        assert [n for n, t in lt.reference(trial).state_dict.items() if not torch.equal(t, ours[n])] == []


def test_a_group_whose_last_member_fails_gives_its_memory_back() -> None:
    def torn() -> Any:
        yield from tokens(0, 1)
        raise ValueError("no more rows")

    device = _device()
    group = open_group([lora("bad", data=torn)], device=device, cuts=EACH_BLOCK)
    told = _run(group)["bad"]
    assert [type(each.error) for each in told] == [type(None), ValueError]
    assert device.arena.used_bytes == 0
    assert device.tenants == []


@pytest.mark.parametrize("size", [2, 3])
def test_tokens_of_a_member_are_those_of_each_batch(size: int) -> None:
    data = [(torch.ones(size, n, dtype=torch.long), torch.ones(size, n, dtype=torch.long)) for n in (2, 7, 4)]
    group = open_group([lora("t", data=lambda: data, epochs=1)], device=_device(), cuts=EACH_BLOCK)
    told = _run(group)["t"]
    assert [each.num_tokens for each in told if not each.over] == [2 * size, 7 * size, 4 * size]
    group.leave()


def test_a_member_that_moves_to_another_device_of_this_process_joins_a_group_there(tmp_path: Any) -> None:
    """Its adapters would else stand on the first device, where nobody counts them any more."""
    opened: list[CpuDevice] = []
    begun: set[tuple[str, str]] = set()

    class Seen(ShardEngine):
        def open_device(self, name: str) -> Any:
            opened.append(super().open_device(name))
            return opened[-1]

        def open_runner(self, trial: lt.Trial, device: Any, plan: Any = None) -> Any:
            begun.add((trial.name, device.name))
            return super().open_runner(trial, device, plan)

    trials = [lora(f"t{n}", seed=n, epochs=epochs) for n, epochs in enumerate((9, 8, 7))]
    devices = ["cpu#0", "cpu#1"]
    engine = Seen(memory_cap_bytes=1 << 20)
    result = lt.Study(trials, dir=tmp_path, devices=devices, launcher="inline", engine=engine).fit()
    for trial in trials:
        ours = result[trial.name].state_dict()
        assert [n for n, t in lt.reference(trial).state_dict.items() if not torch.equal(t, ours[n])] == []
    ran = {(span.trial, span.device) for span in result.spans}
    assert len(ran) > len(trials), "somebody moved"
    assert ran == begun, "where a trial ran, its group was"
    assert [(device.arena.used_bytes, device.tenants) for device in opened] == [(0, [])] * 2


def test_spans_of_a_trial_are_not_those_of_one_whose_name_begins_with_its_own() -> None:
    trials = [lora(name, seed=n, epochs=1) for n, name in enumerate(("t", "t 2"))]
    group = open_group(trials, device=CpuDevice(cap_bytes=1 << 20), cuts=EACH_BLOCK)
    told = _run(group, 2)
    for name in ("t", "t 2"):
        labels = [span[1] for each in told[name] for span in each.spans]
        assert {label.rpartition(" ")[0] for label in labels if label.endswith((" F0", " B1"))} == {name}
    group.leave()


def test_trials_of_two_precisions_are_not_planned_as_one_group(tmp_path: Any) -> None:
    """A group reads its backbone in one dtype; the second trial holds one of its own."""
    trials = [lora("wide"), lora("narrow", precision="bf16"), lora("wide too", seed=1)]
    plan = lt.Study(trials, dir=tmp_path, devices="cpu", memory_cap=1 << 20).plan()
    assert [each.num_together for each in plan.trials] == [2, 1, 2]
    wide, narrow, third = (each.host_bytes for each in plan.trials)
    backbone_bytes = sum(p.nbytes for p in trials[0].build().parameters() if not p.requires_grad)
    assert narrow > backbone_bytes
    assert wide - third == backbone_bytes


class _Plain(nn.Module):
    """Frozen and trained layers that nothing but their own resets fill, so they could be built on `meta`."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.low = nn.Linear(16, 16), nn.Linear(16, 16)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.base(x) + self.low(x))


@pytest.mark.parametrize(("seeds", "joins"), [((0, 0), True), ((0, 1), False)])
def test_frozen_layers_that_reset_themselves_are_shared_where_their_numbers_are_equal(
    seeds: tuple[int, int], joins: bool
) -> None:
    x = torch.ones(2, 16)
    trials = [
        lt.Trial(
            name=f"t{number}",
            build=lambda: nn.Sequential(*(_Plain() for _ in range(3))),
            loss=nn.functional.mse_loss,
            data=lambda: [(x, x)] * 2,
            optim=lambda ps: torch.optim.SGD([p for p in ps if p.requires_grad], lr=0.1),
            seed=seed,
        )
        for number, seed in enumerate(seeds)
    ]
    device = CpuDevice(cap_bytes=1 << 22)
    if not joins:
        with pytest.raises(InputError, match="cannot join"):
            open_group(trials, device=device)
        return
    group = open_group(trials, device=device)
    assert [state.trial.name for state in group.states] == ["t0", "t1"]
