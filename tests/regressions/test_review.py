"""Faults that review found, each by the test that failed."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
import pytest

import loadmaster as lm
from loadmaster.core.check import check_plan, why_not_runnable
from loadmaster.core.errors import FormatError, GraphError, InputError, PlanError, ProblemError
from loadmaster.core.graph import Dtype, Phase
from loadmaster.core.placement import Placement
from loadmaster.core.problem import Objective, Problem
from loadmaster.core.run import Run
from loadmaster.cost.memory import with_optimizer
from loadmaster.graph.build import GraphBuilder
from loadmaster.graph.transformer import transformer
from loadmaster.placers.registry import placer
from loadmaster.simulator.bounds.lower_bounds import lower_bound
from loadmaster.simulator.events.engine import prepare
from tests import reference
from tests.builders import chain, cluster_of, plan_on, problem_of, star_cluster


def test_a_bound_whose_large_sums_cancel_stays_below_an_achieved_plan() -> None:
    builder = GraphBuilder("five loose ops")
    for op, held in enumerate((1, 1, 13708699, 6527343, 2011362)):
        builder.op(f"op{op}", resident_bytes=held)
    times = np.array([[0.03175, 10.6241]] * 2 + [[0.03175, np.inf]] * 3)
    cluster = replace(
        cluster_of({(0, 1): [0], (1, 0): [0]}, kind=[0, 1], on_host=[False, False]),
        memory_bytes=np.array([22247405, 10**15], dtype=np.int64),
    )
    problem = problem_of(builder.build(), cluster, times)
    best = lm.plan(problem, algorithm="brute_force")
    assert best.score_s is not None
    assert lower_bound(problem).seconds <= best.score_s
    assert best.gap is not None
    assert best.gap >= 0


def test_ready_dispatch_takes_priorities_that_would_deadlock_in_order() -> None:
    problem = problem_of(chain(4), star_cluster(2), [1.0] * 4)
    plan = plan_on([0, 1, 0, 1], [3, 2, 1, 0])
    expected = reference.simulate(problem, plan, dispatch="ready", links="shared")
    assert lm.simulate(problem, plan, dispatch="ready").step_s == expected.step_s
    with pytest.raises(PlanError, match="deadlock"):
        lm.simulate(problem, plan, dispatch="in_order")
    ordered = prepare(problem).order_by_start(plan)
    assert lm.simulate(problem, ordered, dispatch="in_order").step_s == expected.step_s


@dataclass(frozen=True)
class StepOnly:
    """Serves one objective."""

    objectives: ClassVar[tuple[Objective, ...]] = (Objective.STEP,)

    def __call__(self, problem: Problem, run: Run) -> Placement:
        return placer("single_device")(problem, run)


def test_an_objective_that_was_asked_for_is_never_replaced() -> None:
    problem = lm.problem("gen:chain:8", "2xT4", objective="throughput")
    with pytest.raises(ProblemError, match="supports step, not throughput"):
        lm.plan(problem, algorithm=StepOnly())
    with pytest.raises(ProblemError, match="supports step, not throughput"):
        lm.plan("gen:chain:8", "2xT4", algorithm=StepOnly(), objective="throughput")
    assert lm.plan("gen:chain:8", "2xT4", algorithm=StepOnly()).problem.objective == Objective.STEP


def test_an_algorithm_that_answers_with_something_else_is_refused() -> None:
    with pytest.raises(InputError, match="not a Placement"):
        lm.plan("gen:chain:4", algorithm=lambda problem, run: None)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(("field", "value"), [("score_s", 1e-9), ("bound_s", 0.0), ("bound_name", "hope")])
def test_a_saved_answer_with_another_claim_is_told(tmp_path: Path, field: str, value: object) -> None:
    path = tmp_path / "plan.json"
    lm.save(lm.plan("gen:fork_join:50", budget="20x"), path)
    document = msgspec.json.decode(path.read_bytes())
    document["content"][field] = value
    path.write_bytes(msgspec.json.encode(document))
    with pytest.raises(FormatError, match=r"damaged|below the bound"):
        lm.load(path)


def test_a_saved_problem_keeps_its_pins_split_and_load(tmp_path: Path) -> None:
    pin = {lm.problem("gen:chain:6").graph.op_name[3]: "gpu1"}
    problem = lm.problem(
        "gen:chain:6", "2xT4, cpu", objective="throughput", split="free", load="max2", pin=pin
    )
    path = tmp_path / "problem.json"
    lm.save(problem, path)
    assert lm.problem(path, objective=None).digest == problem.digest


def test_mixed_precision_halves_tensors_and_adds_a_master_copy() -> None:
    plain = transformer(num_layers=1, width=64, num_heads=4, seq=16, batch=2, vocab=100)
    mixed = with_optimizer(plain, "adamw", precision="mixed")
    param = plain.phase == Phase.PARAM
    elements = int(plain.resident_bytes[param].sum()) // 4
    assert int(mixed.resident_bytes[param].sum()) == elements * (2 + 4 + 8)
    assert int(with_optimizer(plain, "adamw").resident_bytes[param].sum()) == elements * (4 + 8)
    forward = plain.phase == Phase.FORWARD
    matmul = np.array([kind == "matmul" for kind in plain.op_kind]) & forward
    assert matmul.any()
    assert set(mixed.dtype[matmul].tolist()) == {Dtype.BFLOAT16}
    made = matmul[plain.tensor_op]
    assert (mixed.tensor_bytes[made] * 2 == plain.tensor_bytes[made]).all()


def test_links_through_a_host_need_a_host() -> None:
    with pytest.raises(ProblemError, match="host-side device"):
        lm.problem("gen:chain:4", "2xT4", links="host")


def test_recomputation_is_refused_outside_a_pipeline() -> None:
    problem = problem_of(chain(3), star_cluster(1), [1.0] * 3)
    plan = replace(plan_on([0, 0, 0]), recompute=np.array([False, True, False]))
    assert [v.rule for v in check_plan(problem, plan)] == ["recompute"]
    with pytest.raises(PlanError, match="which only pipeline stages support"):
        lm.simulate(problem, plan)


def test_a_plan_says_why_autograd_could_not_run_it() -> None:
    builder = GraphBuilder("training")
    weight = builder.op("weight", phase=Phase.PARAM)
    first, second = builder.op("first"), builder.op("second")
    back2 = builder.op("second backward", phase=Phase.BACKWARD, mirror=second)
    back1 = builder.op("first backward", phase=Phase.BACKWARD, mirror=first)
    update = builder.op("update", phase=Phase.UPDATE)
    builder.use(builder.tensor(weight, 1), first, update)
    builder.use(builder.tensor(first, 1), second)
    builder.use(builder.tensor(second, 1), back2, back1)
    problem = problem_of(builder.build(), star_cluster(2), [1.0] * 6)
    assert why_not_runnable(problem, plan_on([0, 0, 1, 1, 0, 0], [0, 1, 2, 3, 4, 5])) == []
    (apart,) = why_not_runnable(problem, plan_on([0, 0, 1, 0, 0, 0], [0, 1, 2, 3, 4, 5]))
    assert "second backward" in apart
    (torn,) = why_not_runnable(problem, plan_on([0, 0, 1, 1, 0, 1], [0, 1, 2, 3, 4, 5]))
    assert "update" in torn
    (order,) = why_not_runnable(problem, plan_on([0] * 6, [0, 1, 2, 4, 3, 5]))
    assert "reverse order" in order


def test_a_builder_names_what_does_not_exist() -> None:
    builder = GraphBuilder("small")
    op = builder.op("only")
    with pytest.raises(GraphError, match="no op 7"):
        builder.tensor(7, 1)
    with pytest.raises(GraphError, match="no tensor 3"):
        builder.use(3, op)
    builder.op("back", phase=Phase.BACKWARD, mirror=55)
    with pytest.raises(GraphError, match="no op 55"):
        builder.build()


def test_a_noun_prints_as_one_short_line() -> None:
    placement = lm.plan("gen:fork_join:200", budget="20x")
    assert placement.plan is not None
    nouns = (placement, placement.problem, placement.problem.graph, placement.problem.cluster, placement.plan)
    for noun in (*nouns, lm.simulate(placement.problem, placement.plan)):
        assert len(repr(noun)) < 200
        assert "\n" not in repr(noun)
