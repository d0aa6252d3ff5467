"""Accumulation, GradScaler, autocast and ranges of sizes: what they put into the graph and its digest."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="capture needs the extra [torch]")
from torch import nn  # noqa: E402

from loadmaster import api  # noqa: E402
from loadmaster.core.check import why_not_runnable  # noqa: E402
from loadmaster.core.errors import GraphError, InputError, UnknownNameError  # noqa: E402
from loadmaster.core.graph import NO_GROUP, Graph, Phase  # noqa: E402
from loadmaster.core.plan import Plan  # noqa: E402
from loadmaster.cost.memory import pair_weights_with_updates  # noqa: E402
from loadmaster.graph.capture import capture  # noqa: E402
from loadmaster.modules.loss import compute_loss  # noqa: E402
from tests.allocations import counted_peak  # noqa: E402
from tests.torch_models import example  # noqa: E402
from tests.unit.capture.test_memory import captured, simulated_peak  # noqa: E402


def mlp() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 4))


INPUT = (torch.ones(6, 8),)


def reads(graph: Graph, op: str) -> set[str]:
    index = graph.op_name.index(op)
    return {graph.op_name[graph.tensor_op[t]] for t in graph.use_tensor[graph.use_op == index]}


def names(graph: Graph, phase: Phase) -> list[str]:
    return [graph.op_name[op] for op in np.flatnonzero(graph.phase == phase)]


@pytest.mark.parametrize(
    ("name", "path"),
    [
        pytest.param(name, path, marks=() if name in quick else pytest.mark.slow)
        for path, quick in {
            None: ("gpt2", "lstm", "branching"),
            "traced": ("resnet", "branching"),
            "estimated": ("lstm", "branching"),
        }.items()
        for name in ("gpt2", "resnet", "lstm", "branching")
    ],
)
def test_an_accumulated_step_peaks_where_a_real_one_does(name: str, path: str | None) -> None:
    e = example(name)
    graph = capture(e.model, e.args, e.kwargs, loss=e.loss, accumulation=3, path=path)
    real = counted_peak(example(name), accumulation=3)
    assert simulated_peak(graph) == pytest.approx(real, rel=0.01)
    assert graph.flops.sum() == 3 * captured(name, path).flops.sum()


def test_gradients_are_there_from_the_first_micro_step_on() -> None:
    once, twice, often = (
        simulated_peak(capture(mlp(), INPUT, accumulation=n, optimizer=None)) for n in (1, 2, 5)
    )
    assert once < twice == often


@pytest.mark.parametrize("path", ["joint", "traced", "estimated"])
def test_micro_steps_repeat_the_models_own_ops_on_their_devices(path: str) -> None:
    plain, graph = (capture(mlp(), INPUT, path=path, accumulation=n) for n in (1, 4))
    first = [op for op in names(graph, Phase.FORWARD) if "@" not in op]
    assert first == [*names(plain, Phase.FORWARD), "loss.div"]
    for step in (2, 3, 4):
        again = [op.replace(f"@{step}", "") for op in names(graph, Phase.FORWARD) if f"@{step}" in op]
        assert again == [op for op in first if op != "input"]
    at = {op: index for index, op in enumerate(graph.op_name)}
    for op in names(graph, Phase.FORWARD):
        if "@" in op:
            own = graph.group[at[op.split("@")[0] + op.partition("@")[2][1:]]]
            assert graph.group[at[op]] == own != NO_GROUP
    assert len(names(graph, Phase.UPDATE)) == 6


def test_each_micro_step_adds_to_what_the_one_before_left() -> None:
    graph = capture(nn.Linear(4, 4, bias=False), (torch.ones(2, 4),), accumulation=4)
    made = [op for op in names(graph, Phase.BACKWARD) if graph.op_kind[graph.op_name.index(op)] == "add_"]
    assert len(made) == 3
    grads = ["linear.backward", *made]
    for before, after in zip(grads, [*made, "weight.update"], strict=True):
        assert before in reads(graph, after)
    base = {
        int(graph.tensor_storage[t])
        for op in grads
        for t in np.flatnonzero(graph.tensor_op == graph.op_name.index(op))
    }
    assert len(base) == 1
    assert graph.keep[base.pop()]


def test_a_running_mean_goes_from_micro_step_to_micro_step() -> None:
    graph = capture(mlp(), INPUT, accumulation=3, path="joint")
    norm = next(op for op in names(graph, Phase.FORWARD) if "batch_norm" in op)
    assert norm in reads(graph, f"{norm}@2")
    assert f"{norm}@2" in reads(graph, f"{norm}@3")
    assert norm not in reads(graph, f"{norm}@3")


def test_a_plan_of_an_accumulated_step_takes_its_time_as_often() -> None:
    times = []
    for n in (1, 2, 8):
        graph = capture(mlp(), INPUT, accumulation=n, optimizer=None)
        times.append(api.plan(graph, "1xA100-80GB", budget=0.2).score_s)
    assert times[2] - times[1] == pytest.approx(6 * (times[1] - times[0]), rel=0.2)


def test_micro_steps_in_their_own_order_can_be_run_and_others_cannot() -> None:
    graph = capture(mlp(), INPUT, accumulation=3)
    problem = api.problem(graph, "2xA100-80GB")
    order = np.arange(graph.num_ops, dtype=np.float64)
    together = np.zeros(graph.num_ops, dtype=np.int32)
    never = np.zeros(graph.num_ops, dtype=np.bool_)
    assert why_not_runnable(problem, Plan(together, order, never, None)) == []
    back = np.flatnonzero(graph.phase == Phase.BACKWARD)
    turned = order.copy()
    turned[back] = order[back][::-1]
    found = why_not_runnable(problem, Plan(together, turned, never, None))
    assert found == ["backward ops do not run in the reverse order of their forward ops"]


def test_a_scaled_loss_is_unscaled_and_checked_before_any_update() -> None:
    graph = capture(mlp(), INPUT, grad_scaler=True, accumulation=2)
    weights = [name for name, _ in mlp().named_parameters()]
    assert reads(graph, "loss.mul") == {"loss.div", "grad_scaler.scale"}
    assert reads(graph, "grad_scaler.check") == {f"{weight}.unscale" for weight in weights}
    for weight in weights:
        unscale, update = graph.op_name.index(f"{weight}.unscale"), graph.op_name.index(f"{weight}.update")
        assert {"grad_scaler.check", f"{weight}.unscale", weight} == reads(graph, f"{weight}.update")
        assert graph.group[unscale] == graph.group[update] == graph.group[graph.op_name.index(weight)]
        size = 4 * dict(mlp().named_parameters())[weight].numel()
        assert graph.bytes_moved[unscale] == 2 * size
    _, update = pair_weights_with_updates(graph)
    assert sorted(graph.op_name[op] for op in update) == sorted(f"{weight}.update" for weight in weights)
    plain = capture(mlp(), INPUT, accumulation=2)
    assert simulated_peak(graph) == pytest.approx(simulated_peak(plain), rel=0.02)  # in place


def test_every_option_is_in_the_text_and_in_the_digest() -> None:
    options: list[dict[str, Any]] = [
        {},
        {"accumulation": 2},
        {"accumulation": 3},
        {"grad_scaler": True},
        {"autocast": torch.bfloat16},
        {"autocast": torch.float16},
        {"target": "cuda"},
        {"ranges": {"batch": (2, 64)}},
        {"ranges": {"batch": (3, 64)}},
    ]
    graphs = [capture(mlp(), INPUT, **given) for given in options]
    assert len({graph.digest for graph in graphs}) == len(options)
    assert len({graph.capture for graph in graphs}) == len(options)
    assert [graph.capture.split("; ")[1] for graph in graphs[1:]] == [
        "accumulation 2",
        "accumulation 3",
        "grad_scaler",
        "autocast bfloat16",
        "autocast float16",
        "kernels of cuda",
        "batch 2 to 64",
        "batch 3 to 64",
    ]
    assert capture(mlp(), INPUT, ranges={"batch": (2, 64)}).digest == graphs[7].digest


def test_a_range_holds_where_both_ends_run_the_same_ops() -> None:
    e = example("bert")
    graph = capture(e.model, e.args, e.kwargs, ranges={"batch": (1, 64), "seq": (2, 63)})
    assert "batch 1 to 64; seq 2 to 63" in graph.capture
    same = capture(e.model, e.args, e.kwargs)
    assert graph.op_name == same.op_name
    assert graph.tensor_bytes.tolist() == same.tensor_bytes.tolist()  # the example's own sizes


class Switching(nn.Module):
    """Another op for long sequences, a longer one for a large batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        y = self.linear(x)
        y = torch.tanh(y) if x.shape[1] > 100 else torch.relu(y)
        return y.exp() if x.shape[0] > 100 else y


