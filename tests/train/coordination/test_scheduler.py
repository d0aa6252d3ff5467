"""The scheduler on a virtual clock: near the lower bound, never stuck, nobody starved, shards reused."""

import itertools
import random
from collections.abc import Callable

import pytest

from loadmaster.train.coordination.scheduler import TrialStanding, choose_turn, compute_quantum, lower_bound_s
from loadmaster.train.coordination.study_forecast import Forecast, forecast_study

Instance = list[list[list[float]]]  # [trial][minibatch][unit] seconds


def equal(num_trials: int, rng: random.Random) -> Instance:
    return [
        _trial(rng, num_units=11, num_batches=rng.randint(35, 45), scale=rng.uniform(0.9, 1.1))
        for _ in range(num_trials)
    ]


def mixed(num_trials: int, rng: random.Random) -> Instance:
    return [
        _trial(
            rng, num_units=rng.randrange(5, 20, 2), num_batches=rng.randint(20, 60), scale=rng.uniform(0.5, 3)
        )
        for _ in range(num_trials)
    ]


def _trial(rng: random.Random, *, num_units: int, num_batches: int, scale: float) -> list[list[float]]:
    unit = [scale * rng.uniform(0.5, 1.5) for _ in range(num_units)]  # a unit takes as long every time
    return [unit] * num_batches


def by_step(instance: Instance, num_devices: int, **options: float) -> Forecast:
    standings = [
        TrialStanding(trial=i, num_left=len(trial), step_s=sum(trial[0])) for i, trial in enumerate(instance)
    ]
    return forecast_study(
        standings, num_devices=num_devices, step_time=lambda i, k: sum(instance[i][k]), **options
    )


def by_unit(instance: Instance, num_devices: int) -> Forecast:
    flat = [list(itertools.chain(*trial)) for trial in instance]
    left = [[0.0, *itertools.accumulate(reversed(units))][::-1] for units in flat]
    standings = [
        TrialStanding(trial=i, num_left=len(units), step_s=sum(units) / len(units))
        for i, units in enumerate(flat)
    ]
    return forecast_study(
        standings,
        num_devices=num_devices,
        most_steps=1,
        step_time=lambda i, k: flat[i][k],
        left_time=lambda i, k: left[i][k],
    )


def bound(instance: Instance, num_devices: int) -> float:
    return lower_bound_s([sum(map(sum, trial)) for trial in instance], num_devices)


CASES = [(6, 4, equal), (12, 8, equal), (12, 8, mixed), (24, 8, mixed)]


@pytest.mark.parametrize(("num_trials", "num_devices", "make"), CASES)
def test_guided_turns_end_within_one_per_cent_of_the_lower_bound(
    num_trials: int, num_devices: int, make: Callable[[int, random.Random], Instance]
) -> None:
    for seed in range(60):
        instance = make(num_trials, random.Random(seed))
        assert by_step(instance, num_devices).makespan_s <= 1.01 * bound(instance, num_devices)


@pytest.mark.parametrize(
    ("num_trials", "num_devices", "make"), [*CASES[:3], pytest.param(*CASES[3], marks=pytest.mark.slow)]
)
def test_turns_of_one_unit_end_within_a_thousandth_of_the_lower_bound(
    num_trials: int, num_devices: int, make: Callable[[int, random.Random], Instance]
) -> None:
    for seed in range(4):
        instance = make(num_trials, random.Random(seed))
        assert by_unit(instance, num_devices).makespan_s <= 1.001 * bound(instance, num_devices)


def test_the_lower_bound_holds_for_every_schedule_of_tiny_instances() -> None:
    rng = random.Random(7)
    for _ in range(20):
        work = [rng.randint(1, 4) for _ in range(3)]
        best = _brute_force(work, 2)
        assert lower_bound_s(work, 2) <= best
        standings = [TrialStanding(trial=i, num_left=w, step_s=1.0) for i, w in enumerate(work)]
        assert best <= forecast_study(standings, num_devices=2, most_steps=1).makespan_s <= best + 1


def _brute_force(work: list[int], num_devices: int) -> int:
    """Fewest time slots in which unit steps of each trial, one at a time, can be served."""
    state, slots = {tuple(work)}, 0
    while all(any(left) for left in state):
        slots += 1
        following = set()
        for left in state:
            active = [i for i, each in enumerate(left) if each]
            for some in itertools.combinations(active, min(num_devices, len(active))):
                following.add(tuple(each - (i in some) for i, each in enumerate(left)))
        state = following
    return slots


