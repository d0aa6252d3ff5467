"""What a graph cannot see: attributes, exchanged modules, hooks, inputs given twice, a second backward."""

import random
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="running needs the extra [torch]")
from torch import nn  # noqa: E402

from loadmaster.core.errors import RunError  # noqa: E402
from loadmaster.runtime.graph_engine.program import export_program  # noqa: E402
from loadmaster.runtime.graph_engine.rewrite import RegionStack  # noqa: E402
from loadmaster.zoo.example import Example  # noqa: E402
from tests.placing import captured, first_difference, placed, random_plan, trained  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH = 16


class Net(nn.Module):
    """Two layers, a factor and a dropout that a schedule may change."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.drop, self.second = (
            nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH)
        )  # fmt: skip
        self.factor = 1.0

    def forward(self, x: Any) -> Any:
        return self.second(self.drop(self.act(self.first(x)))) * self.factor


class Counting(nn.Module):
    """Another thing in its third step, and it remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.step, self.last = 0, None

    def forward(self, x: Any) -> Any:
        self.step += 1
        y = self.first(x)
        self.last = y
        return self.second(y.tanh()) if self.step < 3 else self.second(y.sin())


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any, y: Any) -> Any:
        return self.left(x).tanh() * self.right(y)


def built(kind: Any, *inputs: Any) -> Example:
    torch.manual_seed(0)
    return Example(kind(), inputs or (torch.randn(4, WIDTH),))


def both(kind: Any, *inputs: Any) -> tuple[Any, Any, Example]:
    """A model, and the same placed over two devices."""
    plain, again = built(kind, *inputs), built(kind, *inputs)
    return plain.model, placed(again, random_plan(captured(again), 2, 3)), plain


def same(one: Any, other: Any, *inputs: Any) -> bool:
    outs = []
    for model in (one, other):
        torch.manual_seed(7)
        outs.append(model(*inputs))
    return torch.equal(*outs)


def test_an_attribute_that_is_set_is_seen() -> None:
    plain, model, example = both(Net)
    assert same(plain, model, *example.args)
    for one in (plain, model):
        one.factor = 0.5
    assert same(plain, model, *example.args)
    assert any("'factor' of the model has changed" in note for note in model.notes)
    for one in (plain, model):
        one.drop.p = 0.0
    assert same(plain, model, *example.args)


def test_a_schedule_of_many_values_is_run_module_by_module() -> None:
    plain, model, example = both(Net)
    for step in range(8):
        for one in (plain, model):
            one.factor = 1.0 / (1 + step)
        assert same(plain, model, *example.args)
    assert any("'factor' of the model changes from call to call" in note for note in model.notes)


def test_a_forward_that_counts_is_run_module_by_module() -> None:
    plain, model, example = both(Counting)
    assert [same(plain, model, *example.args) for _ in range(4)] == [True] * 4
    assert model.step == 4
    assert torch.equal(model.last, plain.last)
    assert any("its forward changes 'step'" in note for note in model.notes)


