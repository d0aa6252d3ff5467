"""A forward that seeds torch, or sets how its ops run, has the numbers of the unplaced model."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import loadmaster as lm

torch = pytest.importorskip("torch", exc_type=ImportError)
from torch import nn  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from loadmaster.cluster.parse import parse_cluster  # noqa: E402
from loadmaster.core.plan import plan_of  # noqa: E402
from loadmaster.runtime.placed import build_placed_model  # noqa: E402


class Noisy(nn.Module):
    """Attention and dropout under whatever `around` sets."""

    def __init__(self, around: Any) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 48), nn.Linear(16, 16)
        self.around = around

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.around():
            query, key, value = self.inner(x).reshape(1, 6, 3, 2, 8).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)
            return nn.functional.dropout(self.outer(mixed.reshape(6, 16)), 0.3)


def seeded() -> Any:
    torch.manual_seed(5)
    return nullcontext()


def seeded_by_method() -> Any:
    torch.default_generator.manual_seed(5)
    return nullcontext()


AROUND = {
    "manual_seed": seeded,
    "manual_seed of a torch.Generator": seeded_by_method,
    "fork_rng": torch.random.fork_rng,
    "sdpa_kernel": lambda: sdpa_kernel(SDPBackend.MATH),
    "cudnn.flags": lambda: torch.backends.cudnn.flags(enabled=False),
}


def build(what: str) -> Noisy:
    torch.manual_seed(0)
    return Noisy(AROUND[what])


def train(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(3)
    x, found = torch.randn(6, 16), []
    for _ in range(2):
        loss = model(x).pow(2).sum()
        loss.backward()
        found += [loss.detach(), *(weight.grad.clone() for weight in model.parameters()), torch.rand(2)]
        model.zero_grad()
    return found


@pytest.mark.parametrize("what", AROUND)
def test_a_forward_that_sets_something_of_torch_is_run_as_it_stands(what: str) -> None:
    wanted = train(build(what))
    graph = lm.capture(build(what), (torch.zeros(6, 16),))
    where = np.arange(graph.num_ops, dtype=np.int32) % 2
    plan = plan_of(where, np.arange(graph.num_ops, dtype=np.int32))
    placed = build_placed_model(build(what), graph, plan, parse_cluster("cpu#0-64MB, cpu#1-64MB"))
    found = train(placed)
    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))
    assert what in placed.explain()


def test_planning_seeds_no_generator() -> None:
    model = build("manual_seed")
    before = torch.get_rng_state()
    lm.capture(model, (torch.zeros(6, 16),))
    assert torch.equal(before, torch.get_rng_state())
