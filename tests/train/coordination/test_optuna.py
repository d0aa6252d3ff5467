"""Optuna: its proposals are trained, its pruner stops them, the same call goes on with the same ones."""

from pathlib import Path
from typing import Any

import pytest

import loadmaster.train as lt
from loadmaster.core.errors import InputError
from loadmaster.train.coordination.result import TrialStatus
from loadmaster.train.coordination.searchers import Entrant
from tests.train.plain_engine import Plain
from tests.train.small_trials import digest, plainly, trial
from tests.train.study.test_study import Stop

optuna = pytest.importorskip("optuna", reason="Optuna is not installed")


@pytest.fixture(autouse=True)
def _quiet() -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)


def make(proposal: Any) -> lt.Trial:
    lr = proposal.suggest_float("lr", 1e-4, 1.0, log=True)
    return trial(f"t{proposal.number}-{lr:.3g}", lr=lr, eval_every=None)


def search(folder: Path, study: Any, **options: Any) -> lt.Result:
    given = {"num_trials": 6, "report_every": 5, "engine": Plain(), "checkpoint_every": 4}
    return lt.optimize(make, study=study, dir=folder, **(given | options))


def new_study() -> Any:
    pruner = optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=0)
    return optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=3), pruner=pruner)


def test_optuna_proposes_prunes_and_is_told(tmp_path: Path) -> None:
    study = new_study()
    result = search(tmp_path, study, batch=2)
    states = [each.state.name for each in study.trials]
    assert len(states) == 6
    assert states.count("COMPLETE") == sum(t.status == TrialStatus.DONE for t in result.trials) >= 1
    assert states.count("PRUNED") == sum(t.status == TrialStatus.STOPPED for t in result.trials) >= 1
    assert study.best_value == pytest.approx(result.best.metrics["loss"])
    lr = study.best_params["lr"]
    assert digest(result.best.state_dict()) == plainly(trial("x", lr=lr, eval_every=None))


def test_an_interrupted_search_goes_on_with_the_same_trials(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        search(tmp_path, new_study(), callbacks=[Stop(13, "interrupt")])
    study = new_study()
    study.sampler = optuna.samplers.RandomSampler(seed=99)  # would propose others
    result = search(tmp_path, study)
    wanted = search(tmp_path / "whole", new_study())
    assert [t.name for t in result.trials] == [t.name for t in wanted.trials]
    assert all(each.state.is_finished() for each in study.trials)


def test_a_search_that_a_storage_remembers_goes_on_in_the_trials_it_has(tmp_path: Path) -> None:
    def stored() -> Any:
        log = optuna.storages.journal.JournalFileBackend(str(tmp_path / "optuna.log"))
        return optuna.create_study(
            study_name="s",
            storage=optuna.storages.JournalStorage(log),
            load_if_exists=True,
            sampler=optuna.samplers.RandomSampler(seed=3),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=0),
        )

    for after in (13, 40):
        with pytest.raises(KeyboardInterrupt):
            search(tmp_path / "run", stored(), callbacks=[Stop(after, "interrupt")])
    result = search(tmp_path / "run", stored())
    wanted = search(tmp_path / "whole", new_study())
    study = stored()
    assert [t.name for t in result.trials] == [t.name for t in wanted.trials]
    assert len(study.trials) == 6
    told = {"done": "COMPLETE", "stopped": "PRUNED"}
    states = [each.state.name for each in study.trials]
    assert states == [told[str(t.status)] for t in result.trials]
    assert "COMPLETE" in states
    assert search(tmp_path / "run", stored()).to_json()["trials"] == result.to_json()["trials"]
    assert len(stored().trials) == 6


class AtTheSecondReport(optuna.pruners.BasePruner):
    """Prunes one trial, at its second report: the journal knows of the first."""

    def prune(self, study: Any, trial: Any) -> bool:
        return trial.number == 2 and len(trial.intermediate_values) == 2


