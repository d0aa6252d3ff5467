"""Autocast: a graph is exported on the CPU, but for the device that runs it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="running needs the extra [torch]")

import loadmaster as lm  # noqa: E402
from loadmaster.cluster.parse import parse_cluster  # noqa: E402
from loadmaster.core.errors import PlanError  # noqa: E402
from loadmaster.modules.gpu_casts import Casts  # noqa: E402
from loadmaster.runtime.graph_engine import engine  # noqa: E402
from loadmaster.runtime.graph_engine.gpu_autocast import autocast_for_export, autocast_region  # noqa: E402
from loadmaster.runtime.graph_engine.program import Program, export_program  # noqa: E402
from loadmaster.runtime.placed import build_placed_model  # noqa: E402
from loadmaster.zoo.example import Example  # noqa: E402
from tests.allocations import plain_loss  # noqa: E402
from tests.placing import random_plan  # noqa: E402
from tests.torch_models import example, example_graph  # noqa: E402

ENTER = torch.autocast.__enter__


class Asks(torch.nn.Module):
    """Switches autocast off where it is on, and goes back to the dtypes it found."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)

    def forward(self, x: Any) -> Any:
        y = self.inner(x)
        if torch.is_autocast_enabled(x.device.type):
            with torch.autocast(x.device.type, enabled=False):
                angles = y.float() @ y.float().t()
        else:
            angles = y @ y.t()
        normed = self.norm(y)
        return angles.to(y.dtype), y.to(normed.dtype)


@contextmanager
def gpu_autocast(dtype: Any) -> Iterator[None]:
    """As `torch.autocast("cuda")` leaves it where there is a GPU."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


@contextmanager
def as_a_gpu_casts() -> Iterator[None]:
    """In bf16, on the CPU."""
    with gpu_autocast(torch.bfloat16), torch.autocast("cpu", dtype=torch.bfloat16), Casts("cuda"):
        yield


def step_alike(plain: Example, model: Any, casting: Any) -> None:
    """Loss and gradients of the unplaced model and of the placed one are the same, to the bit."""
    losses = []
    for each in (plain.model, model):
        torch.manual_seed(3)
        with casting():
            losses.append((plain.loss or plain_loss)(each(*plain.args, **plain.kwargs)))
        losses[-1].backward()
    assert torch.equal(*losses)
    theirs = {key: weight.grad for key, weight in plain.model.named_parameters() if weight.grad is not None}
    ours = {key: weight.grad for key, weight in model.named_parameters() if weight.grad is not None}
    assert theirs.keys() == ours.keys()
    assert [key for key, grad in ours.items() if not torch.equal(grad, theirs[key])] == []


def exported(model: Any, **how: Any) -> Program:
    with autocast_for_export(**how):
        return export_program(model, (torch.randn(4, 8),), {}, training=True)


def asked(program: Program) -> tuple[list[Any], list[Any]]:
    """The dtypes of its casts, and the regions of its matrix products."""
    casts = [node.args[1] for node in program.ops if "to.dtype" in str(node.target)]
    products = [node.meta["region"] for node in program.ops if "matmul" in str(node.target)]
    return casts, products


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_graph_for_a_gpu_is_what_the_model_does_under_its_autocast(dtype: Any) -> None:
    with gpu_autocast(dtype):
        casts, products = asked(exported(Asks(), for_gpu=True))
        assert not torch.is_autocast_enabled("cpu")
    assert casts[-2:] == [dtype, torch.float32], "of a linear layer, of a norm: a GPU runs that in float32"
    assert [context[:2] + context[3:4] for (context,) in products] == [("autocast", "cpu", False)]


class Hard(torch.nn.Module):
    """Says 'cuda' itself, as models for GPUs do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        y = self.inner(x)
        with torch.autocast("cuda", enabled=False):
            z = y.float() @ y.float().t()
            exact = z.tanh().to(z.dtype)
            with torch.autocast("cpu", enabled=False):
                inside = z.to(torch.matmul(z, z).dtype)
        again = self.inner(x)
        return exact, inside, x.to(again.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_region_without_autocast_of_the_gpu_is_one_while_exported(dtype: Any) -> None:
    with gpu_autocast(dtype):
        casts, products = asked(exported(Hard(), for_gpu=True))
    assert casts[-3:] == [torch.float32, torch.float32, dtype]
    assert [[context[1] for context in one] for one in products] == [["cuda"], ["cuda", "cpu"]]
    assert not torch.is_autocast_enabled("cpu")
    assert torch.autocast.__enter__ is ENTER


def test_a_failed_export_leaves_autocast_as_it_was() -> None:
    class Fails(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            with torch.autocast("cuda", enabled=False):
                raise ValueError("inside")

    with gpu_autocast(torch.float16), pytest.raises(ValueError, match="inside"):
        exported(Fails(), for_gpu=True)
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") == torch.bfloat16
    assert torch.autocast.__enter__ is ENTER


def test_autocast_of_a_gpu_is_no_matter_of_a_graph_for_the_cpu() -> None:
    with gpu_autocast(torch.bfloat16):
        assert asked(exported(Asks(), for_gpu=False)) == ([torch.float32] * 2, [()])


def test_without_casts_a_graph_is_that_of_a_plan_made_without_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16), gpu_autocast(torch.bfloat16):
        assert asked(exported(Asks(), for_gpu=True, casts=False)) == ([torch.float32] * 2, [()])


def test_a_region_of_the_cpu_is_one_of_the_gpu() -> None:
    with gpu_autocast(torch.float16):
        with autocast_region("cpu", None, False, True):
            assert not torch.is_autocast_enabled("cuda")
        assert torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") == torch.float16


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("gpt2", torch.float16),
        pytest.param("t5", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("t5", torch.float16, marks=pytest.mark.slow),
    ],
)
def test_a_plan_made_without_autocast_runs_under_it(name: str, dtype: Any) -> None:
    """T5 has four casts more there."""
    plain, again = example(name), example(name)
    graph = example_graph(name)
    model = build_placed_model(
        again.model, graph, random_plan(graph, 2, 0), parse_cluster("cpu#0-8GB, cpu#1-8GB")
    )
    step_alike(plain, model, lambda: torch.autocast("cpu", dtype=dtype))