def test_every_small_study_ends_with_each_step_served_once() -> None:
    for num_trials, num_devices, num_steps in itertools.product(range(1, 7), repeat=3):
        standings = [TrialStanding(trial=i, num_left=num_steps, step_s=0.0) for i in range(num_trials)]
        seen = forecast_study(standings, num_devices=num_devices)
        steps = [sum(s.turn.num_steps for s in seen.served if s.turn.trial == i) for i in range(num_trials)]
        assert steps == [num_steps] * num_trials


def test_a_trial_is_never_on_two_devices_at_once() -> None:
    rng = random.Random(3)
    for _ in range(1000):
        num = rng.randint(1, 6)
        standings = [
            TrialStanding(trial=i, num_left=rng.randint(1, 9), step_s=rng.choice([0.0, 1.0]))
            for i in range(num)
        ]
        seen = forecast_study(
            standings,
            num_devices=rng.randint(1, 6),
            step_time=lambda i, k: rng.choice([0.0, 0.0, rng.random()]),
        )
        for trial in range(num):
            spans = [(s.start_s, s.end_s) for s in seen.served if s.turn.trial == trial]
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


def test_fewer_trials_than_devices_run_side_by_side_and_the_rest_is_idle() -> None:
    seen = forecast_study([TrialStanding(trial=i, num_left=4, step_s=1.0) for i in range(2)], num_devices=5)
    assert seen.makespan_s == 4.0
    assert sorted(seen.busy_s) == [0.0, 0.0, 0.0, 4.0, 4.0]


def test_a_trial_stays_on_its_device_while_it_is_about_as_long_as_the_longest() -> None:
    standings = [
        TrialStanding(trial=0, num_left=100, step_s=1.0, device=1),
        TrialStanding(trial=1, num_left=95, step_s=1.0, device=0),
    ]
    turn = choose_turn(standings, 0, num_devices=2)
    assert turn is not None
    assert turn.trial == 1
    far = [standings[0], TrialStanding(trial=1, num_left=50, step_s=1.0, device=0)]
    turn = choose_turn(far, 0, num_devices=2)
    assert turn is not None
    assert turn.trial == 0


def test_residency_saves_loads_and_keeps_the_makespan() -> None:
    for seed in range(20):
        instance = equal(12, random.Random(seed))
        seen = by_step(instance, 8)
        turns = len(seen.served)
        moved = sum(a.loaded for a in seen.served)
        assert moved < turns
        assert seen.makespan_s <= 1.01 * bound(instance, 8)


def test_turns_are_as_long_as_loading_asks_for_and_shrink_towards_the_end() -> None:
    def long(left: int, load_s: float) -> int:
        return compute_quantum(TrialStanding(trial=0, num_left=left, step_s=1.0, load_s=load_s))

    assert long(1000, 0.0) == 1  # copies hide under compute: turns of one step are free
    assert long(1000, 0.1) == 5  # ceil(0.1 / (0.02 * 1.0))
    assert long(1000, 9.0) == 16
    assert long(9, 9.0) == 4
    assert long(1, 9.0) == 1


def test_nobody_waits_longer_than_patience_allows() -> None:
    lengths = [1000, 400, 30, 20, 10]
    standings = [TrialStanding(trial=i, num_left=n, step_s=1.0) for i, n in enumerate(lengths)]
    patient = forecast_study(standings, num_devices=1, patience=4)
    assert patient.most_passed <= 4 * len(lengths) + len(lengths)
    starving = forecast_study(standings, num_devices=1, patience=10**9)
    assert starving.most_passed > 2 * patient.most_passed  # what the rule is for
    assert patient.makespan_s == starving.makespan_s == sum(lengths)


def test_patience_does_not_hold_up_a_critical_trial() -> None:
    lengths = [200, *[10] * 12]
    standings = [TrialStanding(trial=i, num_left=n, step_s=1.0) for i, n in enumerate(lengths)]
    seen = forecast_study(standings, num_devices=2, patience=1)
    assert seen.makespan_s == 200.0


def test_the_prediction_of_who_follows_is_no_booking() -> None:
    standings = [TrialStanding(trial=i, num_left=10, step_s=1.0) for i in range(3)]
    first = choose_turn(standings, 0, num_devices=2)
    assert first is not None
    assert first.then is not None
    assert first.then != first.trial
    again = [
        s if s.trial != first.trial else TrialStanding(trial=s.trial, num_left=10, step_s=1.0, running=True)
        for s in standings
    ]
    second = choose_turn(again, 1, num_devices=2)
    assert second is not None
    assert second.trial == first.then  # another device may take it


def test_no_idle_trial_is_no_turn() -> None:
    assert choose_turn([], 0, num_devices=1) is None
    assert (
        choose_turn([TrialStanding(trial=0, num_left=3, step_s=1.0, running=True)], 0, num_devices=2) is None
    )
    assert choose_turn([TrialStanding(trial=0, num_left=0, step_s=1.0)], 0, num_devices=2) is None
