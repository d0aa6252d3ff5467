"""Calls of many shapes: one graph for any batch and sequence if there is one, else hooks."""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="running needs the extra [torch]")
from torch import nn  # noqa: E402

from loadmaster.zoo.example import Example  # noqa: E402
from tests.placing import captured, placed, random_plan  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


class Tokens(nn.Module):
    """Attention over tokens; more arguments come by name, as a Trainer gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.query, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20)

    def forward(self, tokens: Any, **more: Any) -> Any:
        x = self.embed(tokens) + torch.arange(tokens.shape[1])[None, :, None] * 0.1
        y = nn.functional.scaled_dot_product_attention(self.query(x), x, x)
        return self.head(y) / more["items"]


class Loop(Tokens):
    """Knows the length of its sequence."""

    def forward(self, tokens: Any, **more: Any) -> Any:
        x, state = self.embed(tokens), 0.0
        for at in range(tokens.shape[1]):
            state = self.query(x[:, at]) + state
        return self.head(state) / more["items"]


def both(kind: Any, batch: int, seq: int) -> tuple[Any, Any]:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(kind())
    example = Example(models[1], (), inputs(batch, seq))
    return models[0], placed(example, random_plan(captured(example), 2, 3))


def inputs(batch: int, seq: int) -> dict[str, Any]:
    torch.manual_seed(batch * 100 + seq)
    return {"tokens": torch.randint(0, 20, (batch, seq)), "items": torch.tensor(float(batch * seq))}


def same(plain: Any, model: Any, given: dict[str, Any]) -> bool:
    grads, outs = [], []
    for one in (plain, model):
        outs.append(one(**given))
        outs[-1].square().sum().backward()
        grads.append([weight.grad.clone() for weight in one.parameters()])
        one.zero_grad()
    return torch.equal(*outs) and all(map(torch.equal, *grads))


@pytest.mark.slow
def test_many_sequence_lengths_under_kwargs_share_one_graph_to_the_bit() -> None:
    plain, model = both(Tokens, 2, 4)
    for batch, seq in [(2, 4), (3, 4), (4, 4), (2, 6), (3, 9), *((2 + seq % 3, seq) for seq in range(5, 30))]:
        assert same(plain, model, inputs(batch, seq)), (batch, seq)
    assert len(model._engine.graphs) <= 4
    assert "a graph for any batch and sequence was made" in model.explain()
    assert "run by hooks" not in model.explain()


@pytest.mark.slow
def test_more_shapes_than_graphs_are_kept_run_by_hooks_and_say_so() -> None:
    plain, model = both(Loop, 2, 2)
    for _ in range(2):
        for seq in range(2, 22):
            assert same(plain, model, inputs(2, seq)), seq
    assert len(model._engine.graphs) == 16
    assert "called with more than 16 shapes" in model.explain()