@pytest.mark.parametrize("path", [None, "traced"])
def test_a_range_with_other_ops_at_an_end_is_refused_by_the_ops_name(path: str | None) -> None:
    x = (torch.ones(4, 10, 8),)
    with pytest.raises(
        GraphError, match=r"with seq 101 .* 'tanh' \(tanh\) where the example has 'relu' \(relu\)"
    ):
        capture(Switching(), x, ranges={"seq": (1, 101)}, path=path)
    with pytest.raises(GraphError, match=r"with batch 101 .* 'exp'"):
        capture(Switching(), x, ranges={"batch": (1, 101)}, path=path)
    assert capture(Switching(), x, ranges={"batch": (1, 100), "seq": (1, 100)}, path=path).num_ops > 0


def test_a_range_the_model_cannot_run_is_refused_with_its_own_error() -> None:
    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places = nn.Parameter(torch.ones(10, 8))

        def forward(self, x: Any) -> Any:
            return x + self.places

    with pytest.raises(GraphError, match=r"with seq 11: Placed cannot run on the example.*narrow the range"):
        capture(Placed(), (torch.ones(4, 10, 8),), ranges={"seq": (10, 11)})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"accumulation": 0}, InputError, "accumulation is 0; give the number of passes"),
        ({"accumulation": True}, InputError, "accumulation is True"),
        ({"accumulation": 2.5}, InputError, "accumulation is 2.5"),
        ({"accumulation": 2, "train": False}, InputError, "accumulation is of a training step"),
        ({"grad_scaler": "yes"}, InputError, "grad_scaler is 'yes'; give True or False"),
        ({"grad_scaler": True, "train": False}, InputError, "grad_scaler is of a training step"),
        ({"autocast": torch.int8}, InputError, "autocast is torch.int8; give torch.bfloat16"),
        ({"autocast": "bf16"}, InputError, "autocast is 'bf16'"),
        ({"ranges": {"bach": (1, 2)}}, UnknownNameError, "did you mean 'batch'"),
        ({"ranges": {"batch": 3}}, InputError, r"ranges\['batch'\] is 3; give two whole numbers"),
        ({"ranges": {"batch": (9, 3)}}, InputError, "give 1 <= low <= high"),
        ({"ranges": {"batch": (7, 64)}}, InputError, "the example has batch 6, not in 7 to 64"),
    ],
)
def test_a_bad_option_is_answered_with_what_to_give(options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        capture(mlp(), INPUT, **options)


class WithTerm(nn.Module):
    """Gives rows, and a term of the loss that only the first of its two modules has a part in."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, rows: Any) -> Any:
        hidden = self.first(rows)
        return self.second(hidden), hidden.pow(2).mean()


@pytest.mark.parametrize("path", [None, "traced", "estimated"])
def test_a_term_of_the_loss_beside_the_outputs_is_not_the_loss(path: str | None) -> None:
    graph = capture(WithTerm(), INPUT, optimizer=torch.optim.SGD, path=path)
    updated = {name.removesuffix(".update") for name in names(graph, Phase.UPDATE)}
    assert updated == dict(WithTerm().named_parameters()).keys()


@pytest.mark.parametrize("first", [True, False])
def test_a_loss_beside_the_logits_it_is_made_of_is_the_loss(first: bool) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, rows: Any) -> Any:
            logits = self.layer(rows)
            loss = logits.logsumexp(-1).mean()
            return (loss, logits) if first else (logits, loss)

    graph = capture(Both(), INPUT, optimizer=torch.optim.SGD)
    assert "loss" not in graph.module, "no op but the model's own"


def test_a_scalar_weight_that_a_model_gives_is_its_loss_only_where_all_else_hangs_on_it() -> None:
    scale, layer = nn.Parameter(torch.tensor(2.0)), nn.Linear(8, 4)
    rows = layer(*INPUT)
    assert compute_loss((scale, scale * 3), None) is scale
    assert compute_loss((scale, rows), None).item() == pytest.approx((scale + rows.mean()).item())
    assert compute_loss((rows.sum(), layer.weight), None).item() == rows.sum().item()
