"""Models that cannot be exported, cut where their modules begin and end: plain training's numbers."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import loadmaster as lm
from loadmaster.core.errors import PlanError, RunError
from loadmaster.runtime.distributed.pipeline.rank import PipelineRank, TrainOptions
from loadmaster.runtime.distributed.transports import HostTransport, Waits
from loadmaster.zoo.example import Example
from tests.distributed.pipelines import (
    as_batch,
    largest_difference,
    pipeline_placement,
    train_plainly,
    whole_batch,
)
from tests.distributed.run_models import Counting, Tangled, sgd, square

CPU = torch.device("cpu")
ROWS = [3, 3, 2]


def _rank(built: Example, schedule: str, *, recompute: bool = False, per_rank: int = 3) -> PipelineRank:
    placement = pipeline_placement(
        built, per_rank, 3, schedule, per_rank=per_rank, recompute=recompute, devices="cpu#0-2GB"
    )
    waits = Waits(0, 10.0)
    options = TrainOptions(loss=square, optimizer=sgd, seed=3)
    return PipelineRank(placement, built.model, options, 0, CPU, HostTransport(CPU, waits), waits)


def _built() -> Example:
    torch.manual_seed(1)
    return Example(Tangled().double(), (torch.randn(3, 16, dtype=torch.float64),), loss=square)


def _given(built: Example) -> Any:
    batch = whole_batch(built, 3)[0][0]
    return ((batch[:8].to(built.args[0].dtype),), {})


@pytest.mark.parametrize(
    ("schedule", "recompute"), [("gpipe", False), ("interleaved", True), ("zb-h1", False)]
)
def test_stages_of_modules_give_the_weights_of_plain_training(schedule: str, *, recompute: bool) -> None:
    built = _built()
    plain = copy.deepcopy(built)
    given = _given(built)
    rank = _rank(built, schedule, recompute=recompute)
    losses = [rank.step(*given) for _ in range(3)]
    expected = train_plainly(plain, given, ROWS, sgd, steps=3, seed=3)
    assert losses == pytest.approx(expected.losses, rel=1e-12)
    assert largest_difference(built.model.state_dict(), expected.state) < 1e-10
    assert rank._module_cut is not None
    assert rank._module_cut.written == {"embed"}
    assert "cut at module boundaries, since it cannot be exported" in rank.notes[0]
    assert all("forward" not in module.__dict__ for module in built.model.modules())


def test_evaluation_and_outputs_are_those_of_the_model() -> None:
    built = _built()
    plain = copy.deepcopy(built.model).eval()
    given = _given(built)
    rank = _rank(built, "gpipe")
    parts = rank.predict(*given)
    assert parts is not None
    expected = [plain(one) for one in given[0][0].split(ROWS)]
    for (_, part), one in zip(parts, expected, strict=True):
        assert torch.allclose(part, one, rtol=1e-12)
    shares = zip(expected, ROWS, strict=True)
    assert rank.evaluate(*given) == pytest.approx(sum(square(one).item() * n / 8 for one, n in shares))


def test_what_glue_counts_needs_a_process_for_each_stage() -> None:
    torch.manual_seed(1)
    built = Example(Counting(), (torch.randn(3, 16),), loss=square)
    rank = _rank(built, "gpipe")
    with pytest.raises(PlanError, match="changes 'count' outside of the modules"):
        rank.step(*_given(built))


def test_a_cache_object_cannot_go_to_another_stage() -> None:
    class Giver(nn.Linear):
        def forward(self, x: Any) -> Any:
            return super().forward(x), object()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Giver(16, 16) for _ in range(3))

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x, _ = layer(x)
                if x.sum().item() > 1e9:
                    x = x * 0
            return x

    built = Example(Net(), (torch.randn(3, 16),), loss=square)
    with pytest.raises(RunError, match="gives a object, and only tensors and plain values go"):
        _rank(built, "gpipe").step(*_given(built))


@pytest.mark.slow
def test_stages_of_modules_over_processes_train_as_one_process_does() -> None:
    torch.manual_seed(1)
    built = Example(Counting().double(), (torch.randn(3, 16, dtype=torch.float64),), loss=square)
    plain = copy.deepcopy(built)
    given = _given(built)
    with lm.launch(pipeline_placement(built, 2, 3), built.model, loss=square, optimizer=sgd, seed=3) as run:
        losses = [run.step(as_batch(given)) for _ in range(3)]
        state = run.state_dict()
    expected = train_plainly(plain, given, ROWS, sgd, steps=3, seed=3)
    assert losses == pytest.approx(expected.losses, rel=1e-12)
    assert largest_difference(state, expected.state) < 1e-10
