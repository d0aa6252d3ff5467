"""The portfolio: who is asked, who wins, when it stops, and what it says about the others."""

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from loadmaster import api
from loadmaster.core.placement import Member, Placement, Status
from loadmaster.core.problem import Links, Problem
from loadmaster.placers.registry import placer
from tests import reference
from tests.builders import (
    chain,
    diamond,
    graph_of,
    instance_a,
    instance_b,
    instance_c,
    instance_d,
    loose_ops,
    problem_of,
    star_cluster,
    tpds_example,
)
from tests.conformance.problems import unequal_cluster
from tests.oracle import best_of_all
from tests.regressions.test_published_defects import published

CONSTRUCTORS = ("single_device", "m_topo", "m_etf", "m_sct", "heft", "cpop", "chain_balance", "round_robin")


def planned(problem: Problem, budget: str = "200x", **parameters: object) -> Placement:
    return api.plan(problem, algorithm=placer("auto", **parameters), budget=budget)


def members(placement: Placement) -> dict[str, Member]:
    return {member.name: member for member in placement.members}


class TestAnswers:
    """Instances whose best plan is known."""

    @pytest.mark.parametrize(
        ("problem", "best_s"),
        [
            (instance_a(), 9.0),
            (instance_b(), 13.0),
            (instance_c(), 22.0),
            (instance_d(3), 29.0),
            (instance_d(4), 26.0),
        ],
        ids=["A", "B", "C", "D", "D4"],
    )
    def test_the_published_instances_reach_their_optimum(self, problem: Problem, best_s: float) -> None:
        assert planned(problem).score_s == best_s

    def test_the_worked_example_of_heft_is_beaten(self) -> None:
        """80 by HEFT, 86 by CPOP; the longest way, by the least time of each task, is 41."""
        score_s = planned(tpds_example(), "3000x").score_s
        assert score_s is not None
        assert 41.0 < score_s <= 78.0

    def test_small_problems_are_solved(self) -> None:
        for problem in (
            problem_of(diamond(1), unequal_cluster(), [[1, 2], [4, 5], [4, 5], [1, 2]]),
            problem_of(loose_ops(5), star_cluster(2), [1, 2, 3, 4, 4]),
            problem_of(chain(4, 9), unequal_cluster(), [[1, 3], [3, 1], [1, 3], [3, 1]]),
        ):
            assert planned(problem, "20000x").score_s == best_of_all(problem).fitting_s

    def test_a_proof_that_the_best_plan_is_optimal_is_passed_on(self) -> None:
        placement = planned(instance_b(), "100000x")
        assert members(placement)["branch_and_bound"].status == Status.OPTIMAL
        assert placement.status == Status.OPTIMAL


class TestNeverWorse:
    """On generated graphs, with a budget that lets everybody have a turn."""

    @pytest.mark.parametrize("family", ["fork_join", "layered", "many_source", "rnn_grid"])
    @pytest.mark.parametrize("links", [Links.SHARED, Links.PARALLEL])
    def test_than_a_constructor_or_a_quarter_of_local_search(self, family: str, links: Links) -> None:
        problem = published(family, 40, links=links)
        placement = planned(problem)
        assert placement.score_s is not None
        for name in CONSTRUCTORS:
            other = api.plan(problem, algorithm=name, budget="200x")
            assert other.score_s is None or placement.score_s <= other.score_s, name
        quarter = api.plan(problem, algorithm="refine", budget="50x")
        assert quarter.score_s is not None
        assert placement.score_s <= quarter.score_s

    def test_than_one_device_where_that_is_best(self) -> None:
        """Transfers take ten times an op: nothing is worth sending, and that is 1 + 1 + 1 + 1."""
        assert planned(problem_of(diamond(10), star_cluster(4), 1.0)).score_s == 4.0

    def test_unequal_devices_are_used_by_their_speed(self) -> None:
        """Eight loose ops: 1 s each on the fast device, 3 s on the slow one: six and two, 6 s."""
        placement = planned(problem_of(loose_ops(8), unequal_cluster(), [[1, 3]] * 8))
        assert (placement.score_s, placement.status) == (6.0, Status.OPTIMAL)


class TestStopping:
    """What is skipped, and why."""

    def test_an_optimal_plan_ends_it(self) -> None:
        placement = planned(problem_of(chain(5), star_cluster(2), 1.0))
        tried = [member.name for member in placement.members if member.status is not None]
        assert tried == ["single_device"]
        assert placement.status == Status.OPTIMAL
        untried = [member for member in placement.members if member.status is None]
        assert untried
        assert all(member.reason.startswith("not tried: ") for member in untried)

    def test_a_plan_within_the_gap_that_is_good_enough_ends_the_search(self) -> None:
        """Every plan of the fork-join graph is within a gap of 10, that is eleven times the bound."""
        problem = published("fork_join", 40)
        quick, long = planned(problem, good_enough=10.0), planned(problem)
        for name, member in members(quick).items():
            assert (member.status is None) == (
                name.startswith("refine") or name in ("m_sct", "memory_first", "cpsat_latency")
            )
        assert "within" in members(quick)["m_sct"].reason
        assert members(long)["m_sct"].status is not None
        assert quick.score_s is not None
        assert long.score_s is not None
        assert long.score_s <= quick.score_s

    @pytest.mark.parametrize("count", [1, 2, 7, 25])
    def test_a_small_budget_gives_an_answer(self, count: int) -> None:
        placement = planned(published("layered", 40), f"{count}x")
        assert placement.plan is not None or placement.least_overflow_plan is not None
        assert placement.members

    def test_it_says_that_nothing_can_fit(self) -> None:
        problem = problem_of(graph_of({"resident_bytes": 30}), star_cluster(2, memory=25), 1.0)
        placement = planned(problem)
        assert placement.status == Status.INFEASIBLE
        assert "30 B" in placement.proof


