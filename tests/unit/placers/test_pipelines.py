"""Pipelines of micro-batches: what stages hold, that plans fit, and that the best is found."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from loadmaster import api
from loadmaster.core.check import check_plan
from loadmaster.core.errors import InputError, LoadmasterError, PlanError, ProblemError
from loadmaster.core.graph import Phase
from loadmaster.core.pipelines.in_flight import standing_bytes
from loadmaster.core.pipelines.schedule import parse_schedule
from loadmaster.core.placement import Placement, Status
from loadmaster.core.plan import Pipeline, Plan
from loadmaster.core.problem import Links, Objective, Problem, Split
from loadmaster.graph.build import GraphBuilder
from loadmaster.simulator.events.engine import simulate
from loadmaster.simulator.events.throughput import steady_state
from tests.builders import cluster_of, plan_on, problem_of
from tests.pipelines import INF, every_pipeline, judged, random_pipeline


def layers(
    num: int, *, each: int, weight: int = 1, memory: int = 100, asked: str = "1f1b:8", devices: int = 2
) -> Problem:
    """A row of layers, forward 1 s and backward 2 s, `each` bytes saved beside the 1 byte passed on."""
    builder = GraphBuilder("layers")
    ahead = [builder.op(f"f{at}", group=at, resident_bytes=weight) for at in range(num)]
    back = [builder.op(f"b{at}", group=at, phase=Phase.BACKWARD, mirror=at) for at in range(num)]
    for at in range(num):
        builder.use(builder.tensor(ahead[at], each), back[at])
        if at + 1 < num:
            builder.use(builder.tensor(ahead[at], 1), ahead[at + 1])
            builder.use(builder.tensor(back[at + 1], 1), back[at])
    routes = {(i, j): [0] for i in range(devices) for j in range(devices) if i != j}
    graph = builder.build()
    seconds = [1.0 if name.startswith("f") else 2.0 for name in graph.op_name]
    return problem_of(
        graph,
        cluster_of(routes, kind=[0] * devices, on_host=[False], memory=memory),
        seconds,
        transfer_s=0.0,
        objective=Objective.THROUGHPUT,
        links=Links.HOST,
        split=Split.CHAIN,
        pipeline=asked,
    )


def halves(problem: Problem, *, again: tuple[bool, bool] = (False, False)) -> Plan:
    """The first half of the layers on device 0, the rest on 1."""
    num = problem.graph.num_ops // 2
    at = np.array([int(name[1:]) for name in problem.graph.op_name])
    stage = (at >= num // 2).astype(np.int32)
    forward = problem.graph.phase == Phase.FORWARD
    schedule = parse_schedule(problem.pipeline)
    pipeline = Pipeline(
        stage, [1, 1], schedule.num_microbatches, schedule.name, schedule.in_flight(2), [1.0, 1.0]
    )
    return replace(plan_on(stage), recompute=forward & np.array(again)[stage], pipeline=pipeline)


class TestMemory:
    def test_under_1f1b_a_stage_holds_one_for_itself_and_one_for_each_behind(self) -> None:
        problem = layers(4, each=10)
        assert standing_bytes(problem.graph, halves(problem), 2).tolist() == [2 + 2 * 20, 2 + 20]

    def test_under_gpipe_every_stage_holds_all(self) -> None:
        problem = layers(4, each=10, asked="gpipe:8")
        assert standing_bytes(problem.graph, halves(problem), 2).tolist() == [2 + 8 * 20, 2 + 8 * 20]

    def test_no_stage_holds_more_than_there_are(self) -> None:
        problem = layers(4, each=10, asked="1f1b:1")
        assert standing_bytes(problem.graph, halves(problem), 2).tolist() == [22, 22]

    def test_a_recomputed_stage_keeps_its_input_and_one_full_set(self) -> None:
        problem = layers(4, each=10, asked="gpipe:8")
        plan = halves(problem, again=(False, True))
        assert standing_bytes(problem.graph, plan, 2).tolist() == [2 + 8 * 20, 2 + 8 * 1 + 20]

    def test_a_recomputed_stage_runs_its_forward_twice(self) -> None:
        problem = layers(4, each=10)
        assert steady_state(problem, halves(problem, again=(True, False))).load_s.tolist() == [8.0, 6.0]

    def test_check_and_simulator_refuse_what_does_not_fit(self) -> None:
        problem = layers(4, each=10, memory=41)
        found = api.check_plan(problem, halves(problem))
        assert [v.rule for v in found] == ["memory"]
        assert [v.rule for v in check_plan(problem, halves(problem))] == ["memory"]
        assert api.check_plan(problem, halves(problem, again=(True, False))) == []

    def test_the_two_evaluators_agree(self) -> None:
        for seed in range(60):
            problem = random_pipeline(seed)
            placement = api.plan(problem, algorithm="chain_balance", budget="20x")
            plan = placement.plan or placement.least_overflow_plan
            assert plan is not None
            seconds, peak = judged(problem, plan)
            assert simulate(problem, plan).peak_bytes.tolist() == peak
            assert steady_state(problem, plan).time_s == pytest.approx(seconds, rel=1e-12)


def agrees(problem: Problem, algorithm: str) -> Placement:
    """An answer against all pipelines there are."""
    best, placement = every_pipeline(problem), api.plan(problem, algorithm=algorithm, budget="20x")
    if placement.plan is None:
        assert best == INF or placement.status == Status.NOT_FOUND
        return placement
    assert api.check_plan(problem, placement.plan) == []
    seconds, peak = judged(problem, placement.plan)
    assert all(need <= have for need, have in zip(peak, problem.cluster.usable_bytes.tolist(), strict=True))
    assert placement.score_s == pytest.approx(seconds, rel=1e-9)
    assert best * (1 - 1e-9) <= seconds
    assert placement.bound_s <= best * (1 + 1e-9)
    if placement.status == Status.OPTIMAL:
        assert seconds == pytest.approx(best, rel=1e-9)
    pipeline = placement.plan.pipeline
    assert pipeline is not None
    device = [int(placement.plan.device[pipeline.stage == s][0]) for s in range(len(pipeline.replicas))]
    load = steady_state(problem, placement.plan).load_s
    assert pipeline.stage_s.tolist() == load[device].tolist()
    return placement


def proven(seeds: range) -> tuple[int, int]:
    """How many pipelines fit, and how many of those are proven the best, in so many random problems."""
    found = [agrees(random_pipeline(seed), "ideal_dp") for seed in seeds]
    fits = [placement for placement in found if placement.fits]
    return len(fits), sum(placement.status == Status.OPTIMAL for placement in fits)


class TestBruteForce:
    def test_the_best_pipeline(self) -> None:
        fits, optimal = proven(range(30))
        assert fits >= 15
        assert optimal >= 0.8 * fits

    @pytest.mark.parametrize("algorithm", ["chain_balance", "linear_dp", "auto"])
    def test_the_others_claim_nothing_wrong(self, algorithm: str) -> None:
        for seed in range(100, 110):
            agrees(random_pipeline(seed), algorithm)

    @pytest.mark.slow
    def test_the_best_pipeline_of_many(self) -> None:
        fits, optimal = proven(range(1000, 2000))
        assert optimal >= 0.8 * fits

    def test_stages_are_recomputed_where_only_that_fits(self) -> None:
        problem = layers(4, each=10, memory=41)
        placement = agrees(problem, "ideal_dp")
        assert placement.status == Status.OPTIMAL
        assert placement.plan is not None
        assert placement.score_s in (8.0, 9.0)


class TestRemedies:
    """What the proof that no pipeline fits says would do, against all pipelines there are."""

    def test_so_many_devices_would_do_and_fewer_micro_batches_would_not(self) -> None:
        """Two layers hold 22 bytes of one micro-batch already; one alone, made again, 14 at most."""
        problem = layers(4, each=10, memory=17)
        placement = agrees(problem, "ideal_dp")
        assert placement.status == Status.INFEASIBLE
        assert "use 4 devices like d0 instead of 2, a smaller batch or larger devices" in placement.proof
        assert every_pipeline(layers(4, each=10, memory=17, devices=3)) == INF
        assert every_pipeline(layers(4, each=10, memory=17, devices=4)) < INF
        assert every_pipeline(layers(4, each=10, memory=17, asked="1f1b:1")) == INF

    def test_so_many_micro_batches_would_do(self) -> None:
        """Two layers made again: 22 bytes, and one more of every micro-batch on the second device."""
        problem = layers(4, each=10, memory=26, asked="gpipe:8")
        placement = agrees(problem, "ideal_dp")
        assert placement.status == Status.INFEASIBLE
        assert "use 3 devices like d0 instead of 2, 2 micro-batches, a smaller batch" in placement.proof
        assert every_pipeline(layers(4, each=10, memory=26, asked="gpipe:4")) == INF
        assert every_pipeline(layers(4, each=10, memory=26, asked="gpipe:2")) < INF
        assert every_pipeline(layers(4, each=10, memory=26, asked="gpipe:8", devices=3)) < INF

    def test_where_one_layer_is_too_large_nothing_is_promised(self) -> None:
        placement = api.plan(layers(2, each=10, memory=10), algorithm="ideal_dp", budget="20x")
        assert placement.status == Status.INFEASIBLE
        advice = placement.proof.partition(": use ")[2]
        assert advice
        assert "micro-batch" not in advice
        assert "instead of" not in placement.proof
        assert "more device" not in placement.proof


class TestQuestion:
    def test_a_problem_says_what_is_asked(self) -> None:
        asked = layers(2, each=1)
        assert asked.digest != replace(asked, pipeline="").digest
        assert asked.digest != replace(asked, pipeline="gpipe:8").digest

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("2f2b:8", "1f1b"),
            ("1f1b", "does not say how many micro-batches; write e.g. 1f1b:8"),
            ("1f1b:0", "micro-batches"),
            ("gpipe:1e9", "give 1 to"),
        ],
    )
    def test_a_senseless_schedule_is_refused(self, text: str, message: str) -> None:
        with pytest.raises(InputError, match=message):
            parse_schedule(text)
        with pytest.raises(ProblemError, match=message):
            layers(2, each=1, asked=text)

    @pytest.mark.parametrize(
        ("fields", "wrong"),
        [
            ({"split": "free"}, "chain of stages for throughput, not for split 'free';"),
            ({"pipeline": "zb-h1:8"}, "is for the time of a step; ask for --objective step, or for 1f1b"),
            ({"pipeline": "gpipe:8x2"}, "is for the time of a step"),
        ],
    )
    def test_a_steady_state_is_of_a_chain_under_two_schedules(self, fields: Any, wrong: str) -> None:
        with pytest.raises(ProblemError, match=wrong):
            replace(layers(2, each=1), **fields)

    def test_a_graph_without_backward_ops_has_no_schedule(self) -> None:
        with pytest.raises(ProblemError, match="no backward op"):
            api.problem("gen:chain:4", objective="throughput", pipeline="1f1b:2")

    def test_an_algorithm_that_makes_none_says_so(self) -> None:
        with pytest.raises(
            LoadmasterError,
            match=r"single_device makes no pipelines, and 1f1b:8 is asked for; choose one that does"
            r" \(auto, chain_balance, ideal_dp, linear_dp\)",
        ):
            api.plan(layers(2, each=1), algorithm="single_device")

    def test_a_saved_placement_comes_back_with_its_pipeline(self, tmp_path: Any) -> None:
        placement = api.plan(layers(4, each=10), budget="20x")
        api.save(placement, tmp_path / "plan.json")
        back = api.load(tmp_path / "plan.json")
        assert isinstance(back, Placement)
        assert back.digest == placement.digest
        assert back.plan is not None
        assert back.plan.pipeline is not None
        assert back.plan.pipeline.in_flight.tolist() == [2, 1]

    def test_a_captured_like_step_is_planned_and_fits(self) -> None:
        problem = api.problem(
            "gen:transformer:300", "2xA100-80GB", "throughput", links="parallel", pipeline="1f1b:8"
        )
        placement = api.plan(problem, algorithm="linear_dp", budget="20x")
        assert placement.plan is not None
        assert api.check_plan(problem, placement.plan) == []

    def test_nothing_fits_and_why(self) -> None:
        placement = api.plan(layers(4, each=10, memory=8), algorithm="ideal_dp", budget="20x")
        assert placement.status == Status.INFEASIBLE
        assert placement.proof


class TestRules:
    def broken(self, problem: Problem, plan: Plan) -> str:
        found = [v for v in check_plan(problem, plan) if v.rule in ("pipeline", "recompute")]
        return found[0].message if found else ""

    def test_a_plan_without_the_pipeline_is_refused(self) -> None:
        problem = layers(4, each=1)
        plan = replace(halves(problem), pipeline=None)
        assert "asks for 1f1b:8, the plan has no pipeline" in self.broken(problem, plan)
        with pytest.raises(PlanError, match="no pipeline"):
            simulate(problem, plan)
        assert "the plan has a pipeline" in self.broken(replace(problem, pipeline=""), halves(problem))

    def test_another_schedule_is_refused(self) -> None:
        problem = layers(4, each=1)
        other = halves(replace(problem, pipeline="gpipe:8"))
        assert "asks for 1f1b:8, the plan is gpipe:8" in self.broken(problem, other)

    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("in_flight", [1, 1], "under 1f1b:8 they hold"),
            ("replicas", [1, 2], "stage 1 has 2 replicas"),
            ("stage", [0] * 8, "every stage has a device of its own"),
        ],
    )
    def test_a_pipeline_that_is_not_what_it_says_is_refused(
        self, field: str, value: Any, message: str
    ) -> None:
        problem = layers(4, each=1)
        plan = halves(problem)
        assert plan.pipeline is not None
        bad = replace(plan, pipeline=replace(plan.pipeline, **{field: value}))
        assert message in self.broken(problem, bad)

    def test_stages_stand_in_the_order_of_the_forward_pass(self) -> None:
        problem = layers(4, each=1)
        plan = halves(problem)
        assert plan.pipeline is not None
        turned = replace(plan, pipeline=replace(plan.pipeline, stage=1 - plan.pipeline.stage))
        assert "order of the forward pass" in self.broken(problem, turned)

    def test_a_stage_is_recomputed_whole_or_not_at_all(self) -> None:
        problem = layers(4, each=1)
        plan = halves(problem, again=(True, False))
        part = plan.recompute.copy()
        part[np.flatnonzero(part)[0]] = False
        assert "whole or not at all" in self.broken(problem, replace(plan, recompute=part))
        backward = problem.graph.phase == Phase.BACKWARD
        assert "whole or not at all" in self.broken(problem, replace(plan, recompute=backward))
