"""A plan changes no number, and every op runs where its plan has it."""

from typing import Any

import pytest

from tests.tensorflow.small_models import (
    MODELS,
    NUM_STEPS,
    OPTIMIZERS,
    build,
    capture,
    place_randomly,
    train_placed,
    train_unplaced,
    weights_of,
)

_FEW, _MANY = 2, 20


def _compare_plans(name: str, optimizer: str, seeds: range) -> None:
    """Losses of five steps and all variables after them, to the bit; devices as TensorFlow says."""
    plain, batch = build(name, optimizer)
    losses = train_unplaced(plain, batch)
    wanted = weights_of(plain)
    model, _ = build(name, optimizer)
    captured = capture(model, batch)
    at_first = [value.numpy().copy() for value in (*model.variables, *model.optimizer.variables)]
    for seed in seeds:
        for variable, value in zip((*model.variables, *model.optimizer.variables), at_first, strict=True):
            variable.assign(value)
        model.reset_metrics()
        placed = place_randomly(captured, seed)
        first = placed.watch(*batch)
        _check_devices(placed, first.device_of)
        found = [first.result["loss"].numpy().tobytes(), *train_placed(placed, batch, NUM_STEPS - 1)]
        assert found == losses, f"seed {seed}"
        assert weights_of(model) == wanted, f"seed {seed}"


def _check_devices(placed: Any, ran: dict[str, str]) -> None:
    graph = placed.placement.problem.graph
    planned = placed.step.planned
    seen = [name for name in graph.op_name if name in ran]
    wrong = [name for name in seen if ran[name] != placed.step.devices[planned[name]].where]
    assert not wrong
    assert {ran[name] for name in seen} == {"CPU:0", "CPU:1", "CPU:2"}
    costly = [name for name, moved in zip(graph.op_name, graph.bytes_moved, strict=True) if moved > 4096]
    assert len([name for name in costly if name in ran]) > 0.9 * len(costly)


@pytest.mark.parametrize(("name", "optimizer"), [("mlp", "adam"), ("lstm", "sgd")])
def test_small_models_on_random_plans_train_as_unplaced_ones(name: str, optimizer: str) -> None:
    _compare_plans(name, optimizer, range(_FEW))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_twenty_random_plans_train_as_the_unplaced_model(name: str, optimizer: str) -> None:
    _compare_plans(name, optimizer, range(_MANY))
