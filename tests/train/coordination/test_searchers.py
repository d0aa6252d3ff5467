"""Searchers: halving by metrics alone, ASHA replayed from the journal, pauses that cost nothing."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from loadmaster.core.errors import InputError
from loadmaster.train.coordination.result import TrialStatus
from loadmaster.train.coordination.searchers import (
    Asha,
    Decision,
    Entrant,
    RunAll,
    Searcher,
    SuccessiveHalving,
)
from loadmaster.train.disk.journal import read_journal
from loadmaster.train.study import Study
from tests.train.plain_engine import Plain
from tests.train.small_trials import digest, plainly, trial
from tests.train.study.test_study import Stop

RATES = (0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001, 0.00003)


def trials() -> list[Any]:
    return [trial(f"lr{lr}", lr=lr, eval_every=None, num_batches=9) for lr in RATES]  # 18 steps


def run(tmp_path: Path, searcher: Searcher, num_devices: int = 1, **options: Any) -> Any:
    given = {"engine": Plain(num_devices), "launcher": "inline", "checkpoint_every": 4}
    return Study(trials(), dir=tmp_path / "run", searcher=searcher, **(given | options)).fit()


def decisions(tmp_path: Path) -> list[tuple[Any, ...]]:
    found = read_journal(tmp_path / "run/journal").records
    return [(r["trial"], r.get("step"), r["decision"]) for r in found if r["kind"] in ("report", "release")]


def test_halving_keeps_the_best_third_at_every_rung() -> None:
    searcher = SuccessiveHalving(eta=3, min_steps=2)
    names = [f"t{i}" for i in range(9)]
    searcher.begin([Entrant(name, 18) for name in names])
    assert searcher.rungs("t0") == [2, 6]
    values = {name: float((i * 5) % 9) for i, name in enumerate(names)}
    alive, step = names, 2
    while len(alive) > 1:
        for name in alive:
            assert searcher.released() == []
            assert searcher.report(name, step, {"loss": values[name]}) == Decision.PAUSE
        released = dict(searcher.released())
        best = sorted(alive, key=lambda n: values[n])[: len(alive) // 3]
        assert {n for n, d in released.items() if d == Decision.CONTINUE} == set(best)
        assert set(released) == set(alive)
        alive, step = best, step * 3
    assert searcher.report(alive[0], 18, {"loss": 0.0}) == Decision.CONTINUE


def test_halving_does_not_wait_for_a_trial_that_failed() -> None:
    searcher = SuccessiveHalving(eta=2, min_steps=1)
    searcher.begin([Entrant(name, 4) for name in "abc"])
    searcher.report("a", 1, {"loss": 1.0})
    searcher.report("b", 1, {"loss": 2.0})
    assert searcher.released() == []
    searcher.withdraw("c")
    assert dict(searcher.released()) == {"a": Decision.CONTINUE, "b": Decision.STOP}


def test_nan_is_the_worst_value_and_max_turns_the_order() -> None:
    searcher = SuccessiveHalving(eta=3, min_steps=1, mode="max", metric="acc")
    searcher.begin([Entrant(name, 4) for name in "abc"])
    for name, value in (("a", math.nan), ("b", 0.1), ("c", 0.9)):
        searcher.report(name, 1, {"acc": value, "loss": 0.0})
    assert [n for n, d in searcher.released() if d == Decision.CONTINUE] == ["c"]


def test_halving_decides_the_same_for_any_number_of_devices(tmp_path: Path) -> None:
    outcomes = []
    for num_devices in (1, 2, 4):
        result = run(tmp_path / str(num_devices), SuccessiveHalving(eta=3), num_devices)
        outcomes.append({each.name: (each.status, each.step) for each in result.trials})
        best = next(each for each in trials() if each.name == result.best.name)
        assert digest(result.best.state_dict()) == plainly(best)
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert sorted(step for _, step in outcomes[0].values()) == [2] * 6 + [6] * 2 + [18]
    assert [status for status, _ in outcomes[0].values()].count(TrialStatus.DONE) == 1


def test_an_interrupted_halving_ends_as_one_that_was_not(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", SuccessiveHalving(eta=3))
    for after in (3, 11, 19, 24, 33):
        folder = tmp_path / str(after)
        with pytest.raises(KeyboardInterrupt):
            run(folder, SuccessiveHalving(eta=3), callbacks=[Stop(after, "interrupt")])
        result = run(folder, SuccessiveHalving(eta=3))
        assert {t.name: (t.status, t.step) for t in result.trials} == {
            t.name: (t.status, t.step) for t in whole.trials
        }
        assert digest(result.best.state_dict()) == digest(whole.best.state_dict())


def test_what_asha_decided_before_a_stop_stands_after_it(tmp_path: Path) -> None:
    for after in (11, 24, 33):
        folder = tmp_path / str(after)
        with pytest.raises(KeyboardInterrupt):
            run(folder, Asha(eta=3, min_steps=2), callbacks=[Stop(after, "interrupt")])
        before = decisions(folder)
        result = run(folder, Asha(eta=3, min_steps=2))
        assert before
        assert decisions(folder)[: len(before)] == before
        best = next(each for each in trials() if each.name == result.best.name)
        assert digest(result.best.state_dict()) == plainly(best)


def test_asha_replayed_from_the_journal_decides_nothing_anew(tmp_path: Path) -> None:
    run(tmp_path, Asha(eta=3, min_steps=2), 2)
    before = decisions(tmp_path)
    engine = Plain(2)
    again = run(tmp_path, Asha(eta=3, min_steps=2), engine=engine)
    assert decisions(tmp_path) == before
    assert engine.opened == []
    assert again.best.status == TrialStatus.DONE


def test_asha_promotes_as_soon_as_one_is_among_the_best_third() -> None:
    searcher = Asha(eta=3, min_steps=1)
    searcher.begin([Entrant(name, 9) for name in "abcdef"])
    assert searcher.report("a", 1, {"loss": 3.0}) == Decision.PAUSE
    assert searcher.report("b", 1, {"loss": 2.0}) == Decision.PAUSE
    assert searcher.report("c", 1, {"loss": 1.0}) == Decision.CONTINUE
    assert searcher.report("d", 1, {"loss": 9.0}) == Decision.PAUSE
    assert searcher.report("e", 1, {"loss": 8.0}) == Decision.PAUSE
    assert searcher.report("f", 1, {"loss": 7.0}) == Decision.PAUSE
    assert searcher.released() == [("b", Decision.CONTINUE)]


def test_few_trials_under_asha_still_end_with_a_best_one(tmp_path: Path) -> None:
    given = trials()[:2]
    result = Study(given, dir=tmp_path, searcher=Asha(eta=3, min_steps=2), engine=Plain()).fit()
    assert sorted(each.status for each in result.trials) == [TrialStatus.DONE, TrialStatus.STOPPED]


def test_a_pause_opens_nothing_again_and_loses_no_step(tmp_path: Path) -> None:
    engine = Plain()
    steps: list[str] = []

    class Count:
        def on_step(self, name: str, done: Any) -> None:
            steps.append(name)

    result = run(tmp_path, SuccessiveHalving(eta=3), engine=engine, callbacks=[Count()])
    assert len(engine.opened) == 9  # once each
    assert len(steps) == sum(each.step for each in result.trials)


def test_paused_trials_make_room_when_memory_is_short(tmp_path: Path) -> None:
    names = [each.name for each in trials()]
    engine = Plain(sizes=dict.fromkeys(names, 600))
    result = run(tmp_path, SuccessiveHalving(eta=3), engine=engine, host_cap=1300)
    roomy = run(tmp_path / "roomy", SuccessiveHalving(eta=3))
    assert {t.name: (t.status, t.step) for t in result.trials} == {
        t.name: (t.status, t.step) for t in roomy.trials
    }
    assert digest(result.best.state_dict()) == digest(roomy.best.state_dict())
    assert all(runner.closed for runner in engine.opened)


def test_no_order_of_arrival_leaves_halving_undecided() -> None:
    for order in itertools.permutations("abcd"):
        searcher = SuccessiveHalving(eta=2, min_steps=1)
        searcher.begin([Entrant(name, 4) for name in "abcd"])
        for name in order:
            searcher.report(name, 1, {"loss": float(ord(name))})
        assert dict(searcher.released())["a"] == Decision.CONTINUE


@pytest.mark.parametrize(
    ("bad", "says"),
    [({"eta": 1}, "whole number >= 2"), ({"min_steps": 0}, "steps >= 1"), ({"mode": "up"}, "'min' or 'max'")],
)
def test_bad_halvings_are_refused(bad: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        SuccessiveHalving(**bad)
    with pytest.raises(InputError, match=says):
        Asha(**bad)


def test_a_metric_nobody_reports_is_said_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="metric 'accuracy' is not reported; there are: loss"):
        run(tmp_path, SuccessiveHalving(eta=3, metric="accuracy"))


def _scored(name: str, accuracy: float) -> Any:
    return trial(name, evaluate=lambda _model: {"accuracy": accuracy, "loss": 0.0}, eval_every=None)


@pytest.mark.parametrize("searcher", [SuccessiveHalving, Asha])
@pytest.mark.parametrize("told", ["study", "searcher"])
def test_metric_and_mode_hold_for_the_race_and_for_the_best_whoever_was_given_them(
    searcher: Any, told: str, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"metric": "accuracy", "mode": "max"}
    entrants = [_scored(name, value) for name, value in (("low", 0.1), ("high", 0.9), ("middle", 0.5))]
    found = Study(
        entrants,
        dir=tmp_path,
        engine=Plain(),
        searcher=searcher(eta=3, min_steps=2, **(given if told == "searcher" else {})),
        **(given if told == "study" else {}),
    ).fit()
    assert found["high"].status == "done"
    assert found["low"].status == "stopped"
    assert found.best.name == "high"


def test_the_best_is_chosen_by_what_the_searcher_was_told_to_compare(tmp_path: Path) -> None:
    race = SuccessiveHalving(eta=2, min_steps=500, metric="accuracy", mode="max")  # nobody is halved
    found = Study(
        [_scored("low", 0.1), _scored("high", 0.9)], dir=tmp_path, engine=Plain(), searcher=race
    ).fit()
    assert found.best.name == "high"


class Below(RunAll):
    """As the documentation writes it, but for the limit."""

    def __init__(self, way: Any) -> None:
        self.way = way

    def milestone(self, trial: str, step: int) -> int | None:
        return self.way(step)

    def report(self, trial: str, step: int, metrics: Any) -> Decision:
        return Decision.STOP if step >= 10 else Decision.CONTINUE


def test_a_searcher_of_ones_own_is_asked_at_fixed_steps(tmp_path: Path) -> None:
    result = run(tmp_path, Below(lambda step: (step // 5 + 1) * 5))
    assert {(each.status, each.step) for each in result.trials} == {(TrialStatus.STOPPED, 10)}


@pytest.mark.parametrize("way", [lambda step: step + 5, lambda step: step, lambda step: 5])
def test_a_milestone_that_moves_is_refused(way: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"Below.milestone\('.*give the next of fixed steps"):
        run(tmp_path, Below(way))


@pytest.mark.parametrize("kind", [SuccessiveHalving, Asha])
@pytest.mark.parametrize("num_steps", [1, 2, 18, 100, 1000])
def test_rungs_do_not_depend_on_how_many_entered_at_first(kind: Any, num_steps: int) -> None:
    few, many = kind(), kind()
    few.begin([Entrant("a", num_steps)])
    before = few.rungs("a")
    few.begin([Entrant(f"t{at}", num_steps) for at in range(80)])
    many.begin([Entrant("a", num_steps), *(Entrant(f"t{at}", num_steps) for at in range(80))])
    assert before == few.rungs("a") == many.rungs("a")
    assert all(0 < rung < num_steps for rung in before)


def test_newcomers_race_with_those_before_them_and_the_best_one_goes_on(tmp_path: Path) -> None:
    def fit(rates: list[float]) -> Any:
        made = [trial(f"lr{lr}", lr=lr, eval_every=None, num_batches=27) for lr in rates]  # 54 steps
        given = {"engine": Plain(), "launcher": "inline", "checkpoint_every": 4}
        return Study(made, dir=tmp_path / "run", searcher=SuccessiveHalving(), **given).fit()

    poor, rest = [1e-6, 2e-6, 3e-6], [4e-6, 5e-6, 6e-6, 7e-6, 0.01]
    first = fit(poor)
    assert [each.status for each in first.trials].count(TrialStatus.DONE) == 1
    result = fit([*poor, *rest])
    assert result["lr0.01"].status == TrialStatus.DONE
    assert [result[f"lr{lr}"].status for lr in poor] == [each.status for each in first.trials]
    steps = {r["step"] for r in read_journal(tmp_path / "run/journal").records if r["kind"] == "report"}
    assert steps <= {2, 6, 18, 54}


def test_a_race_begun_when_rungs_depended_on_the_number_of_trials_keeps_its_rungs() -> None:
    searcher = SuccessiveHalving()
    searcher.begin([Entrant(name, 100) for name in "abcd"])
    searcher.recall([("a", 11), ("b", 11), ("a", 33)])  # four trials: two halvings, from 100 // 9 on
    assert searcher.rungs("c") == [11, 33, 99]
    searcher.recall([])
    fresh = SuccessiveHalving()
    fresh.begin([Entrant("a", 100)])
    fresh.recall([("a", 3), ("a", 100)])
    assert fresh.rungs("a") == [3, 11, 33]
