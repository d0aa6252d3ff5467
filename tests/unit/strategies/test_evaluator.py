"""Evaluator: groups and segments against the simulator of ops; rows and factors decided inside."""

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.stats import spearmanr

pytest.importorskip("torch")

from loadmaster.core.graph import Phase
from loadmaster.core.strategy import Mode
from loadmaster.core.strategy_check import check_strategy
from loadmaster.strategies.lowering.row_costs import find_row_costs
from loadmaster.strategies.predict import op_level
from loadmaster.strategies.scoring.actions import Action, device_classes, list_actions
from loadmaster.strategies.scoring.evaluator import Evaluator
from loadmaster.strategies.scoring.group_facts import find_facts
from loadmaster.strategies.scoring.grouping import find_groups
from loadmaster.strategies.scoring.shares import VARIANTS, fill_shares, round_rows
from loadmaster.strategies.splitting.splits import find_splits
from tests.unit.strategies.models import along_step, mixed_step
from tests.unit.strategies.strategies import BATCH, MIXED_DEVICES, TWO_HOSTS, problem_for, wide_problem


def evaluator_for(problem, batch: int = BATCH, **fields) -> Evaluator:  # type: ignore[no-untyped-def]
    splits = find_splits(problem.graph, batch)
    costs = find_row_costs(problem, splits)
    facts = find_facts(problem, splits, costs, find_groups(problem, splits))
    return Evaluator(problem, splits, costs, facts, list_actions(problem), **fields)


def random_choice(evaluator: Evaluator, rng: np.random.Generator) -> list[int]:
    """One action for most groups, others for some."""
    base = int(rng.choice(np.flatnonzero(evaluator.allowed.all(axis=0))))
    choice = [base] * evaluator.facts.num_groups
    for _ in range(int(rng.integers(0, 4))):
        g = int(rng.integers(len(choice)))
        choice[g] = int(rng.choice(np.flatnonzero(evaluator.allowed[g])))
    return choice


@pytest.mark.parametrize("devices", [MIXED_DEVICES, TWO_HOSTS])
def test_groups_are_ranked_as_ops_are(devices: str) -> None:
    problem = wide_problem(width=1024, devices=devices)
    evaluator = evaluator_for(problem)
    rng = np.random.default_rng(1)
    pairs = []
    for _ in range(40):
        found = evaluator.evaluate(random_choice(evaluator, rng))
        strategy = evaluator.strategy(found, "random")
        assert check_strategy(problem, strategy) == []
        pairs.append((found.time_s, op_level(problem, strategy).time_s))
    coarse, fine = np.array(pairs).T
    assert spearmanr(coarse, fine).statistic >= 0.95
    assert np.median(np.abs(coarse / fine - 1)) < 0.05


def test_groups_hold_units_and_every_op_once() -> None:
    problem = problem_for(mixed_step(6))
    splits = find_splits(problem.graph, 6)
    for most in (1, 3, 8, 40):
        group = find_groups(problem, splits, most)
        assert 1 <= group.max() + 1 <= most
        assert set(group.tolist()) == set(range(int(group.max()) + 1))
        back = problem.graph.mirror >= 0
        assert (group[back] == group[problem.graph.mirror[back]]).all()


def test_the_longest_group_comes_first() -> None:
    problem = wide_problem()
    group = find_groups(problem, find_splits(problem.graph, BATCH))
    seconds = np.bincount(group, weights=problem.costs.compute_s.min(axis=1))
    assert (np.diff(seconds) <= 1e-12).all()


def test_segments_keep_all_work_and_all_gradients() -> None:
    problem = wide_problem()
    evaluator = evaluator_for(problem)
    facts, graph = evaluator.facts, problem.graph
    passes = np.isin(graph.phase, (Phase.FORWARD, Phase.BACKWARD))
    assert facts.seconds[:, :, -1].sum(axis=0) == pytest.approx(problem.costs.compute_s[passes].sum(axis=0))
    trained = {int(t) for t in graph.use_tensor[graph.phase[graph.use_op] == Phase.UPDATE]}
    made = [t for t in trained if graph.phase[graph.tensor_op[t]] == Phase.BACKWARD]
    assert facts.gradient_bytes.sum() == graph.tensor_bytes[made].sum()
    assert (facts.edge_source < facts.edge_target).all()


