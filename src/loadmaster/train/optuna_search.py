"""Optuna as searcher: it proposes the trials, prunes them while they train, and gets their results.

    def make(proposal: optuna.Trial) -> lt.Trial: ...          # suggest_* here; give it a name of its own
    result = lt.optimize(make, study=optuna.create_study(), num_trials=20, dir="runs/search")

Needs the extra `train` (optuna). Parameters are asked once and kept in the folder (`optuna.json`), so that
the same call goes on with the same trials: those that Optuna's storage still has, or, where it forgets (in
memory), new ones with the same parameters. Reports and prunings are in the journal like every other decision.

A proposal that cannot be planned is told to Optuna as failed, with a warning; the search goes on. A sampler
with a seed that is made again draws its numbers from the beginning, so that proposals after those that are
kept repeat the first ones: give it another seed, or pickle it, when you ask for more trials.
"""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from loadmaster.core.errors import InputError, LoadmasterError
from loadmaster.core.files import write_bytes
from loadmaster.train.coordination.result import Result, TrialResult, TrialStatus
from loadmaster.train.coordination.searchers import Decision, Entrant, metric_value
from loadmaster.train.study import Study


def _import_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise InputError("this search needs Optuna; install it: pip install 'loadmaster[train]'") from None
    return optuna


