"""Exact max-load: published optima, brute force scored by `tests/maxload.py`, limits and messages."""

import sys
from dataclasses import replace

import numpy as np
import pytest

from loadmaster import api
from loadmaster.core.errors import InputError, LoadmasterError
from loadmaster.core.placement import Placement, Status
from loadmaster.core.problem import Links, Objective, Problem, Split
from loadmaster.core.run import Budget, Run
from loadmaster.graph.formats import msr
from loadmaster.placers.bounds import quick_bound
from loadmaster.placers.exact._maxload.chains import find_ideals
from loadmaster.placers.exact._maxload.contract import chain_model
from loadmaster.placers.exact._maxload.model import free_model
from loadmaster.placers.exact._maxload.reduce import least_busiest_s, reduce_model
from loadmaster.placers.registry import Placer, placer
from loadmaster.placers.warm import warm_up
from loadmaster.simulator.bounds.lower_bounds import lower_bound
from loadmaster.simulator.events.engine import prepare
from tests.builders import chain, cluster_of, loose_ops, problem_of, star_cluster
from tests.maxload import INF, broken, every_split, max_load, random_problem
from tests.unit.public_graphs import THROUGHPUT, problem_from, shared, throughput_input

IDEALS = {  # classes and ideals of each graph after preprocessing
    "LayerGraphs/bert24_inference": (28, 30),
    "LayerGraphs/bert24_training": (28, 30),
    "LayerGraphs/gnmt_inference": (78, 17_914),
    "LayerGraphs/inceptionv3_inference": (326, 36_596),
    "LayerGraphs/resnet50_inference": (177, 242),
    "LayerGraphs/resnet50_training": (177, 242),
    "OperatorGraphs/bert_l-3_inference": (128, 1_428),
    "OperatorGraphs/bert_l-3_training": (138, 2_774),
    "OperatorGraphs/bert_l-6_inference": (227, 1_923),
    "OperatorGraphs/bert_l-6_training": (243, 3_776),
    "OperatorGraphs/resnet50_inference": (176, 241),
    "OperatorGraphs/resnet50_training": (193, 258),
}
EIGHT_CPUS = {  # best chains of the latency inputs, eight CPUs each (of Inception: the authors' cut)
    "LayerGraphs/bert24_inference": 22.035125,
    "LayerGraphs/gnmt_inference": 44.896515625,
    "LayerGraphs/inceptionv3_inference": 162.82,
    "OperatorGraphs/bert_l-3_inference": 189.1421908645,
    "OperatorGraphs/bert_l-12_inference": 97.2637459340,
    "OperatorGraphs/resnet50_inference": 107.7782625458,
}
FREE_FAST = {  # proven within a second
    "OperatorGraphs/bert_l-3_training": 54.207399,
    "OperatorGraphs/resnet50_inference": 124.348850,
}
FREE_SLOW = {
    "LayerGraphs/bert24_inference": 17.714719,
    "LayerGraphs/bert24_training": 39.789539,
    "LayerGraphs/gnmt_inference": 31.687311,
    "OperatorGraphs/bert_l-3_inference": 21.908376,
}
FREE_BEST = {  # known splits and bounds, to the digits given
    "LayerGraphs/inceptionv3_inference": (51.4172, 50.9785),
    "LayerGraphs/resnet50_inference": (33.3783, 33.0246),
    "LayerGraphs/resnet50_training": (76.6107, 75.8002),
    "OperatorGraphs/bert_l-6_inference": (29.3827, 25.4516),
    "OperatorGraphs/bert_l-6_training": (72.4717, 63.3869),
    "OperatorGraphs/resnet50_training": (255.194416, 253.58),
}


def asked(problem: Problem, algorithm: Placer | str, budget: Budget | None = None) -> Placement:
    """An algorithm's answer, without the command line's preparations but for the compiler's."""
    if budget is not None and budget.seconds is not None:
        warm_up()
    simulator = prepare(problem)
    run = Run(
        budget=budget or Budget(count=40),
        rng=np.random.default_rng(0),
        score=simulator.score,
        arrange=simulator.order_and_score,
        bound=lower_bound(problem),
    )
    return (placer(algorithm) if isinstance(algorithm, str) else algorithm)(problem, run)


