"""Training: the same seed gives the same weights, a checkpoint goes on to them, and it learns something."""

import json
from pathlib import Path

import numpy as np
import pytest

from loadmaster.core.errors import InputError

torch = pytest.importorskip("torch", reason="training needs the extra [torch]")

from loadmaster.placers.learned._order_network import NetworkSize, make_network  # noqa: E402
from loadmaster.placers.learned._weights import load_weights  # noqa: E402
from loadmaster.placers.learned.training.evaluate import evaluate_weights, parse_budgets, time_after  # noqa: E402
from loadmaster.placers.learned.training.examples import HELD_OUT, Example, digest_of  # noqa: E402
from loadmaster.placers.learned.training.session import (  # noqa: E402
    SessionSettings,
    draw_examples,
    train_on,
    train_weights,
)
from loadmaster.placers.learned.training.train import Trainer, TrainSettings, mean_log_ratio  # noqa: E402

TINY = TrainSettings(imitation=6, reinforcement=4, batch=2, samples=4, width=16, rounds=2)
STEPS = [0, 4, 8, 10]  # seeds of small problems of a step, soon solved


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    return draw_examples([*STEPS, 1, 3])


def test_examples_are_the_same_every_time(examples: list[Example]) -> None:
    again = draw_examples([*STEPS, 1, 3])
    assert digest_of(again) == digest_of(examples)
    assert digest_of(again[1:]) != digest_of(examples)
    assert any(one.proven for one in examples)


def test_answers_are_never_worse_than_the_usual_plans(examples: list[Example]) -> None:
    for one in examples:
        assert one.best_s <= one.usual_s * (1 + 1e-12)
        assert ((one.place >= 0) & (one.place <= 1)).all()


def test_the_same_seed_gives_the_same_weights_to_the_bit(examples: list[Example]) -> None:
    states = []
    for seed in (0, 0, 1):
        from dataclasses import replace

        trainer = Trainer(replace(TINY, seed=seed), examples, [])
        trainer.run(every=5)
        states.append(trainer.network.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not all(torch.equal(states[0][name], states[2][name]) for name in states[0])


def test_a_resumed_training_ends_with_the_same_weights(examples: list[Example], tmp_path: Path) -> None:
    whole = Trainer(TINY, examples, examples[:2])
    whole.run(every=5)
    path = tmp_path / "checkpoint.safetensors"
    first = Trainer(TINY, examples, examples[:2])
    for _ in range(5):
        first.update += first._step(first._imitate) >= 0.0 or 1
    first._look("imitation", 0.0, 0.0)
    first.save_checkpoint(path)
    second = Trainer(TINY, examples, examples[:2])
    second.load_checkpoint(path)
    assert second.update == 5
    second.run(every=5)
    for name, value in whole.network.state_dict().items():
        assert torch.equal(value, second.network.state_dict()[name]), name
    assert [point.held_out for point in second.curve] == [point.held_out for point in whole.curve]


def test_a_checkpoint_of_other_settings_is_refused(examples: list[Example], tmp_path: Path) -> None:
    from dataclasses import replace

    path = tmp_path / "checkpoint.safetensors"
    Trainer(TINY, examples, []).save_checkpoint(path)
    with pytest.raises(InputError, match="other settings"):
        Trainer(replace(TINY, seed=5), examples, []).load_checkpoint(path)


def test_a_session_writes_weights_named_by_their_set_and_a_curve(tmp_path: Path) -> None:
    found = train_weights(SessionSettings(tmp_path, problems=5, held_out=2), TINY)
    network, about = load_weights(found.weights)
    assert found.training_set[:12] in found.weights.name
    assert about["examples"] == found.num_examples
    curve = json.loads(found.curve.read_text())
    assert curve["curve"][-1]["update"] == TINY.imitation + TINY.reinforcement
    assert network.size == NetworkSize(16, 2)
    with pytest.raises(InputError, match="no checkpoint"):
        train_weights(SessionSettings(tmp_path / "new", problems=2, held_out=0, resume=True), TINY)


def test_what_is_judged_was_never_trained_on(examples: list[Example]) -> None:
    """Neither the problems that choose a checkpoint nor those that judge it."""
    trained = {one.problem.digest for one in examples}
    for first in (HELD_OUT, HELD_OUT + 1000):
        assert trained.isdisjoint(one.problem.digest for one in draw_examples(range(first, first + 4)))
    with pytest.raises(InputError, match="give fewer problems"):
        SessionSettings(Path("unused"), problems=HELD_OUT + 1)


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from loadmaster.cli.verbs.learn import evaluate

    monkeypatch.setattr("loadmaster.placers.registry.is_installed", lambda _name: False)
    with pytest.raises(InputError, match=r"pip install 'loadmaster\[torch\]'"):
        evaluate()


def test_budgets_are_read_and_refused() -> None:
    assert parse_budgets("0,10") == [0, 10]
    for text in ("", "a", "1,-2"):
        with pytest.raises(InputError, match="budgets"):
            parse_budgets(text)


def test_weights_are_evaluated_beside_an_untrained_network() -> None:
    found = evaluate_weights(None, 4, [0, 5])
    assert {row["evaluations"] for row in found["rows"]} == {0, 5}
    for row in found["rows"]:
        assert row["best_known"] <= 1e-9
        assert np.isfinite(row["trained"])


def test_more_evaluations_help_on_held_out_problems(examples: list[Example]) -> None:
    network = make_network(NetworkSize(16, 2), 0).eval()
    for one in examples[:3]:
        assert time_after(network, one, 20) <= time_after(network, one, 1) * (1 + 1e-12)


@pytest.mark.parametrize(
    "wrong", [{"imitation": -1}, {"batch": 0}, {"width": 0}, {"width": 5000}, {"rounds": 1000}]
)
def test_settings_that_train_nothing_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InputError):
        TrainSettings(**wrong)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_short_training_beats_the_same_network_untrained(tmp_path: Path) -> None:
    """With the same slicer, on held-out problems that chose no checkpoint."""
    train = draw_examples(range(0, 120, 2))
    choose = draw_examples(range(HELD_OUT, HELD_OUT + 20, 2))
    judged = draw_examples(range(HELD_OUT + 1000, HELD_OUT + 1060, 2))
    settings = TrainSettings(imitation=250, reinforcement=0)
    found = train_on(SessionSettings(tmp_path), settings, train, choose)
    trained, _ = load_weights(found.weights)
    untrained = make_network(trained.size, settings.seed).eval()
    assert mean_log_ratio(trained, judged) < mean_log_ratio(untrained, judged) - 0.005
