"""A trial cut into shards trains to the bit like a plain resident loop, wherever its optimizer steps."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import loadmaster.train as lt
from loadmaster.shards.device.cpu_device import CpuDevice
from loadmaster.shards.model.blocks import build_chain
from loadmaster.shards.plan.layout import lay_out

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
}
CUTS = {1: [0], 2: [0, 3], 5: [0, 1, 2, 3, 5]}


class Residual(nn.Module):
    """Dropout and batch norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(F.relu(self.norm(self.linear(x))))


class Skipping(nn.Module):
    """Takes a pair, changes the first, passes the second on: a skip connection across cuts."""

    def __init__(self, width: int, *, last: bool = False) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(width, width), last

    def forward(self, value: Any) -> Any:
        x, skip = value if isinstance(value, tuple) else (value, value)
        x = F.relu(self.linear(x), inplace=True)
        return x + skip if self.last else (x, skip)


class Gated(nn.Module):
    """Two layers read the same input, which stays fp32 throughout: its gradient is a sum in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.wide = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.sigmoid(self.gate(x)) * self.wide(x)


def _gated() -> nn.Module:
    return nn.Sequential(*(Gated(8) for _ in range(5)), nn.Linear(8, 4))


def _residual() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), *(Residual(16) for _ in range(4)), nn.Linear(16, 4))


def _skipping() -> nn.Module:
    middle = [Skipping(16, last=number == 3) for number in range(4)]
    return nn.Sequential(nn.Linear(8, 16), *middle, nn.Linear(16, 4))


def _tied() -> nn.Module:
    model = nn.Sequential(
        nn.Embedding(11, 8), *(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 11, bias=False)
    )
    model[5].weight = model[0].weight
    return model


def _vectors() -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(n, 8, generator=generator), torch.randint(4, (n,), generator=generator))
        for n in (6, 6, 6, 3)
    ]


def _tokens() -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randint(11, (5,), generator=generator), torch.randint(11, (5,), generator=generator))] * 3


MODELS = {
    "residual": (_residual, _vectors),
    "skip": (_skipping, _vectors),
    "tied": (_tied, _tokens),
    "gated": (_gated, _vectors),
}


def _trial(model: str, optimizer: str, **more: Any) -> lt.Trial:
    build, data = MODELS[model]
    return lt.Trial(
        name="t", build=build, loss=F.cross_entropy, data=data, optim=OPTIMIZERS[optimizer], epochs=2, **more
    )


def _placement(kind: str, num_pieces: int) -> list[Any]:
    mixes = {"hybrid": ["device", "host"], "pinned": ["pinned", "host", "device"]}
    return list(itertools.islice(itertools.cycle(mixes.get(kind, [kind])), num_pieces))


def _equals_plain(trial: lt.Trial, cuts: list[int], kind: str) -> None:
    device = CpuDevice(cap_bytes=1 << 24, jitter_s=1e-4)
    chain = build_chain(trial, trial.build())
    num_pieces = len(lay_out(chain, cuts, compute_dtype=None, castable=[False] * 99).pieces)
    runner = lt.open_runner(
        trial,
        device=device,
        cuts=cuts,
        placement=_placement(kind, num_pieces),
        num_slots=2,
        depth=1,
        num_threads=1,
    )
    losses = [done.loss for done in runner.steps(device, 99)]
    names = runner.state.chain.parameter_name
    on_host = [
        names[number]
        for host in runner.state.pieces
        if runner.config.placement[host.piece.index] == "host"
        for number in host.piece.parameters
    ]
    plain = lt.reference(trial, host=on_host)
    assert losses == list(plain.losses)
    ours = runner.state_dict()
    differing = [name for name, tensor in plain.state_dict.items() if not torch.equal(tensor, ours[name])]
    assert differing == []
    runner.close()
    assert device.arena.used_bytes == 0
    device.close()


@pytest.mark.parametrize("kind", ["device", "host", "hybrid", "pinned"])
@pytest.mark.parametrize("num_shards", [1, 2, 5])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_dropout_batch_norm_and_an_uneven_last_batch_equal_the_plain_loop(
    optimizer: str, num_shards: int, kind: str
) -> None:
    _equals_plain(_trial("residual", optimizer), CUTS[num_shards], kind)


@pytest.mark.parametrize("kind", ["device", "host", "hybrid"])
@pytest.mark.parametrize("more", [{"accumulate": 3}, {"clip_norm": 0.5}, {"accumulate": 2, "clip_norm": 0.5}])
@pytest.mark.parametrize("model", list(MODELS))
def test_accumulation_and_clipping_equal_the_plain_loop(model: str, more: dict[str, Any], kind: str) -> None:
    _equals_plain(_trial(model, "adamw", **more), CUTS[5], kind)


@pytest.mark.parametrize("kind", ["device", "host", "pinned"])
@pytest.mark.parametrize("num_shards", [2, 5])
@pytest.mark.parametrize("model", ["skip", "tied"])
def test_tied_weights_and_skips_across_cuts_equal_the_plain_loop(
    model: str, num_shards: int, kind: str
) -> None:
    _equals_plain(_trial(model, "momentum"), CUTS[num_shards], kind)


class Summed(torch.optim.Optimizer):
    """Makes its state where it is made, and nowhere else; so does Adagrad in torch 2.11."""

    def __init__(self, params: Any, lr: float = 0.1, start: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "start": start})
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["sum"] = torch.full_like(weight, group["start"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                total = self.state[weight]["sum"].addcmul_(weight.grad, weight.grad)
                weight.addcdiv_(weight.grad, total.sqrt(), value=-group["lr"])


class Noted(torch.optim.SGD):
    """Keeps something among its state that is of no parameter."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.state["note"] = 3