class Chance(nn.Module):
    """Draws from Python's or NumPy's random numbers, as layer drop and augmentation do."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.first, self.second, self.draw = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), draw

    def forward(self, x: Any) -> Any:
        y = self.first(x) * self.draw()
        return self.second(y.tanh() if self.draw() < 0.5 else y.sin())


@pytest.mark.parametrize("draw", [lambda: random.random(), lambda: np.random.rand()])
def test_random_numbers_that_are_not_torchs_are_drawn_at_every_call(draw: Any) -> None:
    def losses(model: Any, example: Example) -> Any:
        random.seed(3)
        np.random.seed(3)
        return trained(model, example)

    one, plain = (built(lambda: Chance(draw)) for _ in range(2))
    wanted = losses(plain.model, plain)
    states = random.getstate(), np.random.get_state()[2]
    model = placed(one, random_plan(captured(one), 2, 0))
    found = model.verify(*one.args)
    assert found.ok, found
    assert (random.getstate(), np.random.get_state()[2]) == states, "planning draws nothing"
    assert first_difference(wanted, losses(model, one)) == ""
    assert any("draws from" in note for note in model.notes)


def test_an_attribute_of_a_class_is_seen() -> None:
    class Scaled(Net):
        scale = 1.0

        def forward(self, x: Any) -> Any:
            return super().forward(x) * self.scale

    one, plain = built(Scaled), built(Scaled)
    model = placed(one, random_plan(captured(one), 2, 0))
    model.eval(), plain.model.eval()
    for scale in (1.0, 2.0, 1.0):
        Scaled.scale = scale
        assert torch.equal(model(*one.args), plain.model(*one.args))
    assert "'Scaled.scale' of the model has changed; exported the model again" in model.notes


def test_a_graph_that_is_first_made_in_inference_mode_trains_like_any_other() -> None:
    class Regions(Net):
        def forward(self, x: Any) -> Any:
            with torch.no_grad():
                y = self.first(x)
            with torch.enable_grad():
                return super().forward(x) + y

    one, plain = built(Regions), built(Regions)
    model = placed(one, random_plan(captured(one), 2, 0))
    with torch.inference_mode():
        model(*one.args)
    assert first_difference(trained(plain.model, plain), trained(model, one)) == ""


def test_inference_mode_runs_by_hooks_too() -> None:
    one, plain = built(Counting), built(Counting)
    model = placed(one, random_plan(captured(one), 2, 0))
    with torch.inference_mode():
        for _ in range(3):
            assert torch.equal(model(*one.args), plain.model(*one.args))


def test_a_module_exchanged_after_the_first_call_is_run_where_the_old_one_was() -> None:
    plain, model, example = both(Net)
    assert same(plain, model, *example.args)
    for one in (plain, model):
        one.act = nn.GELU()
    assert same(plain, model, *example.args)
    assert any("'act' of the model has changed" in note for note in model.notes)


class Optional(nn.Module):
    """A layer that may be missing."""

    def __init__(self, layer: nn.Module | None) -> None:
        super().__init__()
        self.register_module("layer", layer)

    def forward(self, x: Any) -> Any:
        return x if self.layer is None else self.layer(x)


class Two(nn.Module):
    """The same layer twice, or once."""

    def __init__(self, *, shared: bool = True) -> None:
        super().__init__()
        layer = nn.Linear(WIDTH, WIDTH)
        self.left, self.right = Optional(layer), Optional(layer if shared else None)

    def forward(self, x: Any) -> Any:
        return self.right(self.left(x).tanh() + 1)


def moved(model: Any) -> None:
    model.left.layer, model.right.layer = model.right.layer, model.left.layer


@pytest.mark.parametrize(
    ("shared", "change"),
    [
        (True, lambda model: setattr(model.left, "layer", None)),
        (True, lambda model: setattr(model.right, "layer", None)),
        (False, moved),
    ],
)
def test_the_same_modules_in_other_places_are_another_graph(shared: bool, change: Any) -> None:
    plain, model, example = both(lambda: Two(shared=shared))
    model(*example.args)
    change(plain)
    change(model)
    assert torch.equal(plain(*example.args), model(*example.args))


@pytest.mark.parametrize("early", [True, False])
def test_hooks_of_modules_are_called_with_real_tensors(early: bool) -> None:
    plain, model, example = both(Net)
    if not early:
        model(*example.args)
    seen: list[Any] = []
    for one in (plain, model):
        one.act.register_forward_hook(lambda _, __, out: seen.append(out) or 2 * out)
    assert same(plain, model, *example.args)
    assert [type(out) for out in seen] == [torch.Tensor] * 2
    assert any("module 'act' has hooks" in note for note in model.notes)


def test_hooks_of_the_model_itself_are_called_once_a_call() -> None:
    _, model, example = both(Net)
    seen: list[Any] = []
    model.register_forward_hook(lambda _, __, out: seen.append(out))
    for _ in range(2):
        model(*example.args)
    assert len(seen) == 2
    assert not any(isinstance(out, torch._subclasses.FakeTensor) for out in seen)
    assert model._engine.graphs, "by the graph"


@pytest.mark.parametrize("planned_on_one", [True, False])
def test_inputs_given_as_one_tensor_are_two_inputs(planned_on_one: bool) -> None:
    x, y, z = (torch.randn(4, WIDTH) for _ in range(3))
    plain, model, _ = both(Pair, x, x if planned_on_one else y)
    for inputs in ((x, x), (x, y), (z, y), (y, y)):
        assert same(plain, model, *inputs)
    assert model.notes == ()
    assert len(model._engine.graphs) == 1


def test_a_gradient_of_a_gradient_is_that_of_the_model() -> None:
    plain, model, _ = both(Pair, torch.randn(4, WIDTH), torch.randn(4, WIDTH))
    found = []
    for one in (plain, model):
        torch.manual_seed(5)
        x, y = torch.randn(4, WIDTH).requires_grad_(), torch.randn(4, WIDTH)
        (slope,) = torch.autograd.grad(one(x, y).sum(), x, create_graph=True)
        ((slope.norm(dim=1) - 1) ** 2).mean().backward()
        found.append({name: weight.grad for name, weight in one.named_parameters()})
    for name, grad in found[0].items():
        other = found[1][name]
        assert (grad is None) == (other is None), name
        assert grad is None or torch.equal(grad, other), name


@pytest.mark.parametrize("act", [torch.tanh, torch.relu, torch.square])
def test_a_gradient_that_forward_itself_takes_is_that_of_the_model(act: Any) -> None:
    class Forces(nn.Module):
        """An energy and its slope, as force fields have them."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

        def forward(self, x: Any) -> Any:
            x = x.detach().requires_grad_(True)
            energy = self.second(act(self.first(x))).sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0] + energy

    one, plain = built(Forces), built(Forces)
    model = placed(one, random_plan(captured(one), 2, 0))
    assert first_difference(trained(plain.model, plain), trained(model, one)) == ""


