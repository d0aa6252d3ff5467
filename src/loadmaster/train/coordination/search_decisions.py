"""Between trials and the searcher: when a trial reports, what was decided, what the journal already knows.

Every decision is in the journal before it takes effect. After a crash a new searcher is given the same
reports in the same order; what was decided then stands, whatever a searcher would say now.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from loadmaster.core.errors import InputError
from loadmaster.train.coordination.callbacks import CallbackList
from loadmaster.train.coordination.searchers import Decision, Entrant, Searcher
from loadmaster.train.coordination.study_state import ENDED, StudyState, TrialEntry


class SearchDecisions:
    """Knows how far each trial may run now."""

    def __init__(
        self, state: StudyState, searcher: Searcher, trials: Mapping[str, Any], *, audience: CallbackList
    ) -> None:
        self._state, self._searcher, self._trials, self._audience = state, searcher, trials, audience
        searcher.begin([Entrant(name, state.entries[name].num_steps) for name in trials])
        self._stopped: list[str] = []
        if hasattr(searcher, "recall"):
            asked = [each for each in state.reports if each["kind"] == "report" and each["asked"]]
            searcher.recall([(each["trial"], each["step"]) for each in asked if each["trial"] in trials])
        self._replay()

    def _replay(self) -> None:
        """Tell a fresh searcher what an earlier run told it; decisions not journalled yet come out."""
        undecided: dict[str, Decision] = {}
        for record in self._state.reports:
            name = record["trial"]
            if name not in self._trials:
                continue
            if record["kind"] == "report" and record["asked"]:
                self._searcher.report(name, record["step"], record["metrics"])
            elif record["kind"] == "fail":
                self._searcher.withdraw(name)
            elif record["kind"] == "release":
                undecided.pop(name, None)
            undecided |= {
                n: d for n, d in self._searcher.released() if n != name or record["kind"] != "release"
            }
        for name, decision in undecided.items():
            if self._state.entries[name].paused_at is not None:
                self._handle_release(name, decision)

    def list_pending_stops(self) -> list[str]:
        """Trials that the journal, replayed, says are to stop."""
        for entry in self._state.list_unfinished(list(self._trials)):
            if entry.is_to_stop and entry.name not in self._stopped:
                self._stopped.append(entry.name)
        return self._take_stopped()

    def limit(self, entry: TrialEntry) -> int | None:
        """How far a trial may run now; None: it waits for a decision."""
        if entry.paused_at is not None:
            return entry.paused_at if entry.step < entry.paused_at else None
        return self._next_milestone(entry, entry.step) or entry.num_steps

    def _next_milestone(self, entry: TrialEntry, step: int) -> int | None:
        """The next one, the same from every step before it: a study that goes on decides as it would have."""
        found = self._searcher.milestone(entry.name, step)
        again = found if found is None else self._searcher.milestone(entry.name, found - 1)
        if found is not None and (found <= step or again != found):
            raise InputError(
                f"{type(self._searcher).__name__}.milestone({entry.name!r}, {step}) is {found}, and after"
                f" step {found - 1} it is {again}; give the next of fixed steps, such as (step // 5 + 1) * 5"
            )
        return found

    def next_stop(self, entry: TrialEntry) -> int:
        """The next step at which a turn must end, because a report is due or the trial waits there."""
        limit = self.limit(entry) or entry.num_steps
        every = self._eval_every(entry)
        return limit if every is None else min(limit, (entry.step // every + 1) * every)

    def _eval_every(self, entry: TrialEntry) -> int | None:
        trial = self._trials[entry.name]
        every: int | None = trial.eval_every if trial.evaluate is not None else None
        return every

    def wants_report(self, entry: TrialEntry, step: int) -> bool:
        """Whether a trial is to be evaluated at this step (and was not yet)."""
        if step <= 0 or step in entry.reports:
            return False
        every = self._eval_every(entry)
        return (every is not None and step % every == 0) or self._next_milestone(entry, step - 1) == step

    def owes_report(self, entry: TrialEntry) -> bool:
        """Whether a trial stands at a step that it has not reported: it was killed just then."""
        return self.wants_report(entry, entry.step)

    def record_report(self, entry: TrialEntry, metrics: Mapping[str, float] | None) -> list[str]:
        """A trial stands at a step where a report is due; returns the trials that end by it."""
        found = dict(metrics) if metrics else {"loss": _loss_or_nan(entry.loss)}
        asked = self._next_milestone(entry, entry.step - 1) == entry.step
        decision = self._searcher.report(entry.name, entry.step, found) if asked else Decision.CONTINUE
        self._note(entry, found, decision, asked=asked)
        if decision == Decision.STOP:
            self._stopped.append(entry.name)
        self._collect()
        return self._take_stopped()

    def finish_trial(self, entry: TrialEntry, metrics: Mapping[str, float] | None) -> list[str]:
        """A trial has no step left."""
        if metrics is not None or entry.step not in entry.reports:
            found = dict(metrics) if metrics else {"loss": _loss_or_nan(entry.loss)}
            self._searcher.report(entry.name, entry.step, found)
            self._note(entry, found, Decision.CONTINUE, asked=True)
        self._collect()
        return [name for name in self._take_stopped() if name != entry.name]

    def _note(self, entry: TrialEntry, metrics: dict[str, float], decision: Decision, *, asked: bool) -> None:
        facts = {"step": entry.step, "metrics": metrics, "decision": str(decision), "asked": asked}
        self._state.note("report", trial=entry.name, **facts)
        self._audience.tell("on_report", entry.name, entry.step, metrics, str(decision))

    def withdraw_trial(self, name: str) -> list[str]:
        """A trial failed."""
        self._searcher.withdraw(name)
        self._collect()
        return self._take_stopped()

    def exhausted(self, paused: Sequence[TrialEntry]) -> list[str]:
        """Nobody runs: those who wait go on or stop."""
        decided = self._searcher.exhausted()
        for name, decision in decided or [(entry.name, Decision.STOP) for entry in paused]:
            self._handle_release(name, decision)
        return self._take_stopped()

    def _collect(self) -> None:
        for name, decision in self._searcher.released():
            self._handle_release(name, decision)

    def _handle_release(self, name: str, decision: Decision) -> None:
        if self._state.entries[name].status in ENDED:
            return
        self._state.note("release", trial=name, decision=str(decision))
        if decision == Decision.STOP:
            self._stopped.append(name)

    def _take_stopped(self) -> list[str]:
        stopped, self._stopped = self._stopped, []
        return stopped


def _loss_or_nan(loss: float | None) -> float:
    return float("nan") if loss is None else loss