def verified(problem: Problem, placement: Placement) -> float:
    """The load of a plan by the second evaluator; it breaks no rule and its score is that load."""
    assert placement.plan is not None
    assert broken(problem, placement.plan.device) == ""
    load = max_load(problem, placement.plan.device)
    assert placement.score_s == pytest.approx(load, rel=1e-9)
    return load


class TestPublished:
    @pytest.mark.parametrize("name", IDEALS)
    def test_the_best_chain_has_the_published_load(self, name: str) -> None:
        problem = problem_from(throughput_input(name))
        placement = asked(problem, "ideal_dp")
        assert verified(problem, placement) == pytest.approx(THROUGHPUT[name].chain, rel=1e-9)
        assert placement.status == Status.OPTIMAL
        assert placement.bound_name == f"best chain, {IDEALS[name][1]:,} ideals"

    @pytest.mark.parametrize("name", EIGHT_CPUS)
    def test_the_best_chain_over_eight_cpus_too_has_the_published_load(self, name: str) -> None:
        work = msr.read(shared("latency-inputs", f"{name}.json"), name)
        assert work.cluster is not None
        assert np.count_nonzero(work.cluster.on_host[work.cluster.kind]) == 8
        problem = pipelined(problem_from(work), links=Links.HOST)
        placement = asked(problem, "ideal_dp")
        assert verified(problem, placement) == pytest.approx(EIGHT_CPUS[name], rel=1e-9)
        assert placement.status == Status.OPTIMAL

    @pytest.mark.parametrize("name", IDEALS)
    def test_classes_and_ideals_are_as_many_as_published(self, name: str) -> None:
        model = chain_model(problem_from(throughput_input(name))).model
        ideals = find_ideals(model, most=10**6, max_bytes=2**30)
        assert ideals is not None
        assert (model.num_classes, ideals.num) == IDEALS[name]

    @pytest.mark.parametrize("name", IDEALS)
    def test_a_cut_order_is_within_half_a_percent(self, name: str) -> None:
        problem = problem_from(throughput_input(name))
        load = verified(problem, asked(problem, "linear_dp"))
        assert THROUGHPUT[name].chain * (1 - 1e-9) <= load <= 1.005 * THROUGHPUT[name].chain

    @pytest.mark.parametrize("name", FREE_FAST)
    def test_the_best_free_split_is_proven(self, name: str) -> None:
        self.proven(name, FREE_FAST[name], 20.0)

    @pytest.mark.slow
    @pytest.mark.parametrize("name", FREE_SLOW)
    def test_the_best_free_split_is_proven_in_minutes(self, name: str) -> None:
        self.proven(name, FREE_SLOW[name], 400.0)

    def proven(self, name: str, value: float, seconds: float) -> None:
        problem = problem_from(throughput_input(name), split=Split.FREE)
        placement = asked(problem, "cpsat_throughput", Budget(seconds=seconds))
        assert verified(problem, placement) == pytest.approx(value, rel=1e-6)
        assert placement.status == Status.OPTIMAL

    @pytest.mark.slow
    @pytest.mark.parametrize("name", FREE_BEST)
    def test_no_worse_than_the_best_known(self, name: str) -> None:
        problem = problem_from(throughput_input(name), split=Split.FREE)
        placement = asked(problem, "auto", Budget(seconds=60))
        value, bound = FREE_BEST[name]
        assert verified(problem, placement) <= 1.005 * value
        assert placement.bound_s >= bound * (1 - 1e-5)

    @pytest.mark.slow
    @pytest.mark.parametrize("name", [n for n in IDEALS if "bert24" in n or "OperatorGraphs/resnet" in n])
    def test_the_constraint_programme_finds_the_same_chain(self, name: str) -> None:
        problem = problem_from(throughput_input(name))
        placement = asked(problem, "cpsat_throughput", Budget(seconds=120))
        assert verified(problem, placement) == pytest.approx(THROUGHPUT[name].chain, rel=1e-9)


