"""Defects of the published systems in shards, units and copies: what must not happen here, by number.

Those of studies (R1, R15-R19, R21, R22, R25-R27) are in test_regressions.py; docs/train.md has the table.
"""

import itertools
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import loadmaster.train as lt
from loadmaster.core.errors import DeviceMemoryError, InputError
from loadmaster.shards.device.cpu_device import CpuDevice
from loadmaster.train.shard_engine import ShardEngine

WIDTH = 32


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def rows() -> list[Any]:
    made = torch.Generator().manual_seed(3)
    return [(torch.randn(4, WIDTH, generator=made), torch.randn(4, WIDTH, generator=made)) for _ in range(5)]


def trial(**more: Any) -> lt.Trial:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))

    given: dict[str, Any] = {"name": "t", "build": build, "loss": F.mse_loss, "data": rows, "optim": sgd}
    return lt.Trial(**(given | more))


def trained(one: lt.Trial, device: CpuDevice, **more: Any) -> Any:
    runner = lt.open_runner(one, device=device, num_threads=1, **more)
    losses = [done.loss for done in runner.steps(device, 99)]
    weights = {name: tensor.clone() for name, tensor in runner.state_dict().items()}
    runner.close()
    return losses, weights


def same(one: lt.Trial, found: Any) -> bool:
    plain = lt.reference(one)
    return found[0] == list(plain.losses) and all(
        torch.equal(tensor, found[1][name]) for name, tensor in plain.state_dict.items()
    )


@pytest.mark.slow
def test_r2_shards_are_an_exact_partition_under_every_cap() -> None:
    def build() -> nn.Module:
        sizes = [8, 64, 8, 96, 16, 16, 128, 8, 8, 4]
        return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))

    data = lambda: [(torch.ones(2, 8), torch.zeros(2, 4))]  # noqa: E731
    one = trial(build=build, data=data, optim=torch.optim.AdamW)
    seen = set()
    for cap in [int(2**20 * 0.85**k) for k in range(40)]:
        try:
            plan = lt.open_runner(one, device=CpuDevice(cap_bytes=cap), num_threads=1).plan
        except DeviceMemoryError:
            break
        assert plan is not None
        blocks = [block for low, high in plan.layout.cuts for block in range(low, high)]
        assert blocks == list(range(9))
        seen.add(plan.layout.num_shards)
    assert len(seen) > 2  # caps made a difference


@pytest.mark.parametrize("cuts", [[1, 3], [0, 3, 3], [0, 4, 2], [0, 6], [], [0, 99]])
def test_r3_cuts_that_are_no_partition_are_refused(cuts: list[int]) -> None:
    with pytest.raises(InputError, match="cuts"):
        lt.open_runner(trial(), device=CpuDevice(cap_bytes=1 << 20), cuts=cuts)


def test_r3_blocks_that_leave_a_layer_out_are_refused_by_its_name() -> None:
    with pytest.raises(InputError, match=r"5\.weight"):
        lt.open_runner(trial(blocks=lambda m: list(m)[:5]), device=CpuDevice(cap_bytes=1 << 20))


