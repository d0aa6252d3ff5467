"""Builds that do more than let modules reset themselves are left to themselves: resets give other numbers."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from torch import nn  # noqa: E402

import loadmaster.train as lt  # noqa: E402
from loadmaster.modules.meta_build import build_on_meta, reset_modules  # noqa: E402


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
    empty = build_on_meta(_chain)
    assert empty is not None
    empty.to_empty(device="cpu")
    torch.manual_seed(3)
    reset_modules(empty)
    for name, weight in empty.named_parameters():
        assert torch.equal(weight, plain.get_parameter(name)), name


@pytest.mark.parametrize("build", [_tied, _other_numbers])
def test_a_build_that_does_more_than_resets_is_left_to_itself(build) -> None:  # type: ignore[no-untyped-def]
    assert build_on_meta(build) is None


def _silent_on_meta(init: str) -> nn.Module:
    """torch's own initialisation returns at once for a tensor on meta: it writes and draws nothing."""
    model = _chain()
    fill = getattr(nn.init, init)
    fill(model[1].weight, 0.5) if init == "sparse_" else fill(model[1].weight)
    return model


def _asks_for_the_device() -> nn.Module:
    model = _chain()
    if model[1].weight.device.type != "meta":
        nn.init.zeros_(model[1].weight)
    return model


@pytest.mark.parametrize("init", ["trunc_normal_", "orthogonal_", "sparse_", "own"])
def test_an_initialisation_that_does_nothing_on_meta_is_still_that_of_the_trial(
    init: str, tmp_path: Path
) -> None:
    def build() -> nn.Module:
        return _asks_for_the_device() if init == "own" else _silent_on_meta(init)

    rows = [(torch.tensor([[0, 1, 2]]), torch.tensor([[1, 2, 3]]))]
    trial = lt.Trial(
        name="t",
        build=build,
        loss=lambda out, wanted: nn.functional.cross_entropy(out.flatten(0, 1), wanted.flatten()),
        data=lambda: rows,
        optim=lambda weights: torch.optim.SGD(weights, lr=0.0),  # what it began with, it ends with
        seed=3,
    )
    torch.manual_seed(3)
    plain = build().state_dict()
    found = lt.Study(trial, dir=tmp_path, devices="cpu").fit()["t"].state_dict()
    assert all(torch.equal(found[name], plain[name]) for name in plain)


@pytest.mark.parametrize(
    "module",
    [
        lambda: nn.LSTM(4, 4, 2),
        lambda: nn.Conv2d(2, 2, 3),
        lambda: nn.BatchNorm1d(4),
        lambda: nn.LayerNorm(4),
        lambda: nn.Bilinear(2, 2, 2),
    ],
)
def test_modules_that_reset_themselves_are_still_built_without_memory(module) -> None:  # type: ignore[no-untyped-def]
    assert build_on_meta(lambda: nn.Sequential(nn.Linear(4, 4), module())) is not None
