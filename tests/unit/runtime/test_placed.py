"""A placed model is the user's module: its weights, names, modes, optimizers and checkpoints."""

import copy
import io
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="running needs the extra [torch]")
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import loadmaster as lm  # noqa: E402
from loadmaster.cluster.parse import parse_cluster  # noqa: E402
from loadmaster.cluster.probe import LocalDevice  # noqa: E402
from loadmaster.core.errors import (  # noqa: E402
    ClusterError,
    InputError,
    PlanError,
    RunError,
    UnknownNameError,
)
from loadmaster.core.plan import plan_of  # noqa: E402
from loadmaster.runtime.placed import Placed, build_placed_model  # noqa: E402
from loadmaster.runtime.transport.devices import locate_devices  # noqa: E402
from loadmaster.zoo.example import Example  # noqa: E402
from tests.placing import captured, devices, first_difference, placed, random_plan, trained  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    """A little of everything: norm, dropout, a buffer that is written, two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Any, scale: Any = None) -> Any:
        y = self.last(self.drop(self.norm(self.first(x)).relu()))
        return y if scale is None else y * scale


def net() -> Example:
    torch.manual_seed(1)
    return Example(Net(), (torch.randn(6, 8),))


def placed_net(**options: Any) -> tuple[Placed, Example]:
    built = net()
    return placed(built, random_plan(captured(built), 2, 3), **options), built


def test_weights_are_the_same_objects_under_the_same_names() -> None:
    model, built = placed_net()
    assert isinstance(model, Net)
    assert isinstance(model, nn.Module)
    assert list(model.state_dict()) == list(built.model.state_dict())
    pairs = zip(model.parameters(), built.model.parameters(), strict=True)
    assert all(one is other for one, other in pairs)


def test_a_checkpoint_of_the_placed_model_loads_into_the_model() -> None:
    model, built = placed_net()
    trained(model, built, steps=2)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = net().model
    other.load_state_dict(torch.load(file))
    assert all(torch.equal(one, model.state_dict()[name]) for name, one in other.state_dict().items())


def test_a_checkpoint_of_the_model_loads_into_the_placed_model() -> None:
    model, built = placed_net()
    other = net().model
    nn.init.normal_(other.first.weight)
    model.load_state_dict(other.state_dict())
    model.eval()
    other.eval()
    with torch.no_grad():
        assert torch.equal(model(*built.args), other(*built.args))


def test_train_and_eval_have_a_graph_each() -> None:
    model, built = placed_net()
    trained(model, built, steps=1)
    model.eval()
    own = built.model.eval()
    with torch.no_grad():
        assert torch.equal(model(*built.args), own(*built.args))
    before = model.norm.running_mean.clone()
    assert torch.equal(before, model.norm.running_mean), "eval does not count batches"
    model.train()
    assert model.training
    model(*built.args)
    assert not torch.equal(before, model.norm.running_mean)
    assert len(model._engine.graphs) == 2


def test_no_grad_leaves_nothing_behind() -> None:
    model, built = placed_net()
    model.eval()
    accounts = model._engine.accounts
    assert accounts is not None
    with torch.no_grad():
        model(*built.args)
        live = list(accounts.live_bytes)
        out = model(*built.args)
    assert out.grad_fn is None
    del out
    assert accounts.live_bytes == live


def test_accumulation_and_clipping_are_the_models_own() -> None:
    def clipped(model: Any, example: Example) -> list[Any]:
        torch.manual_seed(0)
        for _ in range(3):
            model(*example.args).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return [norm, *(weight.grad for weight in model.parameters())]

    model, built = placed_net()
    plain = net()
    pairs = zip(clipped(model, built), clipped(plain.model, plain), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_a_graph_may_be_made_inside_of_a_checkpoint() -> None:
    def gradients(model: Any, example: Example) -> list[Any]:
        torch.manual_seed(0)
        checkpoint(model, *example.args, use_reentrant=False).square().mean().backward()
        return [weight.grad for weight in model.parameters()]

    model, built = placed_net()
    plain = net()
    pairs = zip(gradients(model, built), gradients(plain.model, plain), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_autocast_runs_as_in_the_model() -> None:
    model, built = placed_net()
    plain = net()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.manual_seed(0)
        wanted = plain.model(*plain.args)
        torch.manual_seed(0)
        found = model(*built.args)
    assert found.dtype == torch.bfloat16
    assert torch.equal(wanted, found)


def test_inputs_may_have_a_gradient_and_other_names() -> None:
    model, built = placed_net()
    plain = net()
    gradients = []
    for one in (plain.model, model):
        one(*built.args)
    for one in (plain.model, model):
        x = built.args[0].clone().requires_grad_(True)
        torch.manual_seed(0)
        one(x=x, scale=torch.tensor(2.0)).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
    assert any("(mul) not in the plan" in note for note in model.notes)
    assert any("exported the model again" in note for note in model.notes)


def test_a_forgotten_optimizer_is_an_error_at_its_first_step() -> None:
    built = net()
    optimizer = torch.optim.SGD(built.model.parameters(), lr=0.1)
    model = placed(built, random_plan(captured(built), 2, 0))
    model(*built.args).sum().backward()
    before = model.first.weight.clone()
    with pytest.raises(RunError, match=r"placed\.adopt"):
        optimizer.step()
    assert torch.equal(before, model.first.weight)
    model.adopt(optimizer)
    optimizer.step()
    assert not torch.equal(before, model.first.weight)


def test_an_optimizer_made_before_goes_on_with_its_state() -> None:
    def steps(model: Any, example: Example, optimizer: Any) -> None:
        torch.manual_seed(2)
        for _ in range(2):
            model(*example.args).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    plain, built = net(), net()
    one, other = (torch.optim.AdamW(e.model.parameters(), lr=0.01) for e in (plain, built))
    steps(plain.model, plain, one)
    steps(built.model, built, other)
    model = placed(built, random_plan(captured(built), 2, 0))
    model.adopt(other)
    steps(plain.model, plain, one)
    steps(model, built, other)
    pairs = zip(model.parameters(), plain.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, _ = placed_net()
    with pytest.raises(InputError, match="holds no weight"):
        model.adopt(torch.optim.SGD(net().model.parameters(), lr=0.1))
    with pytest.raises(InputError, match="not an optimizer"):
        model.adopt("adam")


def test_a_frozen_weight_that_is_thawed_is_trained_from_then_on() -> None:
    built, plain = net(), net()
    for one in (built, plain):
        one.model.first.weight.requires_grad_(False)
    model = placed(built, random_plan(captured(built), 2, 5))
    model(*built.args).sum().backward()
    assert model.first.weight.grad is None
    for one in (built, plain):
        one.model.first.weight.requires_grad_(True)
        one.model.zero_grad()
    built.model.norm.load_state_dict(plain.model.norm.state_dict())
    assert first_difference(trained(plain.model, plain, steps=2), trained(model, built, steps=2)) == ""


@pytest.mark.parametrize(
    "act", [lambda m: m.to("cpu"), lambda m: m.half(), copy.deepcopy, lambda m: torch.save(m, io.BytesIO())]
)
def test_what_would_tear_a_placed_model_from_its_plan_is_refused(act: Any) -> None:
    model, _ = placed_net()
    with pytest.raises(RunError):
        act(model)


def test_a_plan_for_another_model_is_refused_with_what_differs() -> None:
    built = net()
    graph = captured(built)
    plan = random_plan(graph, 2, 0)
    other = nn.Sequential(nn.Linear(8, 4))
    with pytest.raises(PlanError, match=r"the model has '0.bias', the plan does not"):
        build_placed_model(other, graph, plan, devices(2))
    wide = Net()
    wide.last = nn.Linear(16, 5)
    with pytest.raises(
        PlanError, match=r"weight 'last.weight' is float32\[4,16\] there, float32\[5,16\] here"
    ):
        build_placed_model(wide, graph, plan, devices(2))


def test_ops_may_be_called_as_weights_and_buffers_are() -> None:
    class Normed(nn.Module):
        """A buffer 'mean' and `x.mean()`, a weight 'add' and a sum, a module 'linear'."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.ones(8))
            self.add, self.linear = nn.Parameter(torch.ones(8)), nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            y = self.linear(x - self.mean)
            return y + self.add + (y + x).mean(0)

    def build() -> Example:
        torch.manual_seed(1)
        return Example(Normed(), (torch.randn(6, 8),))

    one, plain = build(), build()
    model = placed(one, random_plan(captured(one), 2, 3), engine="graph")
    assert first_difference(trained(plain.model, plain), trained(model, one)) == ""
    assert not model.notes


