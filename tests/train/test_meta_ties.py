"""Builds that fill a weight and then replace it are left to themselves: resets would give other numbers."""

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from torch import nn  # noqa: E402

from loadmaster.train.meta import on_meta, reset  # noqa: E402


def _chain() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False))


def _tied() -> nn.Module:
    model = _chain()
    model[2].weight = model[0].weight
    return model


def _other_numbers() -> nn.Module:
    model = _chain()
    nn.init.normal_(model[1].weight, std=0.02)
    return model


def test_a_chain_that_modules_fill_themselves_gets_the_numbers_of_a_plain_build() -> None:
    torch.manual_seed(3)
    plain = _chain()
    empty = on_meta(_chain)
    assert empty is not None
    empty.to_empty(device="cpu")
    torch.manual_seed(3)
    reset(empty)
    for name, weight in empty.named_parameters():
        assert torch.equal(weight, plain.get_parameter(name)), name


@pytest.mark.parametrize("build", [_tied, _other_numbers])
def test_a_build_that_does_more_than_resets_is_left_to_itself(build) -> None:  # type: ignore[no-untyped-def]
    assert on_meta(build) is None
