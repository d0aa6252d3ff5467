"""Spilled weights: they stay at home, are copied ahead of use and dropped, and the numbers are the same."""

import gc
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="running needs the extra [torch]")
from torch import nn  # noqa: E402

import loadmaster as lm  # noqa: E402
from loadmaster.core.errors import DeviceMemoryError, RunError  # noqa: E402
from loadmaster.graph.spill import max_outgoing_bytes  # noqa: E402
from loadmaster.runtime.placed import build_placed_model  # noqa: E402
from loadmaster.runtime.spill import weight_carriers  # noqa: E402
from loadmaster.zoo.example import Example  # noqa: E402
from tests.placing import captured, first_difference, trained  # noqa: E402
from tests.spilling import COMPUTES, STORES, spilled_model, spilling  # noqa: E402
from tests.torch_models import NAMES, example  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH, ROWS, DEEP = 64, 4, 6


class Deep(nn.Module):
    """Weights outweigh everything else; every other layer is a plain matrix that is read as a view."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEEP))

    def forward(self, x: Any) -> Any:
        for at, layer in enumerate(self.layers):
            x = layer(x).tanh() if at % 2 else torch.mm(x, layer.weight.t()).tanh()
        return x.square().mean()


def deep() -> Example:
    torch.manual_seed(0)
    return Example(Deep(), (torch.randn(ROWS, WIDTH),))


WEIGHT = 4 * WIDTH * WIDTH


def all_of(name: str) -> bool:
    return True


@pytest.mark.parametrize("name", ["gpt2", "resnet", "lstm"])
@pytest.mark.parametrize("window_bytes", [1, 1 << 15])
def test_numbers_are_those_of_plain_training(name: str, window_bytes: int) -> None:
    plain, again = example(name), example(name)
    model = spilled_model(again, all_of, window_bytes=window_bytes)
    assert first_difference(trained(plain.model, plain), trained(model, again)) == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name != "branching"])
@pytest.mark.parametrize("every", [1, 3])
def test_numbers_of_every_family_are_those_of_plain_training(name: str, every: int) -> None:
    plain, again = example(name), example(name)
    model = spilled_model(again, lambda weight: hash_of(weight) % every == 0)
    assert first_difference(trained(plain.model, plain), trained(model, again)) == ""


@pytest.mark.parametrize("name", ["gpt2", "lstm"])
@pytest.mark.slow
def test_the_generated_code_of_whole_devices_gives_the_same_numbers(name: str) -> None:
    plain, again = example(name), example(name)
    model = spilled_model(again, all_of, window_bytes=1 << 14)
    engine = model._engine
    assert engine.spill is not None
    engine.accounts = engine.spill.accounts = None  # as where no device is a part of one
    assert first_difference(trained(plain.model, plain), trained(model, again)) == ""


def hash_of(name: str) -> int:
    return sum(map(ord, name))


def test_weights_state_and_gradients_stay_at_home() -> None:
    built = deep()
    model = spilled_model(built, all_of, window_bytes=2 * WEIGHT)
    optimizer = torch.optim.AdamW(model.parameters())
    model(*built.args).backward()
    optimizer.step()
    gc.collect()
    accounts = model._engine.accounts
    assert accounts is not None
    assert accounts.live_bytes[STORES] == DEEP * (
        4 * WEIGHT + 4
    )  # weight, gradient, two moments, a step count
    assert accounts.live_bytes[COMPUTES] == 0
    assert all(accounts.owner(weight.grad) == STORES for weight in model.parameters())


@pytest.mark.parametrize("window", [1, 2, 3, DEEP])
def test_no_more_copies_than_the_window_are_ever_there(window: int) -> None:
    built = deep()
    model = spilled_model(built, all_of, window_bytes=window * WEIGHT)
    accounts = model._engine.accounts
    assert accounts is not None
    most, add = [0], accounts.add

    def counting(tree: Any, device: int, what: str) -> None:
        add(tree, device, what)
        most[0] = max(most[0], dict(accounts.list_standing(COMPUTES)).get("copies", 0) + copies())

    def copies() -> int:
        return sum(
            size for name, size in accounts.list_standing(COMPUTES) if name.startswith("a copy of weight")
        )

    accounts.add = counting  # type: ignore[method-assign]
    model(*built.args).backward()
    assert most[0] == window * WEIGHT


@pytest.mark.slow
def test_the_predicted_peak_is_not_exceeded() -> None:
    for window in (1, 2, 4):
        built = deep()
        problem = lm.problem(captured(built), "cpu#0-64MB, cpu#1-64MB")
        problem, plan = spilling(problem, all_of, window_bytes=window * WEIGHT)
        predicted = lm.simulate(problem, plan).peak_bytes.tolist()
        model = build_placed_model(built.model, problem.graph, plan, problem.cluster)
        trained(model, built, steps=3)
        for peak, most in zip(model.peak_bytes.values(), predicted, strict=True):
            assert peak <= 1.05 * most


def test_it_trains_where_the_weights_alone_do_not_fit() -> None:
    room = 3 * WEIGHT + 32 * 4 * ROWS * WIDTH
    assert room < DEEP * WEIGHT
    built, plain = deep(), deep()
    model = spilled_model(built, all_of, window_bytes=2 * WEIGHT, devices=f"cpu#0-{room}B, cpu#1-64MB")
    assert first_difference(trained(plain.model, plain), trained(model, built)) == ""


def test_a_window_that_is_too_large_for_the_device_raises_and_leaves_it_usable() -> None:
    room = 3 * WEIGHT
    built = deep()
    model = spilled_model(built, all_of, window_bytes=DEEP * WEIGHT, devices=f"cpu#0-{room}B, cpu#1-64MB")
    with pytest.raises(DeviceMemoryError, match="a copy of weight layers"):
        model(*built.args)
    again, plain = spilled_model(deep(), all_of), deep()
    assert first_difference(trained(plain.model, plain), trained(again, plain)) == ""


def test_weights_that_were_loaded_or_edited_are_seen() -> None:
    built = deep()
    model = spilled_model(built, all_of)
    model(*built.args)
    other = Deep()
    model.load_state_dict(other.state_dict())
    assert torch.equal(model(*built.args), other(*built.args))
    with torch.no_grad():
        for mine, its in zip(model.parameters(), other.parameters(), strict=True):
            mine.data.mul_(0.5)
            its.mul_(0.5)
    assert torch.equal(model(*built.args), other(*built.args))


def test_an_edit_between_forward_and_backward_is_an_error_as_in_pytorch() -> None:
    built = deep()
    model = spilled_model(built, all_of)
    loss = model(*built.args)
    with torch.no_grad():
        model.layers[2].weight.mul_(2.0)
    with pytest.raises(RunError, match=r"'layers\.2\.weight' was changed in place between"):
        loss.backward()
    model.zero_grad()
    model(*built.args).backward()
    plain = deep().model
    with torch.no_grad():
        plain.layers[2].weight.mul_(2.0)
    plain(*built.args).backward()
    assert all(
        torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )


def test_gradients_are_accumulated_clipped_and_asked_for() -> None:
    built, plain = deep(), deep()
    model = spilled_model(built, all_of, window_bytes=2 * WEIGHT)
    for one in (model, plain.model):
        for _ in range(3):
            one(*built.args).backward()
        nn.utils.clip_grad_norm_(one.parameters(), 1e-3)
    pairs = list(zip(model.parameters(), plain.model.parameters(), strict=True))
    assert all(torch.equal(mine.grad, its.grad) for mine, its in pairs)
    some = [0, 3]
    mine = torch.autograd.grad(model(*built.args), [pairs[at][0] for at in some])
    its = torch.autograd.grad(plain.model(*built.args), [pairs[at][1] for at in some])
    assert all(map(torch.equal, mine, its))


def test_two_backwards_of_one_forward() -> None:
    built, plain = deep(), deep()
    model = spilled_model(built, all_of, window_bytes=2 * WEIGHT)
    for one in (model, plain.model):
        loss = one(*built.args)
        loss.backward(retain_graph=True)
        loss.backward()
    pairs = zip(model.parameters(), plain.model.parameters(), strict=True)
    assert all(torch.equal(mine.grad, its.grad) for mine, its in pairs)


@pytest.mark.parametrize("frozen", [(0, 1, 2), (1, 4), tuple(range(1, DEEP))])
def test_frozen_weights_are_loaded_for_the_backward_too(frozen: tuple[int, ...]) -> None:
    histories = []
    for spill in (False, True):
        built = deep()
        for at in frozen:
            built.model.layers[at].weight.requires_grad_(False)
        x = built.args[0].clone().requires_grad_()
        model = spilled_model(built, all_of, window_bytes=WEIGHT) if spill else built.model
        model(x).backward()
        histories.append([x.grad, *(weight.grad for weight in model.parameters())])
    for one, other in zip(*histories, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def test_eval_no_grad_and_autocast() -> None:
    built, plain = example("gpt2"), example("gpt2")
    model = spilled_model(built, all_of)
    model.eval()
    plain.model.eval()
    with torch.no_grad():
        assert torch.equal(model(**built.kwargs).logits, plain.model(**plain.kwargs).logits)
    model.train()
    plain.model.train()
    grads = []
    for one in (model, plain.model):
        torch.manual_seed(3)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = one(**built.kwargs).loss
        loss.backward()
        grads.append({name: weight.grad for name, weight in one.named_parameters()})
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[1])


def test_a_placed_model_that_spills_is_verified_and_says_so() -> None:
    built = deep()
    model = spilled_model(built, all_of)
    assert model.verify(*built.args).ok
    assert f"{DEEP} weights are loaded" in model.explain()


@pytest.mark.slow
def test_steps_of_changing_batches_leave_nothing_behind() -> None:
    built = deep()
    model = spilled_model(built, all_of, window_bytes=2 * WEIGHT)
    optimizer = torch.optim.AdamW(model.parameters())
    accounts = model._engine.accounts
    assert accounts is not None
    seen = set()
    for at in range(7):
        model(torch.randn(2 + at % 3, WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        if at > 2:
            seen.add(tuple(accounts.live_bytes))
    assert len({stores for _, stores in seen}) == 1
    assert max(live for live, _ in seen) <= 4 * 4 * WIDTH, "a batch"


def test_the_gradient_that_came_down_is_the_weights_own() -> None:
    """Autograd takes it as it is; another copy would cost the host as much as the way down."""
    built = deep()
    model = spilled_model(built, all_of)
    loads = []
    from loadmaster.runtime.spill import weight_loads as module

    right = module.WeightLoads.send_gradient

    def noting(self: Any, at: int, edge: int, grad: Any) -> Any:
        made = right(self, at, edge, grad)
        loads.append((self._loads[at].name.removeprefix("weight "), made.data_ptr()))
        return made

    module.WeightLoads.send_gradient = noting  # type: ignore[method-assign]
    try:
        model(*built.args).backward()
    finally:
        module.WeightLoads.send_gradient = right  # type: ignore[method-assign]
    weights = dict(model.named_parameters())
    assert all(weights[name].grad.data_ptr() == pointer for name, pointer in loads)
    assert len(loads) == DEEP


class Witness:
    """Stands for the GPU's allocator: bytes that copies and gradients hold there, by the life of storages.

    On CUDA nothing of a load is marked with `record_stream`, so that the allocator has a block from the
    moment that its tensor is made until the tensor is gone, however far the host is ahead of the device.
    """

    def __init__(self, going_bytes: int) -> None:
        self.up_bytes = self.most_up = self.down_bytes = self.most_down = 0
        self._going = weight_carriers.PendingGradients(going_bytes)

    def up(self, weight: Any, after: Any = None) -> Any:
        made = weight.detach().clone()
        self.up_bytes += made.nbytes
        self.most_up = max(self.most_up, self.up_bytes)
        weakref.finalize(made.untyped_storage(), self._up_gone, made.nbytes)
        return weight_carriers.PendingCopy(made, None)

    def _up_gone(self, size: int) -> None:
        self.up_bytes -= size

    def use(self, sent: Any) -> None:
        pass

    def free(self, sent: Any) -> None:
        pass

    def down(self, grad: Any) -> Any:
        self.down_bytes += grad.nbytes
        self.most_down = max(self.most_down, self.down_bytes)
        weakref.finalize(grad.untyped_storage(), self._down_gone, grad.nbytes)
        self._going.add(grad.detach(), None)
        while self._going.is_over_limit:
            self._going.pop()
        return weight_carriers.PendingCopy(grad.detach().clone(), None)

    def _down_gone(self, size: int) -> None:
        self.down_bytes -= size

    def settle(self) -> None:
        while self._going:
            self._going.pop()


@pytest.mark.parametrize("window", [1, 2, 3])
def test_the_generated_code_holds_a_window_of_copies_and_few_gradients(window: int) -> None:
    built = deep()
    model = spilled_model(built, all_of, window_bytes=window * WEIGHT)
    engine, witness = model._engine, Witness(max_outgoing_bytes(WEIGHT))
    engine.accounts = engine.spill.accounts = None  # as where no device is a part of one
    engine.spill._carriers[COMPUTES, STORES] = witness
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(*built.args).backward()
        optimizer.step()
    assert witness.most_up == window * WEIGHT
    assert WEIGHT <= witness.most_down <= max_outgoing_bytes(WEIGHT) + WEIGHT
    assert (witness.up_bytes, witness.down_bytes) == (0, 0)


def test_the_generated_code_of_a_transformer_holds_no_more_than_the_plan_says() -> None:
    built = example("gpt2")
    model = spilled_model(built, all_of, window_bytes=1 << 15)
    engine = model._engine
    largest = max(weight.nbytes for weight in model.parameters())
    witness = Witness(max_outgoing_bytes(largest))
    engine.accounts = engine.spill.accounts = None
    engine.spill._carriers[COMPUTES, STORES] = witness
    trained(model, built, steps=2)
    assert 0 < witness.most_up <= max(engine.spill.window_bytes, largest)
    assert 0 < witness.most_down <= max_outgoing_bytes(largest) + largest
    assert (witness.up_bytes, witness.down_bytes) == (0, 0)
