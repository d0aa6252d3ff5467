"""Models by call whose layers reach out: weights read elsewhere, calls within calls, state beside modules."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import loadmaster.train as lt
from loadmaster.core.errors import InputError, RunError
from loadmaster.shards.model.built_model import build_trial
from tests.train.test_by_call import WIDTH, Layer, Net, batches, by_call, check, trial_of
from tests.train.test_by_call_odd import OfLayers


class Later(OfLayers):
    """Does something from its third step on, when the first one has long been compared."""

    def run(self, value: torch.Tensor) -> torch.Tensor:
        value = super().run(value)
        return self.reach(value) if self.turns[0] > 2 else value

    def reach(self, value: torch.Tensor) -> torch.Tensor:
        return value


class ReadsAWeight(Later):
    def reach(self, value: torch.Tensor) -> torch.Tensor:
        return value + nn.functional.linear(value, self.layers[1].up.weight[:WIDTH])


class ReadsInPython(Later):
    """No number that is not one would show in the loss: it is compared with nothing."""

    def reach(self, value: torch.Tensor) -> torch.Tensor:
        return 2 * value if float(self.layers[1].up.weight.detach().abs().mean()) > 0 else value


class ReadsAllWeights(Later):
    def reach(self, value: torch.Tensor) -> torch.Tensor:
        return value * torch.stack(torch._foreach_norm(list(self.parameters()))).sum()


class CopiesALayer(Later):
    def reach(self, value: torch.Tensor) -> torch.Tensor:
        other = deepcopy(self.layers[1])
        assert type(other.up.weight) is nn.Parameter
        with torch.no_grad():
            return value + other(value)


class ReadsInAHook(Net):
    """A hook of backward reads a weight."""

    def run(self, value: torch.Tensor) -> torch.Tensor:
        value = super().run(value)
        value.register_hook(lambda grad: grad * (1 + self.layers[1].up.weight.detach().mean()))
        return value


class _Squares(torch.autograd.Function):
    """Keeps a weight by itself, past autograd's saved tensors."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        return value + 0.01 * (value @ weight.t() @ weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] + 0.01 * (grads[0] @ ctx.weight.t() @ ctx.weight), None


class KeepsAWeightInAFunction(OfLayers):
    class Kind(Layer):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return super().forward(_Squares.apply(value, self.up.weight))


class CallsAnotherLayer(OfLayers):
    class Kind(Layer):
        other: Any = ()

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            made = torch.tanh(self.up(self.norm(value)))
            for other in self.other:
                made = made + torch.tanh(other.up(other(value)))
            return value + self.down(made)

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].other, self.layers[3].other = [self.layers[0]], [self.layers[2]]


