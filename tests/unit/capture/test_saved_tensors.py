"""A forward pass that is never followed by a backward one leaves nothing behind."""

import gc
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the models are PyTorch's")

from torch import nn  # noqa: E402

from loadmaster.zoo.example import Example  # noqa: E402
from tests.spilling import spilled_model  # noqa: E402


def _count_tensors() -> int:
    gc.collect()
    # by type: some objects of torch warn when they are asked for their class
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


def _left_by(action: Any, *, times: int) -> int:
    """Tensors that are there after an action has been done so often, less those after the first two."""
    for _ in range(2):
        action()
    before = _count_tensors()
    for _ in range(times):
        action()
    return _count_tensors() - before


def test_a_spilled_model_that_is_only_evaluated_with_gradients_keeps_no_activation() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Sigmoid(), nn.Linear(6, 2))
    placed = spilled_model(Example(model, (torch.randn(3, 6),)), lambda name: "weight" in name)
    assert _left_by(lambda: placed(torch.randn(3, 6)).sum().item(), times=5) <= 0


def test_planning_a_study_keeps_no_tensor_of_its_rehearsal(tmp_path: Path) -> None:
    from loadmaster.train.study import Study
    from tests.train.small_trials import trial

    def plan() -> None:
        Study([trial("a", num_batches=2)], dir=tmp_path, devices="cpu", memory_cap=1 << 20).plan()

    assert _left_by(plan, times=3) <= 0