class TestMembers:
    """Who won, and why the others lost."""

    def test_one_is_the_best_and_the_others_say_by_how_much_they_lost(self) -> None:
        placement = planned(instance_b(), "100000x")
        found = members(placement)
        assert [member.name for member in placement.members if member.reason == "best"] == ["heft"]
        assert found["m_topo"].reason == "7 s slower"  # everything on one device: 20 s
        assert found["m_etf"].reason == "1 s slower"
        assert found["cpop"].reason == "as good"

    def test_one_that_does_not_fit_names_the_device_and_the_bytes(self) -> None:
        assert members(planned(instance_a()))["single_device"].reason == "ref0 lacks 4 B"

    def test_the_score_is_that_of_the_best_member(self) -> None:
        problem = published("many_source", 40)
        placement = planned(problem)
        scores = [member.score_s for member in placement.members if member.score_s is not None]
        assert placement.score_s == min(scores)
        assert placement.plan is not None
        replay = reference.simulate(problem, placement.plan, dispatch="in_order", links="shared")
        assert placement.score_s == replay.step_s

    def test_the_bound_is_the_best_of_all_members(self) -> None:
        """Instance B: the longest chain is 11 or 12, the clipped programme proves 12.5 (m_sct)."""
        placement = planned(instance_b(), "100000x")
        assert placement.bound_name == "small communication"
        assert placement.bound_s == pytest.approx(12.5)

    def test_the_same_count_gives_the_same_answer(self) -> None:
        problem = published("fork_join", 40)
        assert planned(problem, "300x").digest == planned(problem, "300x").digest

    def test_another_seed_may_search_elsewhere_but_never_does_worse_than_its_constructors(self) -> None:
        problem = published("layered", 40)
        constructed = min(
            found.score_s
            for found in (api.plan(problem, algorithm=name, budget="200x") for name in CONSTRUCTORS)
            if found.score_s is not None
        )
        for seed in range(2):
            found = api.plan(problem, algorithm="auto", budget="200x", seed=seed)
            assert found.score_s is not None
            assert found.score_s <= constructed


def test_pins_are_kept_by_everyone() -> None:
    problem = published("fork_join", 30)
    pinned = np.full(problem.graph.num_ops, -1, dtype=np.int32)
    pinned[::5] = 3
    placement = planned(replace(problem, pinned=pinned), "200x")
    assert placement.plan is not None
    assert (placement.plan.device[::5] == 3).all()


REPORT = """
import json, sys
import loadmaster as lm
found = lm.plan("gen:fork_join:30", objective=sys.argv[1], split="free", budget=sys.argv[2])
tried = [member.name for member in found.members if member.status is not None]
print(json.dumps([tried, [member.name for member in found.members], list(sys.modules)]))
"""
FAMILIES = ("loadmaster.placers.heuristic", "loadmaster.placers.exact", "loadmaster.placers.search")


def run_python(code: str, *arguments: str) -> Any:
    """What some lines of Python print as JSON, in a process of their own."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(name="warm", scope="module")
def _warm() -> None:
    """On a new machine every algorithm is imported once, to compile its kernels."""
    run_python("from loadmaster.placers.warm import warm_up; warm_up(); print(0)")


@pytest.mark.usefixtures("warm")
class TestImports:
    """An algorithm that is not asked costs nothing, not even its import."""

    @pytest.mark.parametrize("objective", ["step", "throughput"])
    def test_an_algorithm_that_is_skipped_is_not_imported(self, objective: str) -> None:
        tried, members, modules = run_python(REPORT, objective, "50x")
        skipped = {name for name in members if name not in tried}
        assert {"m_sct", "memory_first"} <= skipped
        loaded = {name.rpartition(".")[2] for name in modules if name.startswith(FAMILIES)}
        assert "m_etf" in loaded
        assert not skipped & loaded

    def test_a_step_is_planned_without_the_throughput_solvers(self) -> None:
        tried, _, modules = run_python(REPORT, "step", "2000x")
        assert "chain_balance" in tried
        throughput_only = ("linear_dp", "ideal_dp", "local_search", "cpsat_throughput", "_maxload.model")
        assert not [name for name in modules if name.startswith(FAMILIES) and name.endswith(throughput_only)]