class Words(nn.Module):
    """Two integer inputs, out comes a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(7, WIDTH), nn.Embedding(9, WIDTH)

    def forward(self, words: torch.Tensor, places: torch.Tensor) -> dict[str, Any]:
        return {"x": self.words(words) + self.places(places), "mask": words != 0}


class Masked(nn.Module):
    """Takes a dict or a tuple, gives the other."""

    def __init__(self, *, last: bool) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(WIDTH, 7 if last else WIDTH), last

    def forward(self, *given: Any, **named: Any) -> Any:
        value = given[0] if given else named
        x, mask = (value["x"], value["mask"]) if isinstance(value, dict) else value
        x = self.linear(x) * mask[..., None]
        return x.flatten(0, 1) if self.last else (x, mask)


@pytest.mark.parametrize("cuts", [[0], [0, 1], [0, 1, 2]])
def test_r4_tokens_several_inputs_dicts_and_tuples_cross_cuts(cuts: list[int]) -> None:
    made = torch.Generator().manual_seed(1)
    words = torch.randint(7, (3, 2, 5), generator=made)
    places = torch.arange(5).expand(2, 5)
    one = trial(
        build=lambda: nn.Sequential(Words(), Masked(last=False), Masked(last=True)),
        data=lambda: [((each, places), each.flatten()) for each in words],
        loss=F.cross_entropy,
    )
    assert same(one, trained(one, CpuDevice(cap_bytes=1 << 20), cuts=cuts, optimizer_placement="device"))


class Noted(nn.Module):
    """Says whether autograd listened when it ran."""

    log: list[tuple[int, bool]]

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.linear = number, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        type(self).log.append((self.number, y.requires_grad))
        return y


def test_r5_forward_units_build_no_graph() -> None:
    one = trial(
        verify=False, build=lambda: nn.Sequential(*(Noted(n) for n in range(3))), data=lambda: rows()[:1]
    )
    Noted.log = []
    device = CpuDevice(cap_bytes=1 << 20)
    runner = lt.open_runner(one, device=device, cuts=[0, 1, 2], optimizer_placement="device", num_threads=1)
    Noted.log = []
    list(runner.steps(device, 1))
    assert Noted.log == [(0, False), (1, False), (2, True), (1, True), (0, True)]


def test_r6_nothing_goes_down_after_a_forward_unit() -> None:
    sent: list[str] = []

    class Watched(CpuDevice):
        def down(self, copies: Any, *, after: Any, label: str, lane: int = 0) -> Any:
            sent.append(label)
            return super().down(copies, after=after, label=label, lane=lane)

    device = Watched(cap_bytes=1 << 20)
    one = trial(evaluate=lambda predict: {"sum": predict(rows()[0][0]).sum().item()})
    runner = lt.open_runner(one, device=device, cuts=range(6), placement=["device"] * 6, num_slots=2)
    list(runner.steps(device, 1))
    runner.settle()
    assert sent  # what a step changed
    sent.clear()
    runner.evaluate(device)  # forward units alone
    runner.settle()
    assert sent == []
    runner.close()


class Slow(nn.Module):
    """Takes its time, so that a copy can run meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.004)
        return self.linear(x)


def test_r7_weights_come_up_while_another_shard_computes() -> None:
    one = trial(build=lambda: nn.Sequential(*(Slow() for _ in range(6))), data=lambda: rows()[:3])
    size = 4 * (WIDTH * WIDTH + WIDTH)
    device = CpuDevice(cap_bytes=1 << 20, copy_bytes_per_s=size / 0.002)
    runner = lt.open_runner(one, device=device, cuts=range(6), placement=["host"] * 6, num_slots=3)
    spans = list(runner.steps(device, 3))[-1].spans
    runner.close()
    ups = [(start, end) for lane, _, start, end in spans if lane == "up"]
    computes = [(start, end) for lane, _, start, end in spans if lane == "compute"]
    beside = [up for up in ups if any(up[0] < end and start < up[1] for start, end in computes)]
    assert ups
    assert len(beside) > len(ups) / 2


def test_r8_a_huge_shard_after_tiny_ones_never_passes_the_cap() -> None:
    def build() -> nn.Module:
        sizes = [8, 8, 256, 8, 8, 256, 8, 8]
        return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))

    data = lambda: [(torch.ones(2, 8), torch.zeros(2, 8))] * 4  # noqa: E731
    one = trial(build=build, data=data, optim=torch.optim.AdamW)
    for cap in (90_000, 60_000, 45_000, 30_000):
        device = CpuDevice(cap_bytes=cap, jitter_s=1e-3)
        try:
            found = trained(one, device, optimizer_placement="device")
        except DeviceMemoryError:
            assert cap < 80_000
            continue
        assert device.arena.peak_bytes <= cap
        assert same(one, found)