def drawn(
    seeds: range, split: Split, *, training: bool = False, orphans: bool = False
) -> list[tuple[int, Problem]]:
    """Random problems; those that no nouns allow are left out."""
    found = []
    for seed in seeds:
        try:
            found.append((seed, random_problem(seed, split=split, training=training, orphans=orphans)))
        except LoadmasterError:
            continue
    return found


def agrees(problem: Problem, algorithm: str, *, exact: bool) -> None:
    """An answer against all splits there are."""
    best, placement = every_split(problem), asked(problem, algorithm)
    if best.value == INF:
        assert placement.plan is None
        return
    assert placement.bound_s <= best.value * (1 + 1e-9)
    if placement.plan is None:
        assert not exact
        assert placement.status == Status.NOT_FOUND
        return
    load = verified(problem, placement)
    assert load >= best.value * (1 - 1e-9)
    if exact:
        assert placement.status == Status.OPTIMAL
    if placement.status == Status.OPTIMAL:
        assert load == pytest.approx(best.value, rel=1e-9)


class TestBruteForce:
    def test_the_two_evaluators_agree(self) -> None:
        for seed, problem in drawn(range(30), Split.CHAIN):
            allowed = 0
            die = np.random.default_rng(seed)
            for _ in range(20):
                device = die.integers(problem.cluster.num_devices, size=problem.graph.num_ops)
                if not broken(problem, device):
                    allowed += 1
                    assert max_load(problem, device) >= every_split(problem).value
            assert allowed == 0 or every_split(problem).allowed > 0

    def test_the_best_chain(self) -> None:
        for _, problem in drawn(range(40), Split.CHAIN):
            agrees(problem, "ideal_dp", exact=True)

    def test_the_best_chain_in_training(self) -> None:
        for _, problem in drawn(range(1000, 1040), Split.CHAIN, training=True):
            agrees(problem, "ideal_dp", exact=True)

    def test_the_best_chain_where_backward_ops_are_classes_of_their_own(self) -> None:
        """Such a class is ordered by its backward edges, turned: the rules and the programme say the same."""
        ordered = 0
        for _, problem in drawn(range(1100, 1120), Split.CHAIN, training=True, orphans=True):
            agrees(problem, "ideal_dp", exact=True)
            agrees(problem, "chain_balance", exact=False)
            ordered += every_split(problem).allowed < every_split(problem, forward_only=True).allowed
        assert ordered > 3

    def test_cut_orders_claim_nothing_wrong(self) -> None:
        for _, problem in drawn(range(40), Split.CHAIN):
            agrees(problem, "linear_dp", exact=False)

    def test_local_search_claims_nothing_wrong(self) -> None:
        for _, problem in drawn(range(20), Split.FREE):
            agrees(problem, "local_search", exact=False)

    @pytest.mark.parametrize("split", [Split.FREE, Split.CHAIN])
    def test_the_constraint_programme(self, split: Split) -> None:
        for _, problem in drawn(range(8), split):
            agrees(problem, "cpsat_throughput", exact=split == Split.FREE)

    @pytest.mark.slow
    @pytest.mark.parametrize("training", [False, True])
    def test_the_best_chain_of_thousands(self, training: bool) -> None:
        for _, problem in drawn(range(2000, 4000), Split.CHAIN, training=training):
            agrees(problem, "ideal_dp", exact=True)

    @pytest.mark.slow
    def test_the_best_chain_of_many_with_classes_of_backward_ops(self) -> None:
        for _, problem in drawn(range(4000, 4200), Split.CHAIN, training=True, orphans=True):
            agrees(problem, "ideal_dp", exact=True)
            agrees(problem, "linear_dp", exact=False)
            agrees(problem, "chain_balance", exact=False)

    @pytest.mark.slow
    def test_the_best_free_split_of_many(self) -> None:
        for _, problem in drawn(range(2000, 2600), Split.FREE):
            agrees(problem, "cpsat_throughput", exact=True)
            agrees(problem, "local_search", exact=False)

    def test_bounds_by_cuts_and_prices_hold(self) -> None:
        for _, problem in drawn(range(5000, 5100), Split.FREE):
            best, model = every_split(problem), free_model(problem)
            if best.value == INF:
                continue
            assert least_busiest_s(model) <= best.value * (1 + 1e-9)
            kept = reduce_model(model, best.value * (1 + 1e-9) + 1e-9)
            assert kept is not None, "a split within the limit was lost"
            assert every_split_within(problem, kept.of_class[model.of_op], best.value)