def test_rows_follow_the_speed_of_devices() -> None:
    problem = wide_problem(width=4096)
    evaluator = evaluator_for(problem)
    every = next(
        i for i, a in enumerate(evaluator.actions) if len(a.devices) == 4 and a.mode == Mode.REPLICATE
    )
    choice = (every,) * evaluator.facts.num_groups
    rows = {variant: evaluator.rows_of(choice, variant)[0, 1, 2, 3] for variant in VARIANTS}
    assert rows["even"] == (3, 3, 3, 3)
    assert rows["proportional"][0] > rows["proportional"][2]
    assert all(sum(given) == BATCH for given in rows.values())


def test_an_op_that_needs_all_rows_is_duplicated_or_placed() -> None:
    problem = problem_for(along_step(lambda x: x.cumsum(0)))
    evaluator = evaluator_for(problem, 16)
    stuck = np.flatnonzero(~evaluator.facts.splits)
    assert len(stuck) == 1
    modes = {evaluator.actions[a].mode for a in np.flatnonzero(evaluator.allowed[stuck[0]])}
    assert modes == {Mode.PLACE, Mode.DUPLICATE}


def test_equal_states_are_replayed_once() -> None:
    evaluator = evaluator_for(wide_problem())
    choice = random_choice(evaluator, np.random.default_rng(5))
    first = evaluator.evaluate(choice)
    count = evaluator.replays
    assert evaluator.evaluate(choice) is first
    assert evaluator.replays == count


def test_memory_that_does_not_suffice_is_told() -> None:
    problem = wide_problem(devices="2xV100-16GB")
    evaluator = evaluator_for(problem)
    one = next(i for i, a in enumerate(evaluator.actions) if a == Action((0,), Mode.PLACE))
    found = evaluator.evaluate([one] * evaluator.facts.num_groups)
    strategy = evaluator.strategy(found, "one")
    peak = op_level(problem, strategy).peak_bytes[0]
    assert found.overflow == 0
    assert 0.9 * peak <= found.peak_bytes[0] <= 1.6 * peak  # on the safe side, not far off


def test_like_devices_are_one_class() -> None:
    assert device_classes(wide_problem().cluster) == [(0, 1), (2,), (3,)]


def solve_shares(fixed_s, slope_s, most):  # type: ignore[no-untyped-def]
    """Minimise z with z >= fixed + slope * share on every device, and shares that add up to 1."""
    num = len(fixed_s)
    rows = np.hstack([np.diag(slope_s), -np.ones((num, 1))])
    whole = np.append(np.ones(num), 0.0)[None, :]
    bounds = [(0.0, cap) for cap in most.tolist()] + [(0.0, None)]
    solved = linprog(np.eye(num + 1)[num], rows, -fixed_s, whole, [1.0], bounds=bounds, method="highs")
    assert solved.status == 0
    return solved.x[:num]


@pytest.mark.parametrize("seed", range(20))
def test_filling_up_is_the_optimum_of_the_programme(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num = int(rng.integers(2, 7))
    fixed, slope = rng.random(num), rng.random(num) + 0.1
    most = np.maximum(rng.random(num), 1.2 / num)
    found = fill_shares(fixed, slope, most)
    solved = solve_shares(fixed, slope, np.minimum(most, 1.0))

    def level(shares: np.ndarray) -> float:  # type: ignore[type-arg]
        return float((fixed + slope * shares).max())

    # A device with no rows still has its constant in the programme: compare where that does not decide.
    assert found.sum() == pytest.approx(1.0)
    assert (found <= np.minimum(most, 1.0) + 1e-9).all()
    assert level(found) == pytest.approx(level(solved), rel=1e-6)


@pytest.mark.parametrize("batch", [1, 7, 96, 1000])
def test_whole_rows_add_up(batch: int) -> None:
    assert sum(round_rows(batch, [0.0, 0.0])) == batch  # groups without work have no speed
    assert sum(round_rows(batch, fill_shares(np.zeros(3), np.zeros(3), np.ones(3)))) == batch
    rows = round_rows(batch, [0.5, 0.3, 0.15, 0.05])
    assert sum(rows) == batch
    assert min(rows) >= 0
