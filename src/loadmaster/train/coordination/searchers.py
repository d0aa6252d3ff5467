"""Searchers decide which trials continue. They get metrics at milestones.

    report(trial, step, metrics) -> CONTINUE | STOP | PAUSE     paused trials keep their state: no cost
    released()                   -> paused trials that go on or stop now

`SuccessiveHalving` waits until everyone still in the race has reached a rung, then lets the best 1/eta go on:
its decisions depend on the metrics alone, not on how many devices there are. Who enters later races at each
rung with all that were there before. `Asha` (Li et al., 2018) lets a
trial go on as soon as it is among the best 1/eta of those that reported there: nobody waits, but decisions
depend on the order of arrival. So a study journals every decision and replays it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, runtime_checkable

from loadmaster.core.errors import InputError


class Decision(StrEnum):
    """What a searcher decides about a trial after a report."""

    CONTINUE = "continue"
    STOP = "stop"
    PAUSE = "pause"


@dataclass(frozen=True, slots=True)
class Entrant:
    """A trial as searchers know it."""

    name: str
    num_steps: int


@runtime_checkable
class Searcher(Protocol):
    """Decides which trials continue. Each run makes a new one and replays the journal to it."""

    def begin(self, entrants: Sequence[Entrant]) -> None:
        """The trials that take part. Called again when trials are added."""

    def milestone(self, trial: str, step: int) -> int | None:
        """The next step after `step` at which to report. None: only at the end."""

    def report(self, trial: str, step: int, metrics: Mapping[str, float]) -> Decision:
        """Decide about a trial that has reached a milestone."""

    def released(self) -> list[tuple[str, Decision]]:
        """Paused trials that were decided since the last call."""

    def exhausted(self) -> list[tuple[str, Decision]]:
        """No trial runs any more: decide about the paused ones. A trial that is not named stops."""

    def withdraw(self, trial: str) -> None:
        """A trial failed. Do not wait for it any more."""


@dataclass
class RunAll:
    """Trains every trial to the end. The default of a study."""

    def begin(self, entrants: Sequence[Entrant]) -> None:
        """Nothing to do."""

    def milestone(self, trial: str, step: int) -> int | None:
        """No milestones."""
        return None

    def report(self, trial: str, step: int, metrics: Mapping[str, float]) -> Decision:
        """Always continue."""
        return Decision.CONTINUE

    def released(self) -> list[tuple[str, Decision]]:
        """No trial is ever paused."""
        return []

    def exhausted(self) -> list[tuple[str, Decision]]:
        """No trial is paused."""
        return []

    def withdraw(self, trial: str) -> None:
        """No trial waits for another."""


def metric_value(metrics: Mapping[str, float], metric: str | None) -> float:
    """The number that is compared."""
    if metric is None:
        metric = "loss" if "loss" in metrics or len(metrics) != 1 else next(iter(metrics))
    if metric not in metrics:
        raise InputError(
            f"metric {metric!r} is not reported; there are: {', '.join(sorted(metrics)) or 'none'}"
        )
    return float(metrics[metric])


_NUM_RUNGS = 3  # where the first one is not given
_MOST_HALVINGS = 64


@dataclass
class _Rungs:
    """What both halvings share: rungs at min_steps x eta^k, and an order of values."""

    eta: int = 3
    min_steps: int | None = None  # the first rung; default: rungs at 1/eta^3, 1/eta^2, 1/eta of a trial
    metric: str | None = None  # where not given, what the study compares by
    mode: str | None = None
    _entrants: dict[str, Entrant] = field(default_factory=dict, init=False, repr=False)
    _values: dict[int, dict[str, float]] = field(
        default_factory=dict, init=False, repr=False
    )  # rung -> trial
    _out: set[str] = field(default_factory=set, init=False, repr=False)
    _halvings: int | None = field(default=None, init=False, repr=False)  # of a study begun by older rules

    def __post_init__(self) -> None:
        """Check what was given."""
        if isinstance(self.eta, bool) or not isinstance(self.eta, int) or self.eta < 2:
            raise InputError(
                f"eta is {self.eta!r}; give a whole number >= 2: one trial in eta continues at a rung"
            )
        if self.min_steps is not None and (not isinstance(self.min_steps, int) or self.min_steps < 1):
            raise InputError(f"min_steps is {self.min_steps!r}; give a whole number of steps >= 1")
        if self.mode not in (None, "min", "max"):
            raise InputError(f"mode is {self.mode!r}; give 'min' or 'max'")

    def compare_by(self, metric: str | None, mode: str) -> None:
        """Take from the study what was not given: trials are halved by what the best one is chosen by."""
        self.metric = metric if self.metric is None else self.metric
        self.mode = mode if self.mode is None else self.mode

    def begin(self, entrants: Sequence[Entrant]) -> None:
        """Learn who takes part."""
        self._entrants |= {each.name: each for each in entrants}

    def rungs(self, trial: str) -> list[int]:
        """Steps at which this trial reports, before its end; who else takes part does not matter."""
        num_steps = self._entrants[trial].num_steps
        if self.min_steps is not None:
            return self._multiply_from(self.min_steps, num_steps)
        if self._halvings is not None:
            return self._multiply_from(max(1, num_steps // self.eta**self._halvings), num_steps)
        parts = (num_steps // self.eta**power for power in range(_NUM_RUNGS, 0, -1))
        return sorted({part for part in parts if part > 0})

    def _multiply_from(self, first: int, num_steps: int) -> list[int]:
        found = []
        while first < num_steps:
            found.append(first)
            first *= self.eta
        return found

    def recall(self, reports: Sequence[tuple[str, int]]) -> None:
        """Keep the rungs of a study that was begun when they depended on how many trials there were."""
        known: dict[str, set[int]] = {}
        for trial, step in reports:
            if step < self._entrants[trial].num_steps:
                known.setdefault(trial, set()).add(step)

        def fits() -> bool:  # who reported at a rung reported at all before it
            return all(sorted(steps) == self.rungs(trial)[: len(steps)] for trial, steps in known.items())

        if self.min_steps is not None or fits():
            return
        for self._halvings in range(1, _MOST_HALVINGS):
            if fits():
                return
        self._halvings = None

    def milestone(self, trial: str, step: int) -> int | None:
        """The next rung."""
        return next((rung for rung in self.rungs(trial) if rung > step), None)

    def withdraw(self, trial: str) -> None:
        """Nobody waits for it; it takes no place at a rung."""
        self._out.add(trial)
        for values in self._values.values():
            values.pop(trial, None)

    def exhausted(self) -> list[tuple[str, Decision]]:
        """Those who wait stop."""
        return []

    def _note_report(self, trial: str, step: int, metrics: Mapping[str, float]) -> int | None:
        """Keep a value; the rung's number, or None where the trial is at its end."""
        rungs = self.rungs(trial)
        if step not in rungs:
            return None
        rung = rungs.index(step)
        value = metric_value(metrics, self.metric)
        worst = math.inf if math.isnan(value) else -value if self.mode == "max" else value
        self._values.setdefault(rung, {})[trial] = worst
        return rung

    def _best(self, rung: int) -> list[str]:
        """Trials of a rung, the best first; ties by the order they were given in."""
        order = {name: at for at, name in enumerate(self._entrants)}
        values = self._values.get(rung, {})
        return sorted(values, key=lambda name: (values[name], order[name]))