def test_a_trial_that_optuna_pruned_just_before_an_interrupt_is_not_trained_on(tmp_path: Path) -> None:
    def stored() -> Any:
        log = optuna.storages.journal.JournalFileBackend(str(tmp_path / "optuna.log"))
        return optuna.create_study(
            study_name="s",
            storage=optuna.storages.JournalStorage(log),
            load_if_exists=True,
            sampler=optuna.samplers.RandomSampler(seed=3),
            pruner=AtTheSecondReport(),
        )

    study = stored()
    tell = study.tell

    def told_and_interrupted(*arguments: Any, **options: Any) -> None:
        tell(*arguments, **options)
        if options.get("state") == optuna.trial.TrialState.PRUNED:
            raise KeyboardInterrupt  # Optuna knows, the journal does not

    study.tell = told_and_interrupted
    with pytest.raises(KeyboardInterrupt):
        search(tmp_path / "run", study)
    result = search(tmp_path / "run", stored())
    told = {"done": "COMPLETE", "stopped": "PRUNED"}
    states = [each.state.name for each in stored().trials]
    assert states == [told[str(t.status)] for t in result.trials]
    assert "PRUNED" in states


def test_a_damaged_list_of_proposals_is_said(tmp_path: Path) -> None:
    (tmp_path / "optuna.json").write_text("[{]")
    with pytest.raises(InputError, match=r"optuna\.json is damaged"):
        search(tmp_path, new_study())


def test_two_trials_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(lt.optimize.__globals__["InputError"], match="put the proposal's number"):
        lt.optimize(lambda p: trial("same"), study=new_study(), num_trials=2, dir=tmp_path, engine=Plain())


class Picky(Plain):
    """Cannot plan large rates, and counts what it plans."""

    seen: list[str]

    def plan_trial(self, one: Any, device_names: Any) -> Any:
        self.__dict__.setdefault("seen", []).append(one.name)
        if float(one.name.split("-")[1]) > 0.05:
            raise InputError(f"trial {one.name!r} is too large")
        return super().plan_trial(one, device_names)


def test_a_proposal_that_cannot_be_planned_is_told_as_failed_and_the_search_goes_on(tmp_path: Path) -> None:
    study, engine = new_study(), Picky()
    with pytest.warns(RuntimeWarning, match=r"cannot be planned: trial 't.* is too large"):
        result = search(tmp_path, study, batch=2, engine=engine)
    large = [each.number for each in study.trials if each.params["lr"] > 0.05]
    assert large
    assert [each.number for each in study.trials if each.state.name == "FAIL"] == large
    assert len(study.trials) == len(result.trials) == 6
    assert sum(each.error_kind == "plan" for each in result.trials) == len(large)
    assert len(engine.seen) == 6  # each once, whatever the batches
    again, engine = new_study(), Picky()
    with pytest.warns(RuntimeWarning, match="cannot be planned"):
        resumed = search(tmp_path, again, engine=engine)
    assert not engine.__dict__.get("seen")  # all ended: nothing is planned again
    assert {t.name: t.status for t in resumed.trials} == {t.name: t.status for t in result.trials}


def test_a_trial_that_make_refuses_is_told_as_failed(tmp_path: Path) -> None:
    def picky(proposal: Any) -> lt.Trial:
        one = make(proposal)
        if proposal.number == 1:
            raise InputError("no such trial")
        return one

    study = new_study()
    with pytest.warns(RuntimeWarning, match="no such trial"):
        lt.optimize(picky, study=study, num_trials=3, dir=tmp_path, engine=Plain())
    assert [each.state.name == "FAIL" for each in study.trials] == [False, True, False]


def test_a_search_of_which_nothing_can_be_planned_says_why(tmp_path: Path) -> None:
    def none(proposal: Any) -> lt.Trial:
        raise InputError("no such trial")

    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(InputError, match=r"none of 2 proposals .*no such trial"),
    ):
        lt.optimize(none, study=new_study(), num_trials=2, dir=tmp_path, engine=Plain())


def test_a_trial_that_optuna_pruned_in_an_earlier_call_stops_at_its_next_step() -> None:
    study = new_study()
    proposal = study.ask()
    proposal.report(0.5, 5)
    study.tell(proposal.number, None, state=optuna.trial.TrialState.PRUNED)
    searcher = lt.OptunaSearch(study, {"t": proposal}, report_every=5)
    searcher.begin([Entrant("t", 20)])
    assert [searcher.milestone("t", step) for step in (0, 4, 5, 16, 19)] == [5, 5, 6, 17, None]
    assert searcher.report("t", 17, {"loss": 0.1}) == lt.Decision.STOP
