"""Local search by hand: what it finds, what it leaves alone, and what it costs."""

from dataclasses import replace

import numpy as np

from loadmaster import api
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Plan
from loadmaster.core.problem import Problem
from loadmaster.core.run import Budget, Run, Score
from loadmaster.placers.registry import placer
from loadmaster.simulator.bounds.lower_bounds import lower_bound
from loadmaster.simulator.events.engine import prepare
from tests import reference
from tests.builders import (
    arrows,
    chain,
    instance_a,
    loose_ops,
    plan_on,
    problem_of,
    star_cluster,
)


class Counting:
    """A simulator that counts."""

    def __init__(self, problem: Problem) -> None:
        self.simulator, self.calls = prepare(problem), 0

    def score(self, plan: Plan) -> Score:
        self.calls += 1
        return self.simulator.score(plan)

    def arrange(self, plan: Plan) -> tuple[Plan, Score]:
        self.calls += 1
        return self.simulator.order_and_score(plan)


def refined(problem: Problem, count: int, **parameters: object) -> tuple[Placement, int]:
    """The answer under a count budget, and how many plans the simulator saw."""
    counting = Counting(problem)
    run = Run(
        budget=Budget(count=count),
        rng=np.random.default_rng(0),
        score=counting.score,
        arrange=counting.arrange,
        bound=lower_bound(problem),
    )
    return placer("refine", **parameters)(problem, run), counting.calls


class TestRefine:
    """Answers."""

    def test_a_plan_that_meets_the_bound_is_left_as_it_is(self) -> None:
        problem = problem_of(chain(6, 1), star_cluster(2), 1.0)
        placement, calls = refined(problem, 1000, start=plan_on([0] * 6, range(6)))
        assert placement.score_s == 6.0
        assert calls <= 3

    def test_everything_on_one_device_is_taken_apart(self) -> None:
        """Four loose ops of 1 to 4 s: 4 + 1 and 3 + 2."""
        problem = problem_of(loose_ops(4), star_cluster(2), [1, 2, 3, 4])
        assert refined(problem, 400, start=plan_on([0] * 4))[0].score_s == 5.0

    def test_an_order_is_changed(self) -> None:
        """All pinned: only the order of the two ops of d0 can be better, the one first that d1 waits for."""
        problem = arrows([4, 1, 4], {(1, 2): 1.0}, star_cluster(2))
        problem = replace(problem, pinned=np.array([0, 0, 1], dtype=np.int32))
        assert refined(problem, 400, start=plan_on([0, 0, 1], [0, 1, 2]))[0].score_s == 6.0

    def test_a_swap_is_found_where_memory_allows_no_single_move(self) -> None:
        """Each device holds two ops of 1 byte: 3 + 1 and 2 + 2 s are best, begun as 3 + 2 and 2 + 1."""
        problem = arrows([3, 2, 2, 1], {}, star_cluster(2, memory=2), held_bytes=[1, 1, 1, 1])
        placement, _ = refined(problem, 600, start=plan_on([0, 0, 1, 1]))
        assert placement.score_s == 4.0
        assert placement.peak_bytes.tolist() == [2, 2]

    def test_the_tight_instance_reaches_its_optimum_from_a_bad_start(self) -> None:
        problem = instance_a()
        named = {"op0": 0, "op3": 0, "op1": 0, "op2": 1, "op4": 1, "op5": 1}
        start = plan_on([named[name] for name in problem.graph.op_name])
        assert prepare(problem).score(start).overflow_bytes == 0
        assert refined(problem, 2000, start=start)[0].score_s == 9.0

    def test_a_start_is_named_or_given(self) -> None:
        problem = problem_of(loose_ops(4), star_cluster(2), [1, 2, 3, 4])
        assert api.plan(problem, algorithm="single_device", budget="9x").score_s == 10.0
        assert refined(problem, 400, start="single_device")[0].score_s == 5.0

    def test_the_simulator_sees_few_of_the_plans_that_are_tried(self) -> None:
        """A replay is a try; what is better is confirmed."""
        problem = api.problem("gen:layered:60")
        placement, calls = refined(problem, 3000, start="single_device")
        assert placement.score_s is not None
        assert calls < 1000

    def test_a_start_that_waits_on_purpose_is_not_lost(self) -> None:
        """d0 leaves op 3 (10 s, ready at 0) until op 1 has come from d1 at 1 and run: 12. Ready: 21."""
        problem = arrows([1, 1, 10, 10], {(0, 1): 0.0, (1, 2): 0.0}, star_cluster(2))
        problem = replace(problem, pinned=np.array([1, 0, 1, 0], dtype=np.int32))
        start = plan_on([1, 0, 1, 0], [0, 1, 2, 3])
        assert reference.simulate(problem, start, dispatch="in_order", links="parallel").step_s == 12.0
        assert refined(problem, 50, start=start)[0].score_s == 12.0