def test_a_plan_for_another_model_is_refused_under_autocast_too() -> None:
    x = torch.randn(4, 8)
    planned, run = (
        torch.nn.Sequential(torch.nn.Linear(8, 8), kind()) for kind in (torch.nn.ReLU, torch.nn.Tanh)
    )
    graph = lm.capture(planned, (x,))
    model = build_placed_model(run, graph, random_plan(graph, 1, 0), parse_cluster("cpu-8GB"))
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(PlanError, match="another model"):
        model(x)


class Branches(torch.nn.Module):
    """Other ops under autocast, and without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        y = self.first(x)
        y = y.sigmoid() if y.dtype == torch.float32 else y.float().tanh()
        return self.last(y if torch.is_grad_enabled() else y + 0.5)


class Narrow(torch.nn.Module):
    """Runs under autocast alone; a second input is another graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: Any, scale: Any = None) -> Any:
        y = self.first(x)
        if y.dtype != torch.bfloat16:
            raise TypeError("16 bit or nothing")
        return self.last(y if scale is None else y * scale)


def under_autocast(
    kind: Any, *args: Any, grad: bool = True, train: bool = True
) -> tuple[Any, Any, list[str]]:
    """What a model gives, and the same placed by a plan made under autocast; and what was noted."""
    plain, again = kind(), kind()
    again.load_state_dict(plain.state_dict())
    graph = lm.capture(again, args[:1], autocast=torch.bfloat16, train=train)
    model = build_placed_model(again, graph, random_plan(graph, 2, 0), parse_cluster("cpu#0-8GB, cpu#1-8GB"))
    plain.train(train)
    model.train(train)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.set_grad_enabled(grad):
        return plain(*args), model(*args), model.notes


@pytest.mark.parametrize("train", [True, False])
def test_a_plan_made_under_autocast_runs_first_without_gradients(train: bool) -> None:
    wanted, found, notes = under_autocast(Branches, torch.randn(4, 8), grad=False, train=train)
    assert torch.equal(wanted, found)
    assert not any("hooks" in note for note in notes), notes


def test_a_model_that_runs_under_autocast_alone_has_graphs_for_other_inputs() -> None:
    wanted, found, notes = under_autocast(Narrow, torch.randn(4, 8), torch.randn(8))
    assert torch.equal(wanted, found)
    assert not any("hooks" in note for note in notes), notes


@contextmanager
def exporting_as_on_a_gpu(*, for_gpu: bool, **how: Any) -> Iterator[None]:
    """There the CPU's autocast is off."""
    with torch.autocast("cpu", enabled=False), autocast_for_export(for_gpu=True, **how):
        yield


def made(name: str) -> Example:
    if name not in (models := {"asks": Asks, "hard": Hard}):
        return example(name)
    torch.manual_seed(7)
    return Example(
        models[name](), (torch.randn(4, 8),), {}, lambda out: sum(one.float().sum() for one in out)
    )


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "bert", "vit", "asks", "hard"])
def test_a_gpus_autocast_played_on_the_cpu_is_that_of_the_unplaced_model(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both run on the CPU with the casts of a GPU; the placed one was exported for it."""
    monkeypatch.setattr(engine, "autocast_for_export", exporting_as_on_a_gpu)
    plain, again = made(name), made(name)
    own = name in ("asks", "hard")
    graph = lm.capture(again.model, again.args) if own else example_graph(name)
    model = build_placed_model(again.model, graph, random_plan(graph, 1, 0), parse_cluster("cpu-8GB"))
    step_alike(plain, model, as_a_gpu_casts)
