"""Factors: the minimum cut against every choice there is and against a mixed integer programme."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from loadmaster.core.arrays import Bools
from loadmaster.core.errors import InputError
from loadmaster.strategies.scoring.factors import NO_PRODUCER, CutProblem, choose


def as_problem(
    extra_s: Sequence[float],
    gather_s: Sequence[float],
    producer: Sequence[int],
    reads: Sequence[tuple[int, int]],
    forced: Sequence[int] = (),
) -> CutProblem:
    """From plain lists; `reads` are pairs of tensor and op."""
    pairs = np.array(reads, dtype=np.int32).reshape(-1, 2)
    closed = np.zeros(len(extra_s), dtype=np.bool_)
    closed[list(forced)] = True
    return CutProblem(
        np.array(extra_s, dtype=np.float64),
        closed,
        np.array(gather_s, dtype=np.float64),
        np.array(producer, dtype=np.int32),
        pairs[:, 0],
        pairs[:, 1],
    )


def cost_of(problem: CutProblem, chosen: Bools) -> float:
    """What a choice costs, by the definition."""
    made = np.where(problem.producer == NO_PRODUCER, False, chosen[problem.producer])
    wanted = np.zeros(len(problem.gather_s), dtype=np.bool_)
    wanted[problem.read_tensor[chosen[problem.read_op]]] = True
    return float(problem.extra_s[chosen].sum() + problem.gather_s[wanted & ~made].sum())


def random_cut(rng: np.random.Generator, ops: int, tensors: int) -> CutProblem:
    """Whole numbers, so that rounding cannot hide a mistake; readers come after producers."""
    reads, producer = [], []
    for tensor in range(tensors):
        made = int(rng.integers(-1, ops - 1))
        later = np.arange(made + 1, ops)
        readers = rng.choice(later, size=min(int(rng.integers(1, 4)), len(later)), replace=False)
        reads += [(tensor, int(op)) for op in readers]
        producer.append(made)
    forced = [op for op in range(ops) if rng.random() < 0.15]
    extra = rng.integers(-12, 13, ops).astype(float).tolist()
    return as_problem(extra, rng.integers(0, 9, tensors).astype(float).tolist(), producer, reads, forced)


def best_by_trying(problem: CutProblem) -> float:
    free = np.flatnonzero(~problem.forced).tolist()
    best = 0.0
    for picks in itertools.product((False, True), repeat=len(free)):
        chosen = np.zeros(len(problem.extra_s), dtype=np.bool_)
        chosen[free] = picks
        best = min(best, cost_of(problem, chosen))
    return best


def best_by_programme(problem: CutProblem) -> float:
    ops, tensors = len(problem.extra_s), len(problem.gather_s)
    rows = []
    for tensor, op in zip(problem.read_tensor.tolist(), problem.read_op.tolist(), strict=True):
        row = np.zeros(ops + tensors)
        row[op], row[ops + tensor] = 1.0, -1.0  # x_j - x_producer <= b_u
        if problem.producer[tensor] >= 0:
            row[problem.producer[tensor]] -= 1.0
        rows.append(row)
    upper = np.concatenate([np.where(problem.forced, 0.0, 1.0), np.ones(tensors)])
    solved = milp(
        np.concatenate([problem.extra_s, problem.gather_s]),
        constraints=LinearConstraint(np.array(rows), ub=0.0),
        integrality=np.concatenate([np.ones(ops), np.zeros(tensors)]),
        bounds=Bounds(0.0, upper),
    )
    return float(solved.fun)


@pytest.mark.parametrize("seed", range(60))
def test_the_cut_is_the_best_of_all_choices(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = random_cut(rng, int(rng.integers(2, 9)), int(rng.integers(1, 8)))
    assert cost_of(problem, choose(problem)) == pytest.approx(best_by_trying(problem), abs=1e-5)


@pytest.mark.parametrize("seed", range(40))
def test_the_cut_is_the_optimum_of_the_integer_programme(seed: int) -> None:
    rng = np.random.default_rng(1000 + seed)
    problem = random_cut(rng, int(rng.integers(20, 60)), int(rng.integers(20, 60)))
    found = choose(problem)
    assert not (found & problem.forced).any()
    assert cost_of(problem, found) == pytest.approx(best_by_programme(problem), abs=1e-4)


def test_a_tensor_is_paid_for_once_however_many_read_it() -> None:
    # Each alone would not pay for the gather of 5; together they do.
    together = as_problem([-3.0, -3.0], [5.0], [-1], [(0, 0), (0, 1)])
    assert choose(together).tolist() == [True, True]
    apart = as_problem([-3.0, -3.0], [5.0, 5.0], [-1, -1], [(0, 0), (1, 1)])
    assert choose(apart).tolist() == [False, False]


def test_what_is_made_by_a_chosen_op_need_not_be_gathered() -> None:
    chain = as_problem([1.0, -4.0], [0.5, 9.0], [-1, 0], [(0, 0), (1, 1)])
    assert choose(chain).tolist() == [True, True]
    assert choose(as_problem([1.0, -4.0], [0.5, 9.0], [-1, 0], [(0, 0), (1, 1)], forced=[0])).tolist() == [
        False,
        False,
    ]


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e6])
def test_the_choice_does_not_depend_on_the_unit_of_time(scale: float) -> None:
    rng = np.random.default_rng(3)
    problem = random_cut(rng, 30, 30)
    scaled = CutProblem(
        problem.extra_s * scale,
        problem.forced,
        problem.gather_s * scale,
        problem.producer,
        problem.read_tensor,
        problem.read_op,
    )
    assert cost_of(problem, choose(scaled)) == pytest.approx(cost_of(problem, choose(problem)))


def test_negative_times_are_refused() -> None:
    with pytest.raises(InputError, match="must be >= 0"):
        choose(as_problem([-1.0], [-1.0], [-1], [(0, 0)]))


@pytest.mark.parametrize(
    ("inputs", "outputs", "even", "faster"),
    # HM = 2 H1 H2 / (H1 + H2); faster below it at 22.5 Gbit/s, 4 bytes and 10 TFLOP/s
    [(25088, 4096, 7042, 4711), (4096, 4096, 4096, 3181), (2048, 1000, 1344, 1228), (768, 30522, 1498, 1356)],
)
def test_factors_are_chosen_up_to_the_harmonic_mean_of_rows(
    inputs: int, outputs: int, even: int, faster: int
) -> None:
    def takes_factors(rows: float, flops_per_s: float) -> bool:
        seconds = 4 / (22.5e9 / 8)  # of an element on the link; shares of a ring are alike on both sides
        product_s = 2.0 * rows * inputs * outputs / flops_per_s  # formed on every replica
        extra_s = product_s - 2.0 * inputs * outputs * seconds
        gather_s = [rows * inputs * seconds, rows * outputs * seconds]
        layer = as_problem([extra_s], gather_s, [NO_PRODUCER] * 2, [(0, 0), (1, 0)])
        return bool(choose(layer)[0])

    assert takes_factors(even - 1, np.inf)
    assert not takes_factors(even + 1, np.inf)
    assert takes_factors(0.99 * faster, 10e12)
    assert not takes_factors(1.01 * faster, 10e12)


def test_two_tensors_between_the_same_ops_are_both_paid_for() -> None:
    chain = as_problem([5.0, -6.0], [4.0, 4.0], [0, 0], [(0, 1), (1, 1)])
    assert cost_of(chain, np.array([False, True])) == -6.0 + 4.0 + 4.0
    assert choose(chain).tolist() == [True, True]  # -1; alone the second would cost 2