class OptunaSearch:
    """Prunes trials by the pruner of an Optuna study. `proposals` maps trial names to Optuna's trials."""

    def __init__(
        self, study: Any, proposals: Mapping[str, Any], *, metric: str | None = None, report_every: int = 1
    ) -> None:
        _import_optuna()
        self._study, self._proposals, self._metric, self._every = study, dict(proposals), metric, report_every
        self._num_steps: dict[str, int] = {}
        self._told: set[str] = set()
        self._pruned_at: dict[str, int] = {}  # by an earlier call, which ended before its journal knew

    def __deepcopy__(self, _memo: Any) -> "OptunaSearch":
        """A study of Optuna's is a door to its storage: it is not copied."""
        return self

    def begin(self, entrants: Sequence[Entrant]) -> None:
        """Every trial must have been proposed by Optuna."""
        for each in entrants:
            if each.name not in self._proposals:
                raise InputError(f"trial {each.name!r} was not asked of Optuna; give its proposal")
            self._num_steps[each.name] = each.num_steps
            known = self._find_known(each.name)
            if known.state == _import_optuna().trial.TrialState.PRUNED:
                self._pruned_at[each.name] = max(known.intermediate_values, default=0)

    def _find_known(self, trial: str) -> Any:
        """What Optuna's storage has of a trial."""
        return self._study._storage.get_trial(self._proposals[trial]._trial_id)

    def milestone(self, trial: str, step: int) -> int | None:
        """Every `report_every` steps; the next step, if Optuna pruned the trial before it came here."""
        following = (step // self._every + 1) * self._every
        if step >= self._pruned_at.get(trial, self._num_steps[trial]):
            following = step + 1
        return following if following < self._num_steps[trial] else None

    def report(self, trial: str, step: int, metrics: Mapping[str, float]) -> Decision:
        """Tell Optuna, and stop the trial if it prunes it."""
        optuna = _import_optuna()
        if trial in self._told:
            return Decision.CONTINUE
        value, proposal = metric_value(metrics, self._metric), self._proposals[trial]
        known = self._find_known(trial)
        if known.state.is_finished():  # told by an earlier call, which was killed before its journal knew
            ended_at = max(known.intermediate_values, default=0)
            pruned = known.state == optuna.trial.TrialState.PRUNED and step >= ended_at
            return Decision.STOP if pruned else Decision.CONTINUE
        if step not in known.intermediate_values:
            proposal.report(value, step)
        if step >= self._num_steps[trial]:
            self._tell(trial, value)
        elif proposal.should_prune():
            self._tell(trial, None, state=optuna.trial.TrialState.PRUNED)
            return Decision.STOP
        return Decision.CONTINUE

    def _tell(self, trial: str, value: float | None, **how: Any) -> None:
        self._told.add(trial)
        self._study.tell(self._proposals[trial].number, value, skip_if_finished=True, **how)

    def released(self) -> list[tuple[str, Decision]]:
        """No trial is paused."""
        return []

    def exhausted(self) -> list[tuple[str, Decision]]:
        """No trial is paused."""
        return []

    def withdraw(self, trial: str) -> None:
        """Report a failed trial to Optuna."""
        if trial not in self._told:
            self._tell(trial, None, state=_import_optuna().trial.TrialState.FAIL)


def optimize(
    make: Callable[[Any], Any],
    *,
    study: Any,
    num_trials: int,
    dir: str | Path,
    metric: str | None = None,
    report_every: int = 1,
    batch: int | None = None,
    **options: Any,
) -> Result:
    """Train trials that Optuna proposes, prune them, report the results. `batch` at a time (default: all)."""
    optuna = _import_optuna()
    folder = Path(dir)
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "optuna.json"
    known = _read_known_trials(kept)
    proposals: dict[str, Any] = {}
    trials: list[Any] = []
    failed: dict[str, str] = {}
    result: Result | None = None
    num_asked = 0
    mode = "max" if study.direction == optuna.study.StudyDirection.MAXIMIZE else "min"

    def give_up(proposal: Any, name: str, why: str, at: int) -> None:
        """Tell Optuna that a proposal failed, and remember it."""
        failed[name] = known[at]["error"] = why
        known[at]["name"] = name
        write_bytes(json.dumps(known).encode(), kept)
        study.tell(proposal.number, None, state=optuna.trial.TrialState.FAIL, skip_if_finished=True)
        warnings.warn(f"proposal {name!r} cannot be planned: {why}", RuntimeWarning, stacklevel=3)

    places: dict[str, int] = {}
    while num_asked < num_trials:
        for _ in range(min(batch or num_trials, num_trials - num_asked)):
            at, num_asked = num_asked, num_asked + 1
            proposal = _ask_proposal(study, known[at] if at < len(known) else None)
            if at < len(known) and known[at].get("error"):  # an earlier call could not plan it
                give_up(proposal, known[at]["name"], known[at]["error"], at)
                continue
            one, why = _make_trial(make, study, proposal)
            if at >= len(known):
                known.append({"number": proposal.number, "params": dict(proposal.params)})
                write_bytes(json.dumps(known).encode(), kept)
            if one is None:
                give_up(proposal, f"proposal {proposal.number}", why, at)
                continue
            if one.name in proposals:
                raise InputError(
                    f"two trials are named {one.name!r}; put the proposal's number into the name"
                )
            proposals[one.name], places[one.name] = proposal, at
            trials.append(one)
        if not trials:
            continue
        searcher = OptunaSearch(study, proposals, metric=metric, report_every=report_every)
        race = Study(trials, dir=folder, searcher=searcher, metric=metric, mode=mode, **options)
        race.trusts_ended = True
        bad = race.find_unplannable()
        for name, why in bad.items():
            give_up(proposals[name], name, why, places[name])
        trials = [one for one in trials if one.name not in bad]
        if trials:
            race.leave_out(bad)
            result = race.fit()
    if num_trials < 1:
        raise InputError(f"num_trials is {num_trials}; give at least 1")
    if result is None:
        first = next(iter(failed.items()))
        raise InputError(f"none of {num_trials} proposals can be planned; {first[0]!r}: {first[1]}")
    rows = [_make_failed_row(name, why) for name, why in failed.items()]
    return replace(result, trials=(*result.trials, *rows))


def _make_trial(make: Callable[[Any], Any], study: Any, proposal: Any) -> tuple[Any, str]:
    """The trial of a proposal; or None, and why it cannot be one. What else `make` raises is raised."""
    optuna = _import_optuna()
    try:
        return make(proposal), ""
    except LoadmasterError as problem:
        return None, str(problem)
    except Exception:
        study.tell(proposal.number, None, state=optuna.trial.TrialState.FAIL, skip_if_finished=True)
        raise


def _make_failed_row(name: str, why: str) -> TrialResult:
    return TrialResult(
        name=name,
        status=TrialStatus.FAILED,
        step=0,
        loss=None,
        metrics={},
        seconds=0.0,
        num_tokens=0,
        error=why,
        error_kind="plan",
        durable_step=0,
        folder=None,
    )


def _read_known_trials(kept: Path) -> list[dict[str, Any]]:
    """What earlier calls asked for: number and parameters of each trial."""
    if not kept.exists():
        return []
    try:
        found = json.loads(kept.read_text(encoding="utf-8"))
        return [{**each, "number": each["number"], "params": dict(each["params"])} for each in found]
    except (ValueError, TypeError, KeyError):
        raise InputError(f"{kept} is damaged; put it back from a copy, or give another dir") from None


def _ask_proposal(study: Any, known: Mapping[str, Any] | None) -> Any:
    """A new trial of Optuna's, or the one that an earlier call asked for."""
    optuna = _import_optuna()
    if known is None:
        return study.ask()
    for each in study.get_trials(deepcopy=False):
        if each.number == known["number"] and json.loads(json.dumps(each.params)) == known["params"]:
            if not each.state.is_finished():
                return optuna.trial.Trial(study, each._trial_id)
            ended = optuna.trial.FixedTrial(each.params, number=each.number)  # it may not be written to
            ended._trial_id = each._trial_id
            return ended
    study.enqueue_trial(known["params"])
    return study.ask()
