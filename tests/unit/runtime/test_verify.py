"""Verify: says nothing of a plan that runs right, and names what is wrong with one that does not."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="running needs the extra [torch]")

import loadmaster as lm  # noqa: E402
from loadmaster.core.errors import InputError, LoadmasterError, VerifyError  # noqa: E402
from loadmaster.runtime.placed import Placed  # noqa: E402
from loadmaster.runtime.transport.copies import copy_to_device  # noqa: E402
from loadmaster.zoo.example import Example  # noqa: E402
from tests.placing import captured, first_difference, placed, plan_by, random_plan, trained  # noqa: E402
from tests.torch_models import example  # noqa: E402
from tests.unit.runtime.test_placed import net  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


FAR = {"first.weight", "batch_norm", "dropout"}  # on the second device


def prepared(**options: Any) -> tuple[Placed, Example]:
    built = net()
    return placed(built, plan_by(captured(built), lambda name: int(name in FAR)), **options), built


def nodes(model: Placed, example: Example, role: str | None = None) -> list[Any]:
    """Copies, edges or ops of the graph that runs."""
    ready, _ = model._engine.ready(example.args, example.kwargs)
    found = [node for node in ready.rewritten.module.graph.nodes if node.op == "call_function"]
    return [node for node in found if "device" in node.meta and node.meta.get("role") == role]


@contextmanager
def injected(node: Any, fault: Any) -> Iterator[None]:
    right = node.target
    node.target = fault(right)
    try:
        yield
    finally:
        node.target = right


def test_a_right_plan_is_verified_and_nothing_changes() -> None:
    model, built = prepared()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    found = model.verify(*built.args)
    assert found.ok
    assert set(found.gradients) == {name for name, _ in model.named_parameters()}
    assert max(found.gradients.values()) == 0.0
    assert found.loss == found.reference_loss
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())


def test_a_scaled_output_is_named() -> None:
    model, built = prepared()
    wrong = next(node for node in nodes(model, built) if node.meta["op"] == "linear")
    with injected(wrong, lambda right: lambda *args: 1.001 * right(*args)):
        found = model.verify(*built.args)
    assert found.finding.startswith("op 'linear' on cpu#")
    assert "other values" in found.finding
    assert max(found.gradients.values()) > 0
    assert model.verify(*built.args).ok


def test_a_missing_copy_is_named_though_its_values_are_right() -> None:
    model, built = prepared()
    wrong = next(node for node in nodes(model, built, "copy") if node.meta["op"] == "linear")
    with injected(wrong, lambda right: lambda tensor, where: tensor):
        found = model.verify(*built.args)
    assert "reads 'linear' on cpu#" in found.finding
    assert "a copy is missing" in found.finding


def test_a_stale_weight_is_named() -> None:
    model, built = prepared()
    wrong = next(node for node in nodes(model, built, "copy") if node.meta["op"] == "first.weight")
    name = wrong.meta["op"]
    old = copy_to_device(dict(model.named_parameters())[name], torch.device("cpu"))
    trained(model, built, steps=1)
    with injected(wrong, lambda right: lambda tensor, where: old):
        found = model.verify(*built.args)
    assert found.finding.startswith(f"the copy of {name!r} on cpu#")
    assert "stale" in found.finding


def test_a_wrong_gradient_is_named_though_every_value_is_right() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * 1.01

    model, built = prepared()
    wrong = next(node for node in nodes(model, built) if node.meta["op"] == "relu")
    with injected(wrong, lambda right: lambda *args: Wrong.apply(right(*args))):
        found = model.verify(*built.args)
    assert found.finding.startswith("the gradient of op 'batch_norm' on cpu#")


def test_the_first_step_stops_at_a_fault_and_goes_on_without_one() -> None:
    model, built = prepared(verify=True)
    wrong = next(node for node in nodes(model, built) if node.meta["op"] == "linear")
    with (
        injected(wrong, lambda right: lambda *args: right(*args) + 1.0),
        pytest.raises(VerifyError, match="'linear'"),
    ):
        model(*built.args)
    again, plain = example("resnet"), example("resnet")
    model = placed(again, random_plan(captured(again), 2, 1), verify=True)
    assert first_difference(trained(plain.model, plain, steps=2), trained(model, again, steps=2)) == ""


def test_verify_of_a_plan_leaves_the_model_alone() -> None:
    built = net()
    placement = lm.plan(lm.problem(captured(built), "cpu#0-1MB, cpu#1-1MB"), budget="5x")
    before = [weight.data_ptr() for weight in built.model.parameters()]
    found = lm.verify(built.model, placement, built.args)
    assert found.ok
    assert "same numbers" in str(found)
    assert before == [weight.data_ptr() for weight in built.model.parameters()]
    with pytest.raises(InputError, match="not a plan"):
        lm.verify(built.model, built.args, built.args)
    with pytest.raises(InputError, match="not a batch"):
        lm.verify(built.model, placement, 3)


def test_a_batch_that_the_model_itself_cannot_run_is_said_with_its_own_error() -> None:
    built = net()
    placement = lm.plan(lm.problem(captured(built), "cpu#0-1MB, cpu#1-1MB"), budget="5x")
    with pytest.raises(
        InputError, match=r"unplaced, fails on inputs of \[6, 5\]: RuntimeError: mat1"
    ) as told:
        lm.verify(built.model, placement, (torch.zeros(6, 5),))
    assert isinstance(told.value.__cause__, RuntimeError)
    with pytest.raises(InputError, match=r"fails on no inputs: TypeError: Net\.forward"):
        lm.verify(built.model, placement, ())


def test_a_first_batch_that_the_model_cannot_run_is_its_own_error() -> None:
    model, built = prepared(verify=True)
    with pytest.raises(RuntimeError, match="mat1") as told:
        model(torch.zeros(6, 5))
    assert not isinstance(told.value, LoadmasterError)
    assert model(*built.args).shape == (6, 4)
