"""What a user's model may do that blocks would do otherwise: it is trained as written, or refused."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="training needs the extra [torch]")
from torch import nn  # noqa: E402

import loadmaster.train as lt  # noqa: E402
from loadmaster.core.errors import InputError, RunError  # noqa: E402
from loadmaster.shards.device.cpu_device import CpuDevice  # noqa: E402

WIDTH = 16
CAP = 13_000  # less than three layers of that width take, with what they need to run


def data() -> list[Any]:
    chance = torch.Generator().manual_seed(1)
    rows = [torch.randn(4, WIDTH, generator=chance) for _ in range(12)]
    return list(zip(rows[::2], rows[1::2], strict=True))


def mse(out: Any, target: Any) -> Any:
    return (out - target).square().mean()


def sgd(weights: Any) -> Any:
    return torch.optim.SGD(weights, lr=0.02, momentum=0.9)


def plain(build: Callable[[], nn.Module], loss: Any = mse) -> dict[str, Any]:
    """A loop as anybody writes it."""
    torch.manual_seed(0)
    model = build()
    optimizer = sgd(model.parameters())
    for x, y in data():
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    return dict(model.state_dict())


def sharded(
    build: Callable[[], nn.Module],
    loss: Any = mse,
    *,
    feed: Any = data,
    optim: Any = sgd,
    cap_bytes: int = CAP,
) -> dict[str, Any]:
    """The same by shards."""
    one = lt.Trial(name="t", build=build, data=feed, loss=loss, optim=optim, seed=0)
    device = CpuDevice(cap_bytes=cap_bytes)
    runner = lt.open_runner(one, device=device, num_threads=1, optimizer_placement="device")
    try:
        for _ in runner.steps(device, 6):
            pass
        return {name: tensor.clone() for name, tensor in runner.state_dict().items()}
    finally:
        runner.close()


def layers(num: int = 3) -> Iterator[nn.Module]:
    for _ in range(num):
        yield nn.Linear(WIDTH, WIDTH)


def equal(build: Callable[[], nn.Module], *, cap_bytes: int = CAP) -> None:
    wanted, found = plain(build), sharded(build, cap_bytes=cap_bytes)
    assert wanted.keys() == found.keys()
    for name, tensor in wanted.items():
        assert torch.equal(tensor, found[name]), name


class Residual(nn.Sequential):
    def forward(self, x: Any) -> Any:
        return x + super().forward(x)


def test_a_sequential_with_a_forward_of_its_own_keeps_it() -> None:
    equal(lambda: nn.Sequential(Residual(nn.Linear(WIDTH, WIDTH), nn.ReLU()), *layers(2)))


def test_hooks_on_a_chain_inside_are_called() -> None:
    def build() -> nn.Module:
        inner = nn.Sequential(*layers(2))
        inner.register_forward_hook(lambda _, __, out: 2 * out)
        return nn.Sequential(inner, *layers(2))

    equal(build, cap_bytes=15_000)


def test_hooks_on_the_model_itself_are_called() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(*layers())
        model.register_forward_pre_hook(lambda _, args: (2 * args[0],))
        return model

    equal(build)


def test_hooks_on_gradients_are_refused() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(*layers())
        model[0].weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        return model

    with pytest.raises(InputError, match="has a hook on its gradient"):
        sharded(build)


class Stopped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = layers()

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            h = self.a(x)
        return self.c(self.b(x + h) + self.a(x))


class Cast(Stopped):
    def forward(self, x: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.a(x)
        return self.c(self.b(x + h.float()))


class Noisy(Stopped):
    def forward(self, x: Any) -> Any:
        return self.c(self.b(self.a(x + torch.randn(4, WIDTH))))


class Averaging(Stopped):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        self.seen.add_(1)
        return self.c(self.b(self.a(x))) * self.seen


class Counting(Stopped):
    calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        with torch.no_grad():
            h = self.a(x)
        return self.c(self.b(self.a(x) + h)) * self.calls


class Replacing(Averaging):
    def forward(self, x: Any) -> Any:
        self.seen = self.seen + 1
        return self.c(self.b(self.a(x + torch.randn(4, WIDTH)))) * self.seen


@pytest.mark.parametrize("kind", [Stopped, Cast, Noisy, Averaging, Counting, Replacing])
def test_what_a_trace_would_lose_trains_by_its_own_forward(kind: Any) -> None:
    equal(kind)


class Cached(nn.Module):
    """A table made when it is first needed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(WIDTH, WIDTH), None

    def forward(self, x: Any) -> Any:
        if self.table is None:
            self.table = torch.linspace(0.5, 1, WIDTH)
        return self.linear(x) * self.table