class DropsLayers(Net):
    """Layers are left out by chance, and come back."""

    def run(self, value: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if torch.rand(()) > 0.4:
                value = layer(value)
        return value


class InAPool(Net):
    def run(self, value: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(1) as pool:  # with more, a plain loop adds in no fixed order
            made = list(pool.map(lambda layer: layer(value), self.layers))
        return torch.stack(made).sum(0)


class TwoThreads(Net):
    def run(self, value: torch.Tensor) -> torch.Tensor:
        found: dict[int, torch.Tensor] = {}
        for at in range(2):
            worker = threading.Thread(target=lambda at=at: found.update({at: self.layers[at](value)}))
            worker.start()
            worker.join()
        return self.layers[3](self.layers[2](found[0] + found[1]))


class Reentrant(Net):
    """Checkpoints its layers the old way, each twice."""

    def run(self, value: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            for layer in self.layers:
                value = checkpoint(layer, value, use_reentrant=True)
        return value


class ReentrantLater(OfLayers):
    def run(self, value: torch.Tensor) -> torch.Tensor:
        self.turns[0] += 1
        if self.turns[0] < 3:
            return super().run(value)
        made: torch.Tensor = checkpoint_sequential(list(self.layers), 2, value, use_reentrant=True)
        return made


class OtherWeightsLater(Later):
    def reach(self, value: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            other = {name: each * 1.01 for name, each in layer.named_parameters()}
            value = torch.func.functional_call(layer, other, (value,))
        return value


class MappedLater(Later):
    def reach(self, value: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            layer.drop.p = 0.0
            value = torch.vmap(layer)(value)
        return value


class GradientOfALayer(Net):
    def run(self, value: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            layer.drop.p = 0.0
            value = value + torch.func.grad(lambda given, layer=layer: layer(given).pow(2).mean())(value)
        return super().run(value)


class GradientInALayer(OfLayers):
    class Kind(Layer):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            self.drop.p = 0.0
            step = super().forward
            return value + torch.func.grad(lambda given: step(given).pow(2).mean())(value)


class UnderInference(Net):
    def run(self, value: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            hint = self.layers[0](value.detach())
        return super().run(value + hint.clone())


class DrawsOfItsOwn(OfLayers):
    class Kind(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.own = torch.Generator().manual_seed(5)
            self.others = [random.Random(3), np.random.default_rng(3)]

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            if self.turns[0] != 2:
                factor = 1 + self.others[0].random() + float(self.others[1].random())
                value = value + 0.1 * factor * torch.randn(WIDTH, generator=self.own)
            return super().forward(value)


class KeepsTables(OfLayers):
    class Kind(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.table: dict[str, Any] = {"a": {"rows": [0]}}
            self.counts = np.zeros(3)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            self.table["a"]["rows"].append(1)
            self.counts += 1
            return super().forward(value * (1 + 0.01 * len(self.table["a"]["rows"]) + 0.01 * self.counts[0]))


class HooksLater(OfLayers):
    class Kind(Layer):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            if self.turns[0] == 3 and not self.up._forward_hooks:
                self.up.register_forward_hook(lambda module, given, out: out * 1.1)
            return super().forward(value)


class WritesAForeignBuffer(OfLayers):
    class Kind(Layer):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            self.root[0].seen += 1
            return super().forward(value * (1 + 0.01 * self.root[0].seen.clone()))

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        for layer in self.layers:
            layer.root = [self]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("again", ["none", "all"])
@pytest.mark.parametrize(
    "build",
    [
        ReadsAWeight,
        ReadsInPython,
        ReadsAllWeights,
        CopiesALayer,
        ReadsInAHook,
        KeepsAWeightInAFunction,
        CallsAnotherLayer,
        DropsLayers,
        InAPool,
        TwoThreads,
        Reentrant,
        ReentrantLater,
        OtherWeightsLater,
        MappedLater,
        GradientOfALayer,
        GradientInALayer,
        UnderInference,
        DrawsOfItsOwn,
        KeepsTables,
        HooksLater,
        WritesAForeignBuffer,
    ],
)
def test_model_that_reaches_out_has_the_bits_of_a_plain_loop(build: Any, again: str) -> None:
    check(trial_of(build), again=again)


def test_weights_read_elsewhere_are_summed_over_micro_batches_and_clipped_as_plain() -> None:
    check(trial_of(ReadsAllWeights, accumulate=2, clip_norm=0.1), again="all", placement="host")


class CountingInAGlobal(OfLayers):
    count = 0

    class Kind(Layer):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            if self.turns[0] > 2:
                CountingInAGlobal.count += 1
            return super().forward(value * (1 + 0.01 * CountingInAGlobal.count))


class WritingItsInputPastAutograd(OfLayers):
    class Kind(Layer):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return super().forward(value * 1.5)

    def run(self, value: torch.Tensor) -> torch.Tensor:
        self.turns[0] += 1
        for layer in self.layers:
            given = value * 1.0
            value = layer(given)
            if self.turns[0] > 2:
                given.data.add_(1.0)
        return value


@pytest.mark.parametrize("build", [CountingInAGlobal, WritingItsInputPastAutograd])
def test_second_run_that_gives_other_numbers_is_said(build: Any) -> None:
    CountingInAGlobal.count = 0
    with pytest.raises(RunError, match="gave other numbers the second time"):
        by_call(trial_of(build), again="all")
    CountingInAGlobal.count = 0
    kept = by_call(trial_of(build), again="none")[0]
    CountingInAGlobal.count = 0
    check(trial_of(build), again="none") if build is WritingItsInputPastAutograd else None
    assert len(kept) == 4


class ClampedByData(OfLayers):
    class Kind(Layer):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            if self.turns[0] > 2:
                self.up.weight.data.clamp_(-0.1, 0.1)
            return super().forward(value)


class SetAnew(OfLayers):
    class Kind(Layer):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            if self.turns[0] > 2:
                self.up.weight.data = self.up.weight.data * 0.5
            return super().forward(value)


class Exchanged(OfLayers):
    class Kind(Layer):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            if self.turns[0] == 3:
                self.up.weight = nn.Parameter(self.up.weight.detach() * 0.5)
            return super().forward(value)


@pytest.mark.parametrize("placement", ["device", "pinned"])
@pytest.mark.parametrize("build", [ClampedByData, SetAnew, Exchanged])
def test_weight_written_past_autograd_at_a_later_step_is_refused(build: Any, placement: str) -> None:
    if build is ClampedByData and placement == "pinned":
        check(trial_of(build), again="none", placement=placement)  # it is written where it stays
        return
    with pytest.raises(InputError, match=r"writes parameter '.*weight'"):
        by_call(trial_of(build), again="none", placement=placement)


def test_weight_read_in_backward_after_its_step_is_refused() -> None:
    class Late(Net):
        def run(self, value: torch.Tensor) -> torch.Tensor:
            if value.requires_grad:
                value.register_hook(lambda grad: grad * self.layers[3].up.weight.detach().mean())
            return super().run(value)

    with pytest.raises(RunError, match="after it had been stepped"):
        by_call(trial_of(Late))
    check(trial_of(Late, clip_norm=1e3))


def test_weight_read_between_two_steps_is_said(tmp_path: Path) -> None:
    net = Net()

    class Peek:
        def on_step(self, trial: str, done: Any) -> None:
            net.layers[1].up.weight.detach().sum()

    with pytest.raises(RunError, match="between two steps"):
        lt.train(net, batches(), memory_cap="64KiB", dir=tmp_path, device="cpu", callbacks=[Peek()])


def test_lazy_module_is_refused_by_the_name_of_its_parameter() -> None:
    class Lazy(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layers[1].up = nn.LazyLinear(3 * WIDTH)

    with pytest.raises(InputError, match=r"layers\.1\.up\.weight.*lazy"):
        build_trial(trial_of(Lazy), device=torch.device("cpu"))


class _Noisy(torch.optim.SGD):
    """Adds noise to what it steps."""

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(torch.randn_like(parameter), alpha=1e-3)
        return found


class _OfAll(torch.optim.SGD):
    """Divides by the norm of all gradients."""

    def step(self, closure: Any = None) -> Any:
        given = [parameter for group in self.param_groups for parameter in group["params"]]
        norm = torch.stack([each.grad.norm() for each in given]).norm()
        for each in given:
            each.grad.div_(norm)
        return super().step(closure)


@pytest.mark.parametrize(
    ("kind", "said"), [(_Noisy, "draws random numbers"), (_OfAll, "at all of them at once")]
)
def test_optimizer_that_shards_would_step_otherwise_is_refused(kind: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        build_trial(trial_of(optim=lambda parameters: kind(parameters, lr=0.1)), device=torch.device("cpu"))


@pytest.mark.parametrize("verify", ["first-step", False])
def test_parameters_that_the_optimizer_does_not_have_stay_as_they_are(verify: Any) -> None:
    def some(parameters: Any) -> Any:
        return torch.optim.AdamW(list(parameters)[:9], lr=1e-2, fused=True)

    check(trial_of(optim=some, verify=verify), again="all")
