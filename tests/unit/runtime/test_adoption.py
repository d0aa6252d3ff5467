"""Modules and weights that come after placing train as they do in the unplaced model."""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="running needs the extra [torch]")
from torch import nn  # noqa: E402
from torch.nn.utils import parametrizations  # noqa: E402

from loadmaster.zoo.example import Example  # noqa: E402
from tests.placing import captured, first_difference, placed, random_plan, trained  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning"),
]
WIDTH = 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return self.head(self.body(x))


def _wrap(model: Any) -> None:
    model.body[1] = nn.Sequential(model.body[1], nn.Linear(WIDTH, WIDTH))


def _append(model: Any) -> None:
    model.body.append(nn.Linear(WIDTH, WIDTH))


def _exchange(model: Any) -> None:
    model.body[1] = nn.GELU()


def _widen(model: Any) -> None:
    model.head = nn.Linear(WIDTH, 2 * WIDTH)


def _replace_weight(model: Any) -> None:
    model.head.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))


def _resize_weight(model: Any) -> None:
    model.head.weight = nn.Parameter(torch.randn(3, WIDTH))
    model.head.bias = nn.Parameter(torch.randn(3))


def _remove(model: Any) -> None:
    del model.body[1]


def _swap(model: Any) -> None:
    model.body[0], model.body[2] = model.body[2], model.body[0]


def _inject_lora(model: Any) -> None:
    peft = pytest.importorskip("peft", reason="adapters need peft")
    config = peft.LoraConfig(target_modules=["0", "head"], r=2, init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)


CHANGES = {
    "wrapped": _wrap,
    "appended": _append,
    "weight_norm": lambda model: parametrizations.weight_norm(model.head),
    "spectral_norm": lambda model: parametrizations.spectral_norm(model.body[0]),
    "old weight_norm": lambda model: nn.utils.weight_norm(model.head),
    "exchanged": _exchange,
    "wider": _widen,
    "weight replaced": _replace_weight,
    "weight resized": _resize_weight,
    "removed": _remove,
    "swapped": _swap,
    "adapter": _inject_lora,
}
QUICK = ("wrapped", "weight_norm", "weight resized", "removed", "adapter")


@pytest.mark.parametrize("engine", ["hooks", "auto"])
@pytest.mark.parametrize(
    "what", [pytest.param(one, marks=[pytest.mark.slow] * (one not in QUICK)) for one in CHANGES]
)
def test_modules_changed_after_placing_train_as_unplaced(what: str, engine: str) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Net())
    plain, again = models[0], Example(models[1], (torch.randn(4, WIDTH),))
    model = placed(again, random_plan(captured(again), 2, 3), engine=engine)
    assert torch.equal(plain(*again.args), model(*again.args))
    for one in (plain, model):
        torch.manual_seed(1)
        CHANGES[what](one)
    assert first_difference(trained(plain, again, steps=3), trained(model, again, steps=3)) == ""
    assert not any("run by hooks" in note for note in model.notes)
    assert set(model.hf_device_map) == {
        name for name, _ in [*model.named_parameters(), *model.named_buffers()]
    }


def test_get_peft_model_of_a_placed_model_trains_as_unplaced() -> None:
    peft = pytest.importorskip("peft", reason="adapters need peft")
    histories = []
    for is_placed in (False, True):
        torch.manual_seed(0)
        one = Example(Net(), (torch.randn(4, WIDTH),))
        model = placed(one, random_plan(captured(one), 2, 3)) if is_placed else one.model
        torch.manual_seed(1)
        config = peft.LoraConfig(target_modules=["0", "head"], r=2, init_lora_weights=False)
        histories.append(trained(peft.get_peft_model(model, config), one, steps=3))
    assert first_difference(*histories) == ""