def test_a_table_that_a_module_makes_on_first_use_has_values() -> None:
    equal(lambda: nn.Sequential(Cached(), Cached(), nn.Linear(WIDTH, WIDTH)))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's, on its way to a fake tensor
def test_a_table_that_a_function_keeps_is_refused_where_it_has_no_values() -> None:
    @functools.lru_cache
    def table() -> Any:
        return torch.linspace(0.5, 1, WIDTH)

    with pytest.raises(RunError, match="its loss has no value"):
        sharded(lambda: nn.Sequential(*layers()), lambda out, y: mse(out * table(), y))


class Spectral(nn.Module):
    """Gives a complex tensor on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        h = self.linear(x if isinstance(x, torch.Tensor) else x[0] + x[1].real)
        return h, torch.fft.fft(h) / WIDTH


class Whole(nn.Module):
    def forward(self, x: Any) -> Any:
        return x[0] + x[1].real


def test_complex_tensors_across_a_cut_have_their_gradient() -> None:
    equal(lambda: nn.Sequential(Spectral(), Spectral(), Spectral(), Whole()))


def test_a_loader_of_a_stream_has_no_length() -> None:
    class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Any]:
            return iter(data())

    found = sharded(
        lambda: nn.Sequential(*layers()), feed=lambda: torch.utils.data.DataLoader(Stream(), batch_size=None)
    )
    wanted = plain(lambda: nn.Sequential(*layers()))
    assert all(torch.equal(tensor, found[name]) for name, tensor in wanted.items())


class Moving(nn.Module):
    """A buffer that is exchanged for another in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Any) -> Any:
        out = self.linear(x)
        self.mean = 0.5 * self.mean + 0.5 * out.detach().mean(0)
        return out + self.mean


def test_a_buffer_that_is_exchanged_in_the_last_shard_is_kept() -> None:
    equal(lambda: nn.Sequential(Moving(), Moving(), Moving()))


class Late(Moving):
    """Writes its buffer only later."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: Any) -> Any:
        self.steps += 1
        out = self.linear(x)
        if self.steps > 5:
            self.mean.add_(out.detach().mean(0))
        return out + self.mean


def test_a_buffer_that_is_written_later_only_is_refused() -> None:
    with pytest.raises(RunError, match="is first written after the first step"):
        sharded(lambda: nn.Sequential(Late(), Late(), Late()))


class Counting(torch.optim.SGD):
    """A schedule of its own."""

    def step(self, closure: Any = None) -> Any:
        self.turn = getattr(self, "turn", 0) + 1
        self.param_groups[0]["lr"] = 0.02 / self.turn
        return super().step(closure)


def test_an_optimizer_with_a_count_of_its_own_is_refused() -> None:
    with pytest.raises(InputError, match="for all parameters together and changes it"):
        sharded(lambda: nn.Sequential(*layers()), optim=lambda weights: Counting(weights, lr=0.02))


def test_parameters_that_are_not_the_models_are_refused() -> None:
    own = nn.Parameter(torch.ones(()))
    with pytest.raises(InputError, match="steps 1 that are not among them"):
        sharded(
            lambda: nn.Sequential(*layers()),
            lambda out, y: mse(out * own, y),
            optim=lambda weights: sgd([*weights, own]),
        )
