"""Stashed activations: they wait on another device for the backward pass, and the numbers are the same."""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="running needs the extra [torch]")
from torch import nn  # noqa: E402

import loadmaster as lm  # noqa: E402
from loadmaster.graph.spill import RESTORE  # noqa: E402
from loadmaster.graph.transformer import transformer  # noqa: E402
from loadmaster.runtime.placed import build_placed_model  # noqa: E402
from loadmaster.zoo.example import Example  # noqa: E402
from tests.placing import captured, first_difference, trained  # noqa: E402
from tests.reference import simulate as reference  # noqa: E402
from tests.spilling import COMPUTES, STORES, nothing, spilled_model, spilling  # noqa: E402
from tests.torch_models import NAMES, example  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH, ROWS, DEEP = 16, 256, 6


def everything(_: str) -> bool:
    return True


class Wide(nn.Module):
    """Activations outweigh everything else; some ops save what they read, some what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEEP))

    def forward(self, x: Any) -> Any:
        for at, layer in enumerate(self.layers):
            x = layer(x).tanh() if at % 2 else nn.functional.gelu(layer(x))
        return x.square().mean()


def wide() -> Example:
    torch.manual_seed(0)
    return Example(Wide(), (torch.randn(ROWS, WIDTH),))


@pytest.mark.parametrize("name", ["gpt2", "resnet", "lstm"])
@pytest.mark.parametrize("weights", [everything, nothing])
def test_numbers_are_those_of_plain_training(name: str, weights: Any) -> None:
    plain, again = example(name), example(name)
    model = spilled_model(again, weights, stashed=everything, window_bytes=1 << 14)
    assert model._engine.spill.stashing
    assert first_difference(trained(plain.model, plain), trained(model, again)) == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name != "branching"])
@pytest.mark.parametrize("every", [1, 2])
def test_numbers_of_every_family_are_those_of_plain_training(name: str, every: int) -> None:
    plain, again = example(name), example(name)
    model = spilled_model(again, nothing, stashed=lambda op: sum(map(ord, op)) % every == 0)
    assert first_difference(trained(plain.model, plain), trained(model, again)) == ""


@pytest.mark.slow
def test_the_device_holds_less_and_no_more_than_predicted() -> None:
    whole = lm.problem(captured(wide()), "cpu#0-64MB, cpu#1-64MB")
    peaks = {}
    for name, stashed in (("kept", nothing), ("stashed", everything)):
        problem, plan = spilling(whole, nothing, window_bytes=1, stashed=stashed)
        made = wide()
        model: Any = build_placed_model(made.model, problem.graph, plan, problem.cluster)
        trained(model, made)
        predicted = lm.simulate(problem, plan).peak_bytes
        peaks[name] = model._engine.accounts.peak_bytes
        for device in (COMPUTES, STORES):
            assert peaks[name][device] <= predicted[device]
    saved = 2 * DEEP * 4 * ROWS * WIDTH
    assert peaks["stashed"][COMPUTES] < peaks["kept"][COMPUTES] - saved / 2
    assert peaks["stashed"][STORES] >= saved / 2


def test_what_was_written_after_it_was_saved_is_kept_as_it_is() -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            x = self.first(x)
            x = x.relu_() if x.shape[0] > 1 else x
            y = self.second(x)
            y[:, :4] = 0.5
            return y.exp().mean()

    def made() -> Example:
        torch.manual_seed(0)
        return Example(Written(), (torch.randn(4, WIDTH),))

    plain, again = made(), made()
    model = spilled_model(again, nothing, stashed=everything)
    assert first_difference(trained(plain.model, plain), trained(model, again)) == ""


def test_a_second_backward_and_a_pass_without_gradients() -> None:
    plain, again = wide(), wide()
    model = spilled_model(again, everything, stashed=everything)
    losses = []
    for each, made in ((plain.model, plain), (model, again)):
        loss = each(*made.args)
        loss.backward(retain_graph=True)
        loss.backward()
        with torch.no_grad():
            losses.append(float(each(*made.args)))
    assert losses[0] == losses[1]
    for mine, theirs in zip(model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_nothing_is_left_on_either_device_after_a_step() -> None:
    made = wide()
    model = spilled_model(made, nothing, stashed=everything)
    seen = []
    for _ in range(4):
        model(*made.args).backward()
        seen.append(tuple(model._engine.accounts.live_bytes))
    assert len(set(seen[1:])) == 1


def test_both_simulators_agree_on_graphs_with_restores() -> None:
    whole = lm.problem(captured(example("gpt2")), "H200-200GB, cpu-500GB")
    for window in (1, 1 << 14, 1 << 24):
        problem, plan = spilling(whole, everything, window_bytes=window, stashed=everything)
        assert RESTORE in problem.graph.op_kind
        timeline, other = (
            lm.simulate(problem, plan),
            reference(problem, plan, dispatch="in_order", links="shared"),
        )
        assert timeline.step_s == other.step_s
        assert timeline.peak_bytes.tolist() == list(other.peak_bytes)


def test_memory_too_small_for_the_activations_is_no_cliff() -> None:
    """All weights spilled are not enough; before, ops ran on the host then, many times slower."""
    graph = transformer(num_layers=6, width=512, num_heads=8, seq=512, batch=16, vocab=1000)
    roomy = lm.problem(graph, "H200-64GB, cpu-64GB", optimizer="adamw")
    free = lm.plan(roomy, budget="50x")
    problem, plan = spilling(roomy, everything, window_bytes=1)
    least = int(lm.simulate(problem, plan).peak_bytes[COMPUTES])
    small = lm.problem(graph, f"H200-{int(0.7 * least)}B, cpu-64GB", optimizer="adamw")
    tight, elsewhere = lm.plan(small, budget="100x", spill="host"), lm.plan(small, budget="100x")
    assert RESTORE in tight.problem.graph.op_kind
    assert free.score_s is not None
    assert tight.score_s is not None
    assert tight.fits
    assert tight.score_s < 4 * free.score_s
    assert elsewhere.score_s is None or elsewhere.score_s > 2 * tight.score_s