@dataclass
class SuccessiveHalving(_Rungs):
    """At each rung, waits until every remaining trial has reached it; the best 1/eta continue."""

    _decided: dict[int, set[str]] = field(default_factory=dict, init=False, repr=False)
    _ready: list[tuple[str, Decision]] = field(default_factory=list, init=False, repr=False)

    def report(self, trial: str, step: int, metrics: Mapping[str, float]) -> Decision:
        """Wait at a rung for the others. `released` tells the decisions once the last one has arrived."""
        rung = self._note_report(trial, step, metrics)
        if rung is None:
            return Decision.CONTINUE
        self._decide(rung)
        return Decision.PAUSE

    def withdraw(self, trial: str) -> None:
        """A trial failed; the others may have been waiting for it."""
        super().withdraw(trial)
        for rung in sorted(self._values):
            self._decide(rung)

    def _decide(self, rung: int) -> None:
        """Decide about those who wait, once everyone still in has arrived; newcomers race with all before."""
        still = [name for name in self._entrants if name not in self._out]
        expected = {name for name in still if len(self.rungs(name)) > rung}
        decided = self._decided.setdefault(rung, set())
        best = self._best(rung)
        waiting = [name for name in best if name not in decided]
        if not waiting or not expected <= set(best):
            return
        go_on = set(best[: self._count_places(rung, best)])
        for name in waiting:
            decided.add(name)
            self._ready.append((name, Decision.CONTINUE if name in go_on else Decision.STOP))
            if name not in go_on:
                self._out.add(name)

    def _count_places(self, rung: int, arrived: Sequence[str]) -> int:
        """How many go on: the best 1/eta; few trials are not halved before their later rungs can do it."""
        part = max(1, len(arrived) // self.eta)
        if self.min_steps is not None or self._halvings is not None:
            return part
        rungs_ahead = max(len(self.rungs(name)) for name in arrived) - rung - 1
        return max(part, min(len(arrived), int(self.eta**rungs_ahead)))

    def released(self) -> list[tuple[str, Decision]]:
        """Trials decided since the last call."""
        ready, self._ready = self._ready, []
        return ready


@dataclass
class Asha(_Rungs):
    """Continues a trial once it is among the best 1/eta that have reported at its rung. The rest wait."""

    _gone_on: dict[int, set[str]] = field(default_factory=dict, init=False, repr=False)
    _ready: list[tuple[str, Decision]] = field(default_factory=list, init=False, repr=False)

    def report(self, trial: str, step: int, metrics: Mapping[str, float]) -> Decision:
        """Continue or wait. A later report of another trial may promote it."""
        rung = self._note_report(trial, step, metrics)
        if rung is None:
            return Decision.CONTINUE
        self._promote(rung)
        for at, (name, _) in enumerate(self._ready):
            if name == trial:
                del self._ready[at]
                return Decision.CONTINUE
        return Decision.PAUSE

    def _promote(self, rung: int) -> None:
        best = self._best(rung)
        gone = self._gone_on.setdefault(rung, set())
        for name in best[: len(best) // self.eta]:
            if name not in gone:
                gone.add(name)
                self._ready.append((name, Decision.CONTINUE))

    def released(self) -> list[tuple[str, Decision]]:
        """Trials promoted since the last call."""
        ready, self._ready = self._ready, []
        return ready

    def exhausted(self) -> list[tuple[str, Decision]]:
        """If no trial is among the best 1/eta, the best one of the highest rung continues alone."""
        if not self._values:
            return []
        top = max(self._values)
        waiting = [name for name in self._best(top) if name not in self._out]
        if not waiting or self._gone_on.get(top):
            return []
        self._gone_on.setdefault(top, set()).add(waiting[0])
        return [(waiting[0], Decision.CONTINUE)]
