"""A placed model computes what the model computes, to the bit: losses, gradients, buffers of five steps."""

from collections.abc import Iterable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="running needs the extra [torch]")
from torch import nn  # noqa: E402

from loadmaster.zoo.example import Example  # noqa: E402
from tests.placing import (  # noqa: E402
    build_placed_model,
    captured,
    devices,
    first_difference,
    placed,
    plan_by,
    random_plan,
    trained,
)
from tests.torch_models import example  # noqa: E402

QUICK = ("gpt2", "resnet", "lstm")
SLOW = ("llama", "t5", "bert", "vit")

pytestmark = pytest.mark.usefixtures("one_thread")


def differences(name: str, seeds: Iterable[int]) -> list[str]:
    """What differs under each of some random plans on two to four devices."""
    original = example(name)
    graph, wanted = captured(original), trained(original.model, original)
    found = []
    for seed in seeds:
        again, num = example(name), 2 + seed % 3
        model = build_placed_model(again.model, graph, random_plan(graph, num, seed), devices(num))
        found.append(first_difference(wanted, trained(model, again)))
    return found


@pytest.mark.parametrize("name", QUICK)
def test_a_random_plan_keeps_the_numbers(name: str) -> None:
    assert differences(name, [1]) == [""]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_ten_random_plans_keep_the_numbers(name: str) -> None:
    assert differences(name, range(10)) == [""] * 10


class Fan(nn.Module):
    """One tensor with five readers, one of which reads it twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.readers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Any) -> Any:
        y = self.first(x)
        total = torch.addcmul(y, y, x)  # reads it twice, with another gradient each time
        for reader in self.readers:
            total = total + reader(y).tanh()
        return total.mean()


def fan() -> Example:
    torch.manual_seed(3)
    return Example(Fan(), (torch.randn(32, 16),))


def spread(name: str) -> int:
    """The readers of the fan turn by turn on two devices; the tensor on the first."""
    return 1 if name in {"addcmul", "linear_2", "linear_4"} else 0


def test_gradients_of_a_tensor_with_many_readers_are_added_in_the_models_order() -> None:
    original, again = fan(), fan()
    model = placed(again, plan_by(captured(again), spread))
    assert first_difference(trained(original.model, original), trained(model, again)) == ""


def test_presum_sends_one_gradient_per_device_and_differs_by_rounding_only() -> None:
    original, again = fan(), fan()
    model = placed(again, plan_by(captured(again), spread), presum=True)
    wanted, found = trained(original.model, original, steps=1), trained(model, again, steps=1)
    for name, grad in wanted.gradients[0].items():
        torch.testing.assert_close(found.gradients[0][name], grad)
    edges = [
        node
        for node in model._engine.graphs[0].rewritten.module.graph.nodes
        if node.meta.get("role") == "edge"
    ]
    of_first = [node for node in edges if node.meta["op"] == "linear"]
    assert len(of_first) == 1, "one edge for three readers"


class Tied(nn.Module):
    """One weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.output = nn.Linear(8, 11, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Any) -> Any:
        return self.output(self.embedding(tokens).tanh()).log_softmax(-1).mean()


def test_a_weight_tied_over_two_devices_has_one_home_and_one_gradient() -> None:
    def build() -> Example:
        torch.manual_seed(5)
        return Example(Tied(), (torch.randint(11, (4, 6)),))

    original, again = build(), build()
    model = placed(again, plan_by(captured(again), lambda name: int(name.startswith("linear"))))
    assert first_difference(trained(original.model, original), trained(model, again)) == ""
    copies = [
        node.meta["op"]
        for node in model._engine.graphs[0].rewritten.module.graph.nodes
        if node.meta.get("role") == "copy"
    ]
    assert copies.count("embedding.weight") == 1


class Written(nn.Module):
    """Views, writes into a view, and readers before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Any) -> Any:
        y = self.first(x)
        before = self.second(y).sum()
        z = y.clone()
        early = z.sum() + z[:, 2].exp().mean()
        z[:, :3].mul_(2.0)
        self.seen += z.detach().mean(0)
        late = self.second(z).tanh().sum() + z.t().reshape(-1)[3:9].sum()
        return before + early + late + self.seen.sum()


@pytest.mark.parametrize("seed", range(6))
def test_writes_in_place_are_seen_by_every_later_reader(seed: int) -> None:
    def build() -> Example:
        torch.manual_seed(5)
        return Example(Written(), (torch.randn(4, 8),))

    original, again = build(), build()
    model = placed(again, random_plan(captured(again), 3, seed), num=3)
    assert first_difference(trained(original.model, original), trained(model, again)) == ""


class Chances(nn.Module):
    """Four dropouts, none of which needs another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Any) -> Any:
        return torch.stack([nn.functional.dropout(layer(x), 0.5) for layer in self.layers]).tanh().mean()


@pytest.mark.parametrize("seed", range(3))
def test_a_plans_order_is_followed_but_random_ops_keep_theirs(seed: int) -> None:
    def build() -> Example:
        torch.manual_seed(5)
        return Example(Chances(), (torch.randn(4, 8),))

    original, again = build(), build()
    graph = captured(again)
    model = build_placed_model(again.model, graph, random_plan(graph, 2, seed), devices(2))
    assert first_difference(trained(original.model, original), trained(model, again)) == ""
    nodes = model._engine.graphs[0].rewritten.original.items()
    issued = [node.meta["op"] for node, _ in nodes if node.op == "call_function"]
    captured_order = [name for name in graph.op_name if name in set(issued)]
    assert issued != captured_order, "the plan asks for another order"


class Filled(nn.Module):
    """Zeros that are filled row by row, as recurrent models keep their outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        y = self.first(x)
        rows = torch.zeros_like(x)
        for at in range(x.shape[1]):
            rows[:, at] = y[:, at].tanh()
        return self.second(rows * x).sum()


def test_zeros_that_are_filled_have_a_gradient_on_other_devices() -> None:
    def build() -> Example:
        torch.manual_seed(2)
        return Example(Filled(), (torch.randn(3, 4, 8),))

    original, again = build(), build()
    model = placed(again, plan_by(captured(again), lambda name: int(name.startswith("mul"))))
    assert first_difference(trained(original.model, original), trained(model, again)) == ""