def test_a_model_that_runs_other_ops_than_the_plan_is_refused() -> None:
    class Other(Net):
        def forward(self, x: Any, scale: Any = None) -> Any:
            return super().forward(x).tanh()

    built = net()
    model = build_placed_model(Other(), captured(built), random_plan(captured(built), 2, 0), devices(2))
    with pytest.raises(PlanError, match="op 'tanh'"):
        model(*built.args)


def test_an_error_of_the_users_own_code_is_the_users() -> None:
    model, _ = placed_net()
    with pytest.raises(Exception, match=r"dim|shape"):
        model(torch.randn(6, 9))
    model(torch.randn(6, 8)).sum().backward()


def test_place_plans_and_places_in_one_call() -> None:
    built, plain = net(), net()
    model = lm.place(
        built.model, built.args, optimizer=torch.optim.AdamW, devices="cpu#0-20KB, cpu#1-20KB", budget="20x"
    )
    assert first_difference(trained(plain.model, plain), trained(model, built)) == ""
    text = model.explain()
    assert "cpu#0" in text
    assert "copies in a forward pass" in text


def test_place_takes_a_saved_plan(tmp_path: Any) -> None:
    built = net()
    placement = lm.plan(lm.problem(captured(built), "cpu#0-1MB, cpu#1-1MB"), budget="5x")
    lm.save(placement, tmp_path / "plan.json")
    model = lm.place(built.model, tmp_path / "plan.json")
    assert model(*built.args).shape == (6, 4)
    with pytest.raises(InputError, match="devices already"):
        lm.place(net().model, placement, devices="cpu")


