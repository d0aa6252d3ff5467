"""A whole study on a virtual clock, by the scheduler that runs it: when will everything be done?

    t = 0        t = end of the first turn         ...                    makespan
    dev 0  [ trial 2 x 16 ][ trial 0 x 16 ][ trial 2 x 8 ] ... [ trial 2 x 1 ]
    dev 1  [ trial 1 x 16 ][ trial 1 x 16 ] ...

Events are handled in order of time, then device. O(turns x trials).
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from loadmaster.train.coordination.scheduler import MOST_STEPS, PATIENCE, TrialStanding, Turn, choose_turn

StepTime = Callable[[int, int], float]  # trial, number of the step -> seconds


@dataclass(frozen=True, slots=True)
class ServedTurn:
    """One turn that was given."""

    device: int
    turn: Turn
    start_s: float
    end_s: float
    loaded: bool  # the trial's shards were not on this device


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the virtual clock saw."""

    makespan_s: float
    served: tuple[ServedTurn, ...]
    busy_s: tuple[float, ...]  # of every device
    most_passed: int  # turns that the unluckiest trial waited


def forecast_study(
    standings: Sequence[TrialStanding],
    *,
    num_devices: int,
    step_time: StepTime | None = None,
    most_steps: int = MOST_STEPS,
    patience: int = PATIENCE,
    load_takes_time: bool = False,
    left_time: StepTime | None = None,
) -> Forecast:
    """Run all trials to their ends; `step_time` gives true times where they differ from what is estimated.

    `left_time` is what a trial has left before a step, where the scheduler is to know it exactly.
    """
    now: dict[int, TrialStanding] = {each.trial: each for each in standings}
    done = dict.fromkeys(now, 0)
    free = list(range(num_devices))
    running: list[tuple[float, int, int, int]] = []  # end, device, trial, steps
    stands: list[int | None] = [None] * num_devices  # whose shards are on a device
    served: list[ServedTurn] = []
    busy = [0.0] * num_devices
    clock, most_passed = 0.0, 0
    while True:
        for device in list(free):
            turn = choose_turn(
                list(now.values()),
                device,
                num_devices=num_devices,
                most_steps=most_steps,
                patience=patience,
            )
            if turn is None:
                break
            free.remove(device)
            trial = now[turn.trial]
            loaded = stands[device] != turn.trial
            seconds = trial.load_s if load_takes_time and loaded else 0.0
            if step_time is None:
                seconds += turn.num_steps * trial.step_s
            else:
                first = done[turn.trial]
                seconds += sum(step_time(turn.trial, first + k) for k in range(turn.num_steps))
            most_passed = max(most_passed, trial.num_passed)
            _mark_given(now, turn.trial, device)
            stands[device] = turn.trial
            served.append(ServedTurn(device, turn, clock, clock + seconds, loaded))
            busy[device] += seconds
            heapq.heappush(running, (clock + seconds, device, turn.trial, turn.num_steps))
        if not running:
            return Forecast(clock, tuple(served), tuple(busy), most_passed)
        clock, device, trial_at, steps = heapq.heappop(running)
        trial = now[trial_at]
        done[trial_at] += steps
        left_s = None if left_time is None else left_time(trial_at, done[trial_at])
        now[trial_at] = replace(trial, running=False, num_left=trial.num_left - steps, left_s=left_s)
        if now[trial_at].num_left <= 0:
            del now[trial_at]
        free = sorted([*free, device])


def _mark_given(now: dict[int, TrialStanding], taken: int, device: int) -> None:
    """Mark one as running, and every other idle one as passed over."""
    for at, each in now.items():
        if at == taken:
            now[at] = replace(each, running=True, device=device, num_passed=0)
        elif not each.running:
            now[at] = replace(each, num_passed=each.num_passed + 1)
