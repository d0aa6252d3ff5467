"""What hypothesis draws for every other property test is valid, and interesting often enough."""

from hypothesis import HealthCheck, Phase, find, given, settings

from loadmaster.core.check import check_plan
from loadmaster.core.plan import Plan
from loadmaster.core.problem import Links, Problem
from tests.reference import simulate
from tests.strategies import placed_problems

SEARCH = settings(
    max_examples=500,
    phases=[Phase.generate],
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


@settings(max_examples=100, deadline=None)
@given(placed_problems())
def test_a_drawn_plan_breaks_no_rule_and_runs_to_its_end(placed: tuple[Problem, Plan]) -> None:
    problem, plan = placed
    broken = [violation for violation in check_plan(problem, plan) if violation.rule != "memory"]
    assert broken == []
    for dispatch in ("in_order", "ready"):
        result = simulate(problem, plan, dispatch=dispatch, links=problem.links)
        assert result.stuck == []


def test_draws_contain_a_view_of_a_copy() -> None:
    def view_of_a_copy(placed: tuple[Problem, Plan]) -> bool:
        graph, device = placed[0].graph, placed[1].device[placed[0].graph.tensor_op]
        pairs = enumerate(graph.tensor_storage.tolist())
        return any(base not in (tensor, -1) and device[base] != device[tensor] for tensor, base in pairs)

    find(placed_problems(), view_of_a_copy, settings=SEARCH)


def test_draws_contain_a_transfer_that_waits_for_a_link() -> None:
    def waits(placed: tuple[Problem, Plan]) -> bool:
        result = simulate(*placed, dispatch="ready", links="shared")
        home = placed[0].graph.tensor_op
        return any(start > result.op_end[home[tensor]] for tensor, _, _, start, _ in result.transfers)

    find(placed_problems(links=Links.SHARED), waits, settings=SEARCH)


def test_draws_contain_a_deadlock_only_where_asked_for() -> None:
    def stuck(placed: tuple[Problem, Plan]) -> bool:
        return bool(simulate(*placed, dispatch="in_order", links="parallel").stuck)

    find(placed_problems(links=Links.PARALLEL, may_deadlock=True), stuck, settings=SEARCH)