def test_an_input_that_forward_writes_into_is_the_callers_own() -> None:
    class Counting(nn.Module):
        """Writes into what it is given, through a view too."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            y = self.first(2 * x)  # autograd keeps that, so x may change
            with torch.no_grad():
                x[0].add_(1)
            return self.second(y).sum()

    one, plain = built(Counting), built(Counting)
    model = placed(one, random_plan(captured(one), 2, 0))
    ours, theirs = torch.ones(3, WIDTH), torch.ones(3, WIDTH)
    for _ in range(2):
        assert torch.equal(model(ours), plain.model(theirs))
        assert torch.equal(ours, theirs)
    assert ours[0, 0] == 3
    assert any("forward writes into its input" in note for note in model.notes)


def test_transforms_of_torch_func_are_refused_in_words() -> None:
    _, model, example = both(Net)
    with pytest.raises(RunError, match="a placed model cannot run under torch"):
        torch.func.vmap(model)(example.args[0][:, None])


def test_a_part_of_a_data_set_is_counted_as_what_it_is() -> None:
    again = built(Net)
    model = placed(again, random_plan(captured(again), 2, 3), memory="40KB")
    data = torch.randn(5000, WIDTH)
    held = [data[at : at + 4] for at in range(0, 400, 4)]
    with torch.no_grad():
        for batch in held:
            model(batch)
    optimizer = torch.optim.AdamW(model.parameters())
    model(held[0]).sum().backward()
    optimizer.step()


def test_training_after_a_changed_attribute_goes_on_as_the_model_would() -> None:
    one, other, plain = both(Net)
    histories = []
    for model in (one, other):
        first = trained(model, plain, steps=2)
        model.factor = 0.25
        histories.append((first, trained(model, plain, steps=2)))
    for pair in zip(*histories, strict=True):
        assert first_difference(*pair) == ""


def test_threads_may_make_the_first_call_together() -> None:
    plain, model, _ = both(Net)
    for one in (plain, model):
        one.eval()
    batches = [torch.randn(rows, WIDTH) for rows in (3, 4, 5, 3)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(model, batches))
    assert all(torch.equal(out, plain(batch)) for out, batch in zip(found, batches, strict=True))


def test_what_a_model_says_of_its_devices_autocast_holds_on_a_gpu() -> None:
    class Rotary(Net):
        def forward(self, x: Any) -> Any:
            with torch.autocast(x.device.type, enabled=False):
                return super().forward(x)

    one = built(Rotary)
    program = export_program(one.model, one.args, {}, training=True)
    regions = {node.meta["region"] for node in program.ops}
    assert [region[0][:2] for region in regions] == [("autocast", "cpu")], "exported on the CPU"
    torch.set_autocast_enabled("cuda", True)  # as torch.autocast("cuda") does where there is a GPU
    try:
        entered = RegionStack()
        entered.change(regions.pop())
        inside = torch.is_autocast_enabled("cuda")
        entered.close()
        assert (inside, torch.is_autocast_enabled("cuda")) == (False, True)
    finally:
        torch.set_autocast_enabled("cuda", False)


class Sized(Net):
    """Goes another way with a large batch, and with one that can be cut into three."""

    def forward(self, x: Any) -> Any:
        y = super().forward(x)
        y = y.tanh() if x.shape[0] > 4 else y
        return y + 1.0 if x.shape[0] % 3 == 0 else y


def test_a_graph_for_any_batch_is_not_run_for_one_that_goes_another_way() -> None:
    plain, model, _ = both(Sized, torch.randn(3, WIDTH))
    for size in (3, 2, 4, 8, 9, 6, 4, 8):
        assert same(plain, model, torch.randn(size, WIDTH)), size


class Configured(Net):
    """Its factor is in a configuration, within another."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(inner=SimpleNamespace(scale=1.0))

    def forward(self, x: Any) -> Any:
        return super().forward(x) * self.config.inner.scale


