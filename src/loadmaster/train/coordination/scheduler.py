"""Which trial a free device takes next, and for how many steps: longest remaining time first.

A pure function of what is known, so that the code which is tested on a virtual clock is the code that runs.

    remaining(i) = step_s(i) * steps left(i)              only as far as it may run now (a rung, or the end)
    quantum(i)   = clamp(left / 2, 1, switch(i))     switch(i) = ceil(load_s / (2 % of step_s)), at most 16
    slack        = min(one quantum of the longest but a step, a sixteenth of what it has left)
    candidates   = idle trials with remaining >= the longest remaining - slack
    taken        = the longest candidate whose shards stand on this device, else the longest of all

Halving the quantum towards the end of a trial keeps the makespan within one per cent of
max(sum of work / devices, longest trial); a fixed one of 16 loses three per cent and more.

Longest first starves short trials for a while. So a trial that was passed over for `patience` turns per
trial goes first, unless the longest is critical: it has more left than its share of the devices. At most
M - 1 of M devices can be busy with critical trials, so everyone's turn comes, and the makespan stays.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

SWITCH_SHARE = 0.02  # of the time of a quantum that may go into loading what another trial pushed out
MOST_STEPS = 16
NEARLY_AS_LONG = 16  # the slack for residency shrinks with what is left: a whole quantum costs 5 % at the end
PATIENCE = 4  # turns of every trial together, before one that was passed over goes first


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialStanding:
    """One unfinished trial, as the scheduler sees it."""

    trial: int
    num_left: int  # steps (or units) it may run now
    step_s: float
    load_s: float = math.inf  # bringing its resident shards to a device; 0 where copies hide under compute
    device: int | None = None  # where it runs, or where its shards stand
    running: bool = False
    num_passed: int = 0  # turns given to others since its last one
    left_s: float | None = None  # where the times of what is left are known better than their mean

    @property
    def remaining_s(self) -> float:
        """Seconds of work left."""
        return self.num_left * self.step_s if self.left_s is None else self.left_s


@dataclass(frozen=True, slots=True)
class Turn:
    """A device's next work; `then` is who probably follows there, a hint for prefetching and no booking."""

    trial: int
    num_steps: int
    then: int | None = None


def compute_quantum(standing: TrialStanding, *, most_steps: int = MOST_STEPS) -> int:
    """Steps of one turn: few towards the end, and no more than make loading cheap."""
    most = most_steps
    cheap_s = SWITCH_SHARE * standing.step_s
    if standing.load_s < cheap_s * most_steps:
        most = max(1, math.ceil(standing.load_s / cheap_s)) if cheap_s > 0 else 1
    return max(1, min(standing.num_left // 2, most))


def choose_turn(
    standings: Sequence[TrialStanding],
    device: int,
    *,
    num_devices: int,
    most_steps: int = MOST_STEPS,
    patience: int = PATIENCE,
) -> Turn | None:
    """The turn of a free device, or None where no trial is idle."""
    idle = [each for each in standings if not each.running and each.num_left > 0]
    if not idle:
        return None
    taken = _choose_trial(idle, standings, device, num_devices, most_steps, patience)
    steps = compute_quantum(taken, most_steps=most_steps)
    rest = [each for each in idle if each is not taken]
    after = _advance_standing(taken, steps)
    if after.num_left > 0:
        rest.append(after)
    follower = _find_longest(rest) if rest else None
    return Turn(taken.trial, steps, follower.trial if follower is not None else None)


def _choose_trial(
    idle: Sequence[TrialStanding],
    everyone: Sequence[TrialStanding],
    device: int,
    num_devices: int,
    most_steps: int,
    patience: int,
) -> TrialStanding:
    longest = _find_longest(idle)
    share_s = sum(each.remaining_s for each in everyone) / num_devices
    if longest.remaining_s <= share_s:
        overdue = [each for each in idle if each.num_passed >= patience * len(everyone)]
        if overdue:
            return max(overdue, key=lambda each: (each.num_passed, each.remaining_s, -each.trial))
    slack_s = min(
        (compute_quantum(longest, most_steps=most_steps) - 1) * longest.step_s,
        longest.remaining_s / NEARLY_AS_LONG,
    )
    here = [e for e in idle if e.device == device and e.remaining_s >= longest.remaining_s - slack_s]
    return _find_longest(here) if here else longest


def _find_longest(standings: Sequence[TrialStanding]) -> TrialStanding:
    return max(standings, key=lambda each: (each.remaining_s, -each.trial))


def _advance_standing(standing: TrialStanding, num_steps: int) -> TrialStanding:
    return TrialStanding(
        trial=standing.trial,
        num_left=standing.num_left - num_steps,
        step_s=standing.step_s,
        load_s=standing.load_s,
        device=standing.device,
        left_s=None if standing.left_s is None else standing.left_s - num_steps * standing.step_s,
    )


def lower_bound_s(work_s: Sequence[float], num_devices: int) -> float:
    """No schedule of these trials ends earlier: an even share of all work, or the longest trial."""
    return max(sum(work_s) / num_devices, max(work_s)) if work_s else 0.0
