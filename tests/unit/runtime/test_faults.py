"""What may go wrong while a plan runs: each fault is told with its remedy, and the process stays usable."""

import traceback
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="running needs the extra [torch]")
from torch import nn  # noqa: E402

import loadmaster as lm  # noqa: E402
from loadmaster.core.errors import (  # noqa: E402
    ClusterError,
    DeviceMemoryError,
    LossError,
    RunError,
    UnknownNameError,
)
from loadmaster.runtime.placed import Placed  # noqa: E402
from loadmaster.runtime.shortage import find_full_device  # noqa: E402
from loadmaster.runtime.transport.devices import RunDevice  # noqa: E402
from loadmaster.zoo.example import Example  # noqa: E402
from tests.placing import captured, first_difference, placed, random_plan, trained  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def net() -> Example:
    torch.manual_seed(1)
    return Example(Net(), (torch.randn(8, 64),))


def on(devices: str, **wishes: Any) -> tuple[Placed, Example]:
    built = net()
    placement = lm.plan(lm.problem(captured(built), devices), algorithm="round_robin")
    return lm.place(built.model, placement, **wishes), built


def test_a_full_device_names_itself_both_peaks_and_a_plan_that_fits() -> None:
    built = net()
    before = [weight.detach().clone() for weight in built.model.parameters()]
    placement = lm.plan(lm.problem(captured(built), "cpu#0-1MB, cpu#1-1MB"), algorithm="single_device")
    assert placement.plan is not None
    predicted = int(placement.peak_bytes.max())
    model = lm.place(built.model, placement)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)

    def step(rows: int) -> None:
        model(torch.randn(rows, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with pytest.raises(DeviceMemoryError, match=r"needs .* of .* \(predicted peak .*plan_that_fits"):
        step(900)  # the plan was made for 8 rows
    assert all(map(torch.equal, before, model.parameters())), "weights are untouched"
    model.zero_grad()
    step(8)
    nearest = model.plan_that_fits()
    assert nearest.plan is not None
    assert (nearest.peak_bytes <= nearest.problem.cluster.usable_bytes).all()
    assert int(nearest.peak_bytes.max()) < predicted
    assert 0 < (nearest.plan.device != placement.plan.device).mean() < 1, "some ops moved, some stayed"
    again = lm.place(net().model, nearest)
    trained(again, built, steps=2)


def test_a_plan_that_fits_is_given_after_a_shortage_only() -> None:
    model, built = on("cpu#0-8MB, cpu#1-8MB")
    trained(model, built, steps=1)
    with pytest.raises(RunError, match="no device of this model was full"):
        model.plan_that_fits()


TORCH_SAYS = (
    "CUDA out of memory. Tried to allocate 198.00 MiB. GPU 1 has a total capacity of 139.80 GiB of which"
    " 132.60 GiB is free. Including non-PyTorch memory, this process has 7.14 GiB memory in use."
)


@pytest.mark.parametrize(
    ("says", "device", "tried"),
    [
        (TORCH_SAYS, 2, 198 << 20),
        (TORCH_SAYS.replace("GPU 1", "GPU 0").replace("198.00 MiB", "2.50 GiB"), 0, 5 << 29),
        ("CUDA error: out of memory", 0, 0),
    ],
)
def test_torchs_error_says_which_gpu_was_full(says: str, device: int, tried: int) -> None:
    places = ["cuda:0", "cpu", "cuda:1"]
    devices = [RunDevice(name, torch.device(name), 1 << 30, False) for name in places]
    assert find_full_device(torch.OutOfMemoryError(says), devices) == (device, tried)


class Hungry(nn.Module):
    """Asks for more than there is, forward or backward, until it is told not to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Any) -> Any:
        return self.second(torch.ops.loadmaster_tests.eats(self.first(x)))


@pytest.fixture
def appetite() -> Any:
    """An op that runs out of memory as torch does; in `when` is where."""
    when: set[str] = set()

    def eat(phase: str, x: Any) -> Any:
        if phase in when:
            raise torch.OutOfMemoryError(TORCH_SAYS)
        return x.clone()

    with torch.library._scoped_library("loadmaster_tests", "DEF") as library:
        library.define("eats(Tensor x) -> Tensor")
        library.define("eats_back(Tensor x) -> Tensor")
        for name, phase in (("eats", "forward"), ("eats_back", "backward")):
            library.impl(name, lambda x, phase=phase: eat(phase, x), "CPU")
            torch.library.register_fake(f"loadmaster_tests::{name}", torch.clone, lib=library)
        torch.library.register_autograd(
            "loadmaster_tests::eats", lambda _, grad: torch.ops.loadmaster_tests.eats_back(grad), lib=library
        )
        yield when


def test_a_gpu_that_is_full_is_told_as_a_logical_device_is(appetite: set[str]) -> None:
    built = Example(Hungry(), (torch.randn(8, 64),))
    before = [weight.detach().clone() for weight in built.model.parameters()]
    model = lm.place(built.model, lm.plan(lm.problem(captured(built), "cpu"), algorithm="single_device"))
    appetite.add("forward")
    with pytest.raises(
        DeviceMemoryError, match=r"cpu.* is full: .*predicted peak .*198.0 MiB more"
    ) as caught:
        model(*built.args)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError), "torch's own words are there, too"
    appetite.clear()
    appetite.add("backward")
    with pytest.raises(torch.OutOfMemoryError) as raw:
        model(*built.args).sum().backward()
    assert "198.0 MiB more" in str(model.full(raw.value))
    assert all(map(torch.equal, before, model.parameters())), "weights are untouched"
    appetite.clear()
    model.zero_grad()
    trained(model, built, steps=2)


@pytest.mark.parametrize("inside", [True, False])
def test_a_loss_that_is_no_number_is_reported_at_its_step(inside: bool) -> None:
    class Loss(Net):
        def forward(self, x: Any) -> Any:
            y = super().forward(x)
            return y.mean() if inside else y

    torch.manual_seed(1)
    built = Example(Loss(), (torch.rand(8, 64) + 10,))
    for how, catches in (("raise", pytest.raises(LossError)), ("warn", pytest.warns(RuntimeWarning))):
        placement = lm.plan(lm.problem(captured(built), "cpu#0-8MB, cpu#1-8MB"), algorithm="round_robin")
        model = lm.place(built.model, placement, on_nan=how)
        x = built.args[0]
        out = model(x)
        (out if inside else out.sum()).backward()
        with catches as caught:
            out = model(x * float("nan")) if inside else model(x)
            (out if inside else (out * float("nan")).sum()).backward()
        text = str(caught.value) if how == "raise" else str(caught[0].message)
        assert "step 2" in text
        model.zero_grad()


def test_nobody_looks_where_nobody_shall() -> None:
    model, built = on("cpu#0-8MB, cpu#1-8MB", on_nan=None)
    (model(*built.args) * float("nan")).sum().backward()
    assert torch.isnan(model.layers[0].weight.grad).any()
    with pytest.raises(UnknownNameError, match="raise"):
        on("cpu#0-8MB", on_nan="rise")


def test_a_missing_device_is_named_with_those_there_are() -> None:
    built = net()
    placement = lm.plan(lm.problem(captured(built), "2xRTX3090"), algorithm="round_robin")
    if torch.cuda.is_available():
        pytest.skip("needs a machine without GPUs")
    with pytest.raises(
        ClusterError, match=r"needs gpu0 \(RTX3090\), this machine has cpu; plan on what it has"
    ):
        lm.place(built.model, placement)


def test_another_shape_makes_another_graph_and_says_so() -> None:
    class Any2d(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, 8))

        def forward(self, x: Any) -> Any:
            return (x @ self.weight).relu().mean()

    built = Example(Any2d(), (torch.randn(4, 5, 8),))
    model = placed(built, random_plan(captured(built), 2, 0))
    assert not model(*built.args).isnan()
    assert model.notes == ()
    model(torch.randn(7, 8)).backward()
    assert any("exported the model again for inputs of [7, 8]" in note for note in model.notes)


def test_weights_that_are_edited_in_place_are_the_ones_that_run() -> None:
    model, built = on("cpu#0-8MB, cpu#1-8MB")
    plain = net()
    trained(model, built, steps=1)
    trained(plain.model, plain, steps=1)
    for one in (model, plain.model):
        with torch.no_grad():
            one.layers[2].weight.mul_(0.5)
            one.layers[3].weight.data = one.layers[3].weight.data * 2
            one.layers[4].weight = nn.Parameter(one.layers[4].weight.detach() + 1)
    assert first_difference(trained(plain.model, plain, steps=2), trained(model, built, steps=2)) == ""


def test_an_edit_between_forward_and_backward_is_torchs_own_error() -> None:
    model, built = on("cpu#0-8MB, cpu#1-8MB")
    loss = model(*built.args).square().mean()
    with torch.no_grad():
        model.layers[3].weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    model.zero_grad()
    model(*built.args).square().mean().backward()


def test_an_error_of_the_users_own_code_has_its_own_traceback() -> None:
    class Strict(Net):
        def forward(self, x: Any) -> Any:
            if x.shape[0] == 3:
                raise KeyError("three rows are not for me")
            return super().forward(x)

    torch.manual_seed(1)
    built = Example(Strict(), (torch.randn(8, 64),))
    model = placed(built, random_plan(captured(built), 2, 0))
    model(*built.args)
    with pytest.raises(KeyError, match="three rows") as caught:
        model(torch.randn(3, 64))
    assert "three rows are not for me" in "".join(traceback.format_tb(caught.tb)) or any(
        frame.name == "forward" and "test_faults" in frame.filename
        for frame in traceback.extract_tb(caught.tb)
    )
    model(*built.args).sum().backward()


def test_an_error_in_a_loss_leaves_the_model_usable() -> None:
    model, built = on("cpu#0-8MB, cpu#1-8MB")
    with pytest.raises(ZeroDivisionError):
        _ = model(*built.args).sum() / (1 // 0)
    trained(model, built, steps=1)


def test_an_interrupt_in_the_backward_pass_leaves_the_model_usable() -> None:
    model, built = on("cpu#0-8MB, cpu#1-8MB")
    plain = net()

    def stop(grad: Any) -> None:
        raise KeyboardInterrupt

    out = model(*built.args)
    out.register_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        out.sum().backward()
    model.zero_grad()
    del out
    assert first_difference(trained(plain.model, plain, steps=2), trained(model, built, steps=2)) == ""


@pytest.mark.slow
def test_two_hundred_steps_of_changing_batches_leave_nothing_behind() -> None:
    model, built = on("cpu#0-8MB, cpu#1-8MB")
    optimizer = torch.optim.AdamW(model.parameters())
    accounts = model._engine.accounts
    assert accounts is not None
    flat: list[list[int]] = []
    rng = np.random.default_rng(0)
    for at in range(200):
        rows = int(rng.integers(2, 17)) if at % 50 else 8
        model(torch.randn(rows, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if at % 50 == 0 and at:
            flat.append(list(accounts.live_bytes))
    assert flat[0] == flat[1] == flat[2]
    assert len(model._engine.graphs) <= 3, "one graph for any batch"
    assert built.model.training