def test_a_value_set_in_the_configuration_is_seen() -> None:
    plain, model, example = both(Configured)
    for scale in (1.0, 2.0, 1.0):
        plain.config.inner.scale = model.config.inner.scale = scale
        assert same(plain, model, *example.args)
    assert "'config.inner.scale' of the model has changed; exported the model again" in model.notes


class Asking(Net):
    """Other ops where no gradient is taken, as torch's own transformer layers have."""

    def forward(self, x: Any) -> Any:
        y = super().forward(x)
        return y if torch.is_grad_enabled() else y.tanh()


@pytest.mark.parametrize("training", [True, False])
def test_a_forward_that_asks_whether_gradients_are_taken_is_answered(training: bool) -> None:
    plain, model, example = both(Asking)
    plain.train(training), model.train(training)
    with torch.no_grad():  # the first graph: the plan was made of the other branch
        assert same(plain, model, *example.args)
    assert same(plain, model, *example.args)
    with torch.inference_mode():
        assert same(plain, model, *example.args)
    assert not any("hooks" in note for note in model.notes), "both are graphs"


class Contrasted(Pair):
    """A loss over all pairs of a batch, as CLIP has it."""

    def forward(self, x: Any, y: Any) -> Any:
        return nn.functional.cross_entropy(self.left(x) @ self.right(y).T, torch.arange(len(x)))


def test_a_batch_whose_length_is_taken_has_a_graph_for_each_size() -> None:
    plain, model, _ = both(Contrasted, torch.randn(3, WIDTH), torch.randn(3, WIDTH))
    for size in (3, 5, 2, 4):
        assert same(plain, model, torch.randn(size, WIDTH), torch.randn(size, WIDTH)), size


class Calls(Net):
    """Counts its calls in one of two like configurations, and fills in what nobody set."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = SimpleNamespace(calls=0, kind=None), SimpleNamespace(calls=0, kind=None)
        self.counts = True

    def forward(self, x: Any) -> Any:
        self.one.kind = "set"
        if self.counts:
            self.one.calls += 1
        return super().forward(x) * (1 + self.one.calls)


def test_a_forward_that_changes_its_configuration_is_run_by_hooks() -> None:
    plain, model, example = both(Calls)
    for calls in (1, 2, 3):
        assert same(plain, model, *example.args)
        assert plain.one.calls == model.one.calls == calls
    assert any("changes 'one.calls'" in note for note in model.notes)


def test_what_a_forward_fills_in_once_keeps_the_graph() -> None:
    plain, model, example = both(Calls)
    plain.counts = model.counts = False
    for _ in range(3):
        assert same(plain, model, *example.args)
    assert not any("hooks" in note for note in model.notes)


class Inner(nn.Module):
    """Outputs, and a number beside them that trains but the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        y = self.first(x).tanh()
        return self.second(y).sin(), y.square().mean()


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.inner.compile(backend="aot_eager")

    def forward(self, x: Any) -> Any:
        return self.inner(x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile's own import
def test_a_compiled_module_has_the_loss_of_the_module() -> None:
    """Compiled, all outputs have one node of autograd: every number would seem to train everything."""
    one = built(Compiled)
    model = placed(one, random_plan(captured(one), 2, 3))
    assert model.verify(*one.args).ok
