"""Memory that two things share: tied the way PyTorch ties, or refused by both names."""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="training needs the extra [torch]")
from torch import nn  # noqa: E402

import loadmaster.train as lt  # noqa: E402
from loadmaster.core.errors import InputError  # noqa: E402
from loadmaster.shards.device.cpu_device import CpuDevice  # noqa: E402
from tests.train.shards.test_silence import WIDTH, equal, layers, sharded  # noqa: E402
from tests.train.small_trials import trial  # noqa: E402


@pytest.mark.parametrize("own_numbers", [False, True], ids=["meta", "cpu"])
def test_weights_tied_by_data_are_refused_by_both_names(own_numbers: bool) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(*layers())
        if own_numbers:
            nn.init.normal_(model[0].weight)
        model[2].weight.data = model[0].weight.data
        return model

    with pytest.raises(InputError, match=r"'0.weight' and '2.weight' of its model share memory"):
        sharded(build)


def test_frozen_weights_tied_by_data_are_no_matter() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(*layers())
        for at in (0, 2):
            model[at].weight.requires_grad_(False)
        nn.init.normal_(model[0].weight, std=0.2)
        model[2].weight.data = model[0].weight.data
        return model

    equal(build, cap_bytes=20_000)


def test_weights_tied_as_one_parameter_are_trained_as_one() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(*layers())
        model[2].weight = model[0].weight
        return model

    equal(build, cap_bytes=16_000)


class Halves(nn.Module):
    """Two parameters that lie in one matrix and have nothing in common."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.randn(WIDTH, 2 * WIDTH) / 4
        self.a, self.b = nn.Parameter(whole[:, :WIDTH]), nn.Parameter(whole[:, WIDTH:])

    def forward(self, x: Any) -> Any:
        return x @ self.a + x @ self.b


def test_parts_of_one_tensor_that_do_not_overlap_are_two_parameters() -> None:
    equal(lambda: nn.Sequential(Halves(), *layers(2)), cap_bytes=20_000)


class Following(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", self.linear.weight.data[0])

    def forward(self, x: Any) -> Any:
        return self.linear(x) + self.seen


def test_a_buffer_that_is_part_of_a_weight_is_refused() -> None:
    with pytest.raises(InputError, match=r"'0.linear.weight' and '0.seen' of its model share memory"):
        sharded(lambda: nn.Sequential(Following(), *layers()))


def test_one_model_given_to_two_trials_is_refused_by_the_names_of_both(tmp_path: Any) -> None:
    model = trial("x").build()
    trials = [trial("a", build=lambda: model), trial("b", build=lambda: model)]
    with pytest.raises(InputError, match="trials 'a' and 'b' were given the same object: its model"):
        lt.Study(trials, dir=tmp_path, devices="cpu").plan()


def test_a_trained_layer_given_to_two_trials_is_refused_and_a_frozen_one_is_not(tmp_path: Any) -> None:
    layer = nn.Linear(6, 16)

    def study() -> lt.Study:
        build = lambda: nn.Sequential(layer, nn.Linear(16, 3))  # noqa: E731
        return lt.Study([trial(n, build=build, max_steps=2) for n in "ab"], dir=tmp_path, devices="cpu")

    with pytest.raises(InputError, match=r"trials 'a' and 'b' .* parameter '0.weight' of 'b'"):
        study().plan()
    layer.requires_grad_(False)
    study().plan()


class Counts(nn.Module):
    """Divides by how often it ran, as schedules inside of models do, and mixes in what it gave last."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls, self.last = nn.Linear(WIDTH, WIDTH), 0, None

    def forward(self, x: Any) -> Any:
        self.calls += 1
        out = self.linear(x) / self.calls
        if self.last is not None:
            out = out + 0.1 * self.last
        self.last = out.detach()
        return out


def test_attributes_that_forward_sets_are_those_of_a_plain_loop() -> None:
    equal(lambda: nn.Sequential(Counts(), Counts(), Counts()))


def test_a_group_refuses_one_model_given_twice() -> None:
    from loadmaster.train.backbone.group import open_group
    from tests.train.lora_trials import lora

    model = lora("x").build()
    trials = [lora("a", build=lambda: model), lora("b", build=lambda: model)]
    with pytest.raises(InputError, match="trials 'a' and 'b' were given the same object"):
        open_group(trials, device=CpuDevice(cap_bytes=1 << 20))
