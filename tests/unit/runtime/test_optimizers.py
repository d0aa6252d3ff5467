"""Optimizers over a GPU and the host work as torch lets them on one device, and are left as they were."""

import pytest

torch = pytest.importorskip("torch", reason="running needs the extra [torch]")
from torch import nn  # noqa: E402

from loadmaster.runtime.optimizers import Optimizers, is_divided  # noqa: E402


def two_places() -> nn.Module:
    """A model on two kinds of device, one of which is everywhere."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].to("meta")
    return model


def test_weights_on_two_kinds_of_device_are_updated_together_for_the_time_of_a_step() -> None:
    model = two_places()
    optimizers = Optimizers(model, None, {})
    optimizers.watch()
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []

    class Asking(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: object = None) -> None:
            seen.append(self.param_groups[0]["foreach"])

    asking = Asking(model.parameters(), lr=0.1)
    asking.step()
    assert seen == [True]
    assert made.param_groups[0]["foreach"] is None
    assert asking.param_groups[0]["foreach"] is None, "what is saved is the user's"
    del optimizers
    asking.step()
    assert seen == [True, None], "hooks end with the placed model"


def test_spilled_weights_are_stepped_as_torch_does() -> None:
    model, seen = two_places(), []
    optimizers = Optimizers(model, None, {})
    optimizers.watch(together=False)

    class Asking(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: object = None) -> None:
            seen.append(self.param_groups[0]["foreach"])

    Asking(model.parameters(), lr=0.1).step()
    assert seen == [None]
    del optimizers


def test_what_the_user_chose_stays() -> None:
    weights = list(two_places().parameters())
    assert is_divided(torch.optim.AdamW(weights).param_groups[0])
    assert not is_divided(torch.optim.AdamW(weights, foreach=False).param_groups[0])
    assert not is_divided(torch.optim.AdamW(weights[:2]).param_groups[0]), "one device: torch chooses"
    assert not is_divided(torch.optim.LBFGS(weights).param_groups[0]), "it knows no such choice"


def test_another_models_optimizer_is_left_alone() -> None:
    optimizers = Optimizers(two_places(), None, {})
    optimizers.watch()
    seen = []

    class Asking(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: object = None) -> None:
            seen.append(self.param_groups[0]["foreach"])

    Asking(two_places().parameters(), lr=0.1).step()
    assert seen == [None]
    del optimizers