def test_r9_every_slab_is_pinned_once_and_no_step_allocates() -> None:
    pinned: list[int] = []

    class Watched(CpuDevice):
        def pin(self, memory: torch.Tensor) -> None:
            pinned.append(memory.data_ptr())

    device = Watched(cap_bytes=1 << 20)
    taken, allocate = [0], device.arena.allocate

    def counted(size: int) -> torch.Tensor:
        taken[0] += 1
        return allocate(size)

    device.arena.allocate = counted
    runner = lt.open_runner(trial(), device=device, cuts=range(6), placement=["device"] * 6, num_slots=2)
    slabs = [host.slab.data_ptr() for host in runner.state.pieces]
    steps = runner.steps(device, 5)
    next(steps)
    before = taken[0]
    list(steps)
    assert taken[0] == before > 0
    assert sorted(pinned) == sorted(slabs)
    assert [host.slab.data_ptr() for host in runner.state.pieces] == slabs
    runner.close()


def test_r10_one_optimizer_state_for_each_parameter() -> None:
    device = CpuDevice(cap_bytes=1 << 20)
    one = trial(optim=torch.optim.AdamW)
    runner = lt.open_runner(one, device=device, cuts=range(6), placement=["device"] * 6, num_slots=2)
    list(runner.steps(device, 2))
    held = [name for name in runner.snapshot()[0] if name.startswith("optim/") and name.endswith("/exp_avg")]
    assert sorted(held) == sorted(f"optim/{n}/exp_avg" for n, _ in one.build().named_parameters())
    runner.close()


def test_r11_the_loss_of_fp16_is_told_unscaled() -> None:
    wide, narrow = (
        lt.reference(trial()).losses,
        trained(trial(precision="fp16"), CpuDevice(cap_bytes=1 << 20)),
    )
    assert narrow[0] == pytest.approx(list(wide), rel=0.02)


def test_r20_a_trial_that_changes_devices_every_step_reads_what_has_landed() -> None:
    one = trial(optim=torch.optim.AdamW)
    devices = [CpuDevice(f"cpu#{at}", cap_bytes=1 << 20, jitter_s=2e-3, seed=at) for at in range(2)]
    runner = lt.open_runner(one, device=devices[0], cuts=range(6), placement=["device"] * 6, num_slots=2)
    losses = [next(runner.steps(devices[at % 2], 1)).loss for at in range(5)]
    assert same(one, (losses, runner.state_dict()))
    runner.close()


def test_r24_host_memory_is_what_was_planned() -> None:
    engine = ShardEngine(memory_cap_bytes=1 << 20)
    wide = lambda: nn.Sequential(*(nn.Linear(200, 200) for _ in range(6)))  # noqa: E731
    data = lambda: [(torch.ones(2, 200), torch.zeros(2, 200))]  # noqa: E731
    one = trial(build=wide, data=data, optim=torch.optim.AdamW, precision="bf16")
    planned = engine.plan_trial(one, ["cpu"]).host_bytes
    runner: Any = engine.open_runner(one, engine.open_device("cpu"))
    held = sum(host.slab.nbytes for host in runner.state.pieces)
    assert 0.8 * planned <= held <= 1.05 * planned
    runner.close()


def test_r26_devices_are_found_not_assumed() -> None:
    count = torch.cuda.device_count()
    assert ShardEngine().device_names("auto") == ([f"cuda:{at}" for at in range(count)] or ["cpu"])


def test_r28_a_rate_is_the_middle_of_five_or_more_after_a_warm_up() -> None:
    from loadmaster.shards.plan.host_rates import make_pieces, measure_rates_beside
    from loadmaster.shards.plan.rates import Rates

    found = measure_rates_beside(make_pieces(1, 4096), lambda: time.sleep(1e-3), num_threads=1)
    assert len(found) >= 5
    assert "spread" in Rates.__dataclass_fields__