def _first_otherwise(params: Any) -> list[dict[str, Any]]:
    """Adagrad's constructor looks at its own start, not at a group's."""
    first, *others = params
    return [{"params": [first], "initial_accumulator_value": 0.5}, {"params": others}]


@pytest.mark.parametrize("kind", ["device", "host", "pinned"])
@pytest.mark.parametrize(
    "optim",
    [
        lambda ps: Summed(ps, lr=0.05, start=0.25),
        lambda ps: torch.optim.Adagrad(ps, lr=0.05, initial_accumulator_value=0.25),
        lambda ps: torch.optim.Adagrad(_first_otherwise(ps), lr=0.05),
        lambda ps: Noted(ps, lr=0.05),
    ],
    ids=["ours", "adagrad", "adagrad in groups", "noted"],
)
def test_state_that_an_optimizers_constructor_makes_is_there_for_each_shard(optim: Any, kind: str) -> None:
    build, data = MODELS["residual"]
    trial = lt.Trial(name="t", build=build, loss=F.cross_entropy, data=data, optim=optim, epochs=3)
    _equals_plain(trial, CUTS[5], kind)


@pytest.mark.parametrize("kind", ["device", "host", "hybrid"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("model", list(MODELS))
def test_narrow_compute_equals_autocast_over_fp32_weights(model: str, precision: Any, kind: str) -> None:
    _equals_plain(_trial(model, "adamw", precision=precision), CUTS[5], kind)


def test_a_schedule_changes_the_rate_at_the_same_steps_as_a_plain_loop() -> None:
    halve = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)  # noqa: E731
    _equals_plain(_trial("residual", "adamw", lr_schedule=halve), CUTS[5], "hybrid")


def test_the_plan_of_a_model_larger_than_the_cap_trains_to_the_same_bits_below_it() -> None:
    trial = lt.Trial(
        name="wide",
        build=lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(12))),
        loss=F.mse_loss,
        data=lambda: [(torch.ones(4, 64), torch.zeros(4, 64))] * 4,
        optim=OPTIMIZERS["adamw"],
    )
    resident_bytes = 12 * 64 * 65 * 4 * 3
    device = CpuDevice(cap_bytes=resident_bytes // 2)
    runner = lt.open_runner(trial, device=device, optimizer_placement="device")
    losses = [done.loss for done in runner.steps(device, 9)]
    assert losses == list(lt.reference(trial).losses)
    assert device.arena.peak_bytes <= device.arena.cap_bytes < resident_bytes
    runner.close()


def test_a_parameter_that_never_gets_a_gradient_is_named() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    trial = lt.Trial(
        name="h",
        build=lambda: nn.Sequential(Half()),
        loss=F.cross_entropy,
        data=_vectors,
        optim=OPTIMIZERS["sgd"],
    )
    device = CpuDevice(cap_bytes=1 << 20)
    runner = lt.open_runner(trial, device=device, optimizer_placement="device")
    with pytest.raises(RuntimeError, match=r"0\.idle\.weight"):
        next(runner.steps(device, 1))