def every_split_within(problem: Problem, label: "np.typing.NDArray[np.int32]", value: float) -> bool:
    """Whether the best value is reached by a split that keeps classes of one label together."""
    graph = replace(problem.graph, group=label, mirror=np.full(problem.graph.num_ops, -1, dtype=np.int32))
    return every_split(replace(problem, graph=graph)).value <= value * (1 + 1e-9)


def pipelined(problem: Problem, **fields: object) -> Problem:
    return replace(problem, objective=Objective.THROUGHPUT, **{"split": Split.CHAIN, **fields})


class TestLimits:
    def test_beyond_the_limit_of_ideals_it_cuts_orders_and_says_so(self) -> None:
        seconds = [1 + 0.37 * (at % 11) for at in range(20)]
        problem = pipelined(problem_of(loose_ops(20), star_cluster(3), seconds))  # 2^20 ideals
        placement = asked(problem, placer("ideal_dp", max_ideals=1000))
        assert placement.status == Status.FEASIBLE
        assert "more than 1,000 ideals" in placement.members[0].reason
        assert 'lm.placer("ideal_dp", max_ideals=' in placement.members[0].reason

    def test_beyond_its_memory_it_says_so_too(self) -> None:
        seconds = [1 + 0.37 * (at % 11) for at in range(20)]
        problem = pipelined(problem_of(loose_ops(20), star_cluster(3), seconds))
        placement = asked(problem, placer("ideal_dp", max_bytes=2**20))
        assert placement.status == Status.FEASIBLE
        assert "more than fit in 1.0 MiB" in placement.members[0].reason

    def test_unlike_devices_beyond_counting_are_taken_in_sequence(self) -> None:
        devices = 14
        routes = {(i, j): [0] for i in range(devices) for j in range(devices) if i != j}
        cluster = cluster_of(routes, kind=range(devices), on_host=[False] * devices)
        seconds = [[1.0 + 0.1 * k + 0.01 * op for k in range(devices)] for op in range(16)]
        problem = pipelined(problem_of(chain(16, 0), cluster, seconds, links=Links.PARALLEL))
        placement = asked(problem, "ideal_dp")
        assert placement.plan is not None
        assert "fixed sequences" in placement.members[0].reason

    def test_no_chain_has_room_and_how_many_devices_would_do(self) -> None:
        """Three classes of 3 bytes, two devices of 5: each holds one."""
        problem = self.crowded(5)
        placement = asked(problem, "ideal_dp")
        assert placement.status == Status.INFEASIBLE
        assert "3 devices like d0 instead of 2 would do" in placement.proof
        assert "--split free" in placement.proof

    def test_a_circle_that_no_device_holds_is_named(self) -> None:
        """Groups 0 and 1 feed each other: a chain keeps them together, 6 bytes in 5."""
        problem = self.crowded(5, groups=(0, 1, 0))
        placement = asked(problem, "ideal_dp")
        assert placement.status == Status.INFEASIBLE
        assert "must share a stage" in placement.proof
        assert "--split free" in placement.proof
        assert asked(replace(problem, split=Split.FREE), "local_search").fits

    def crowded(self, room: int, groups: tuple[int, ...] = (0, 1, 2)) -> Problem:
        from loadmaster.graph.build import GraphBuilder

        builder = GraphBuilder("crowded")
        sizes = (3, 3, 3) if len(set(groups)) == 3 else (2, 3, 1)
        ops = [
            builder.op(f"op{at}", group=group, resident_bytes=size)
            for at, (group, size) in enumerate(zip(groups, sizes, strict=True))
        ]
        builder.use(builder.tensor(ops[0], 0), ops[1])
        builder.use(builder.tensor(ops[1], 0), ops[2])
        routes = {(i, j): [0] for i in range(2) for j in range(2) if i != j}
        cluster = cluster_of(routes, kind=[0, 0], memory=room)
        return pipelined(problem_of(builder.build(), cluster, 1.0, links=Links.PARALLEL))

    @pytest.mark.parametrize("field", ["max_ideals", "max_bytes"])
    def test_senseless_limits_are_refused(self, field: str) -> None:
        with pytest.raises(InputError, match=f"{field} is 0; give a whole number"):
            placer("ideal_dp", **{field: 0})

    def test_without_the_solver_the_extra_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in [name for name in sys.modules if name.split(".")[0] == "ortools"]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, "ortools", None)
        problem = pipelined(problem_of(chain(3), star_cluster(2), 1.0), split=Split.FREE)
        with pytest.raises(InputError, match=r"loadmaster\[exact\]"):
            asked(problem, "cpsat_throughput")

    def test_a_spent_budget_still_gives_a_plan_and_a_bound(self) -> None:
        problem = problem_from(throughput_input("LayerGraphs/gnmt_inference"))
        placement = asked(problem, "ideal_dp", Budget(seconds=1e-3))
        assert placement.status == Status.FEASIBLE
        assert verified(problem, placement) <= 1.1 * THROUGHPUT["LayerGraphs/gnmt_inference"].chain
        assert 0 < placement.bound_s < placement.score_s


