"""`lm.verify` of a TensorFlow step: the same numbers, faults that are found, and the model as it was."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loadmaster as lm
import tensorflow as tf
from loadmaster.core.errors import InputError
from loadmaster.runtime.tensorflow import placed_step
from tests.tensorflow.small_models import build, capture, random_plan, weights_of


def test_a_plan_is_verified_and_the_model_stays_as_it_was(tmp_path: Path) -> None:
    model, batch = build("mlp")
    placement = random_plan(capture(model, batch).graph, 0)
    before = weights_of(model)
    homes = [weight.value.device for weight in model.trainable_variables]
    found = lm.verify(model, placement, batch)
    assert (found.ok, found.identical, found.loss) == (True, True, found.reference_loss)
    assert {weight.path for weight in model.trainable_variables} <= set(found.variables)
    assert "to the bit" in str(found)
    assert weights_of(model) == before
    assert [weight.value.device for weight in model.trainable_variables] == homes
    lm.save(placement, tmp_path / "p.json")
    smaller = lm.verify(model, tmp_path / "p.json", tuple(part[:5] for part in batch))
    assert smaller.ok


def test_a_fault_of_the_placed_step_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = build("mlp")
    placement = random_plan(capture(model, batch).graph, 0)
    copy = placed_step.copy_variable

    def copy_badly(variable: Any, where: str) -> Any:
        made = copy(variable, where)
        if made.dtype == tf.float32 and made.shape.rank == 2:
            made.assign(made * 1.001)
        return made

    monkeypatch.setattr(placed_step, "copy_variable", copy_badly)
    found = lm.verify(model, placement, batch)
    assert not found.ok
    assert not found.identical
    assert "differs from the unplaced step's by" in str(found)


def test_a_function_is_verified_and_wrong_questions_are_refused() -> None:
    weight = tf.Variable(tf.ones(3))

    @tf.function
    def step(x: Any) -> Any:
        return tf.reduce_sum(x * weight)

    x = np.ones(3, np.float32)
    placement = random_plan(capture(step, (x,)).graph, 0, "cpu#0-1GB, cpu#1-1GB")
    assert lm.verify(step, placement, (x,)).identical
    with pytest.raises(InputError, match="leave seed out"):
        lm.verify(step, placement, (x,), seed=3)
    with pytest.raises(InputError, match="leave loss out"):
        lm.verify(step, placement, (x,), loss=abs)
    with pytest.raises(InputError, match="is not a plan"):
        lm.verify(step, (x,), (x,))
    with pytest.raises(InputError, match="placed already"):
        lm.verify(lm.place(step, placement), placement, (x,))