@pytest.mark.parametrize(
    ("given", "options", "error", "text"),
    [
        (42, {}, InputError, "neither a plan nor inputs"),
        (None, {"engine": "steam"}, UnknownNameError, "engine"),
        (None, {"verify": "always"}, UnknownNameError, "first-step"),
        (None, {"colour": 1}, UnknownNameError, "colour"),
        (None, {"devices": "cuda:7"}, ClusterError, "no cuda:7"),
    ],
)
def test_bad_wishes_are_refused_by_name(given: Any, options: Any, error: Any, text: str) -> None:
    built = net()
    with pytest.raises(error, match=text):
        lm.place(built.model, built.args if given is None else given, **options)


def test_too_little_memory_for_any_plan_is_said_before_anything_runs() -> None:
    built = net()
    with pytest.raises(PlanError, match="no plan fits"):
        lm.place(built.model, built.args, devices="cpu#0-1KB, cpu#1-1KB", budget="5x")


def test_devices_are_those_of_this_machine() -> None:
    here = (LocalDevice("cpu0", "", 0), LocalDevice("gpu0", "", 0, "NVIDIA H200", "cuda:0"))
    found = locate_devices(parse_cluster("H200, H200#1-8GB, cpu-64GB"), present=here)
    assert [(device.name, str(device.where), device.logical) for device in found] == [
        ("gpu0", "cuda:0", False),
        ("H200#1", "cuda:0", True),
        ("cpu0", "cpu", False),
    ]
    with pytest.raises(ClusterError, match="needs gpu1"):
        locate_devices(parse_cluster("2xH200"), present=here)
    with pytest.raises(ClusterError, match="several hosts"):
        locate_devices(parse_cluster("cpu | cpu"), present=here)


def test_whole_devices_run_generated_code_with_the_same_numbers() -> None:
    built, plain = net(), net()
    graph = captured(built)
    everywhere = plan_of(np.zeros(graph.num_ops, dtype=np.int32))
    model = build_placed_model(built.model, graph, everywhere, parse_cluster("cpu"))
    assert model._engine.accounts is None
    assert first_difference(trained(plain.model, plain), trained(model, built)) == ""
    assert model.peak_bytes == {}
