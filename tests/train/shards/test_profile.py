"""What a trial's blocks are found to do, on tensors without values, against arithmetic by hand."""

from typing import Any

import pytest
import torch
from torch import nn

import loadmaster.train as lt
from loadmaster.shards.model.blocks import build_chain
from loadmaster.shards.model.profile import profile

BATCH, LENGTH, WIDTH, HEADS, SHARED = 3, 5, 32, 4, 2


class Attention(nn.Module):
    """Four heads over the keys and values of two."""

    def __init__(self) -> None:
        super().__init__()
        each = WIDTH // HEADS
        self.query, self.key, self.value = (nn.Linear(WIDTH, n * each) for n in (HEADS, SHARED, SHARED))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [
            made(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for made in (self.query, self.key, self.value)
        ]
        found = nn.functional.scaled_dot_product_attention(*made, is_causal=True, enable_gqa=True)
        return x + found.transpose(1, 2).flatten(2)


def attentive(**more: Any) -> lt.Trial:
    """Three of these, trained on noise."""

    def data() -> list[Any]:
        made = torch.Generator().manual_seed(0)
        return list(torch.randn(4, 2, BATCH, LENGTH, WIDTH, generator=made).unbind())

    return lt.Trial(
        name="t",
        build=lambda: nn.Sequential(Attention(), Attention(), Attention()),
        loss=nn.functional.mse_loss,
        data=lambda: [tuple(each) for each in data()],
        optim=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        **more,
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_keys_that_heads_share_count_for_each_head_whatever_torchs_own_formula_says(
    precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def as_it_is_in_torch_2_11(query: Any, key: Any, value: Any) -> int:
        assert query[:2] == key[:2] == value[:2]
        return 0

    monkeypatch.setattr("torch.utils.flop_counter.sdpa_flop_count", as_it_is_in_torch_2_11)
    trial = attentive(precision=precision)
    chain = build_chain(trial, trial.build())
    facts = profile(trial, chain, next(iter(trial.data())), device=torch.device("cpu"))
    rows = BATCH * LENGTH
    linear = 2 * rows * WIDTH * (WIDTH + 2 * WIDTH * SHARED // HEADS)
    attention = 2 * 2 * rows * LENGTH * WIDTH
    assert facts.flops == (linear + attention,) * 3