class TestQuickBound:
    def test_transfers_count_without_a_budget_and_for_algorithms_without_a_proof(self) -> None:
        name = "OperatorGraphs/resnet50_inference"
        problem = replace(problem_from(throughput_input(name)), split=Split.FREE)
        bound = api.lower_bound(problem)
        assert bound.name == "anchored cut"
        assert 1.8 * lower_bound(problem).seconds < bound.seconds <= FREE_FAST[name] * (1 + 1e-6)
        placement = api.plan(problem, algorithm="linear_dp", budget="5x")
        assert (placement.bound_name, placement.bound_s) == (bound.name, bound.seconds)

    def test_it_is_never_above_the_best_split(self) -> None:
        for seed in range(60):
            problem = random_problem(seed)
            bound = quick_bound(problem)
            best = every_split(problem)
            assert bound.infeasible == "" or best.value == INF
            assert bound.seconds <= best.value * (1 + 1e-9)


class TestAuto:
    def test_no_chain_fits_and_how_many_devices_would_do_within_a_small_budget(self) -> None:
        placement = api.plan(TestLimits().crowded(5), budget="40x")
        assert placement.status == Status.INFEASIBLE
        assert "3 devices like d0 instead of 2 would do" in placement.proof
        assert not [m for m in placement.members if m.status is not None and "repaired" in m.name]

    def test_the_best_chain_is_found_and_proven(self) -> None:
        problem = problem_from(throughput_input("LayerGraphs/resnet50_inference"))
        placement = api.plan(problem, budget="10s")
        assert placement.status == Status.OPTIMAL
        assert placement.score_s == pytest.approx(33.7746660156, rel=1e-9)

    def test_the_command_finds_the_algorithm_by_name(self) -> None:
        work = throughput_input("LayerGraphs/bert24_inference")
        placement = api.plan(work, algorithm="ideal_dp", objective="throughput", budget="40x")
        assert placement.status == Status.OPTIMAL
        assert placement.score_s == pytest.approx(17.78990625, rel=1e-9)
