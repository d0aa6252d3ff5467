"""Steps of micro-batches: simulated as a second evaluator says, planned as by brute force, and bounded."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from loadmaster import api
from loadmaster.cluster.parse import parse_cluster
from loadmaster.core.cluster import SOCKET_BYTES_PER_S, SOCKET_LATENCY_S, process_cluster
from loadmaster.core.errors import InputError, PlanError, ProblemError
from loadmaster.core.graph import Phase
from loadmaster.core.pipelines.order import in_flight_of, make_order
from loadmaster.core.placement import Placement, Status
from loadmaster.core.plan import Pipeline, Plan
from loadmaster.core.problem import Problem
from loadmaster.core.timeline import SpanKind
from loadmaster.cost.microbatch import make_microbatch
from loadmaster.graph.build import GraphBuilder
from loadmaster.placers.bounds import quick_bound
from loadmaster.placers.microbatches import counts_of
from loadmaster.report.pipelines import bubble_share
from loadmaster.simulator.pipelines.unrolled import simulate_step
from tests import pipeline_steps, pipelines
from tests.builders import cluster_of, problem_of, star_cluster
from tests.pipeline_steps import Layer, layers_problem, stage_seconds, step_seconds
from tests.strategies import problems

PLAIN = ("gpipe", "1f1b")


def planned(
    problem: Problem,
    stage: Any,
    devices: list[list[int]],
    *,
    schedule: str,
    counts: tuple[int, ...],
    each: int = 1,
    recomputed: frozenset[int] = frozenset(),
) -> Plan:
    """The plan of given stages; `devices[r]` are those of the stages of replica r."""
    num, stage = len(devices[0]), np.asarray(stage, dtype=np.int32)
    order = make_order(schedule, num, max(counts), each)
    mirrored = np.zeros(problem.graph.num_ops, dtype=np.bool_)
    mirrored[problem.graph.mirror[problem.graph.mirror >= 0]] = True
    pipeline = Pipeline(
        stage=stage,
        replicas=np.full(num, len(devices)),
        num_microbatches=sum(counts),
        schedule=schedule,
        in_flight=np.array(in_flight_of(order, num)),
        stage_s=np.ones(num),
        rank=tuple(s % (num // each) for s in range(num)) if each > 1 else (),
        replica_device=tuple(map(tuple, devices)) if len(devices) > 1 else (),
        replica_microbatches=counts if len(devices) > 1 else (),
    )
    return Plan(
        device=np.array(devices[0])[stage],
        priority=np.arange(problem.graph.num_ops),
        recompute=mirrored & np.isin(stage, list(recomputed)),
        pipeline=pipeline,
    )


def layer_stages(problem: Problem, border: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """The stage of every op of a chain of layers, whose names end with their layer."""
    layer = np.array([int(name[1:]) for name in problem.graph.op_name])
    return np.searchsorted(np.array(border), layer, side="right") - 1


# ---------------------------------------------------------------------------------- closed forms


@pytest.mark.parametrize("schedule", PLAIN)
@pytest.mark.parametrize(("stages", "batches"), [(1, 1), (2, 1), (3, 5), (4, 8), (5, 2)])
def test_equal_stages_take_batches_and_stages_less_one(schedule: str, stages: int, batches: int) -> None:
    problem = layers_problem([Layer(1.0, 2.0)] * stages, [1.0] * stages, f"{schedule}:{batches}")
    plan = planned(
        problem, layer_stages(problem, tuple(range(stages + 1))), [list(range(stages))],
        schedule=schedule, counts=(batches,),
    )  # fmt: skip
    assert api.check_plan(problem, plan) == []
    timeline = api.simulate(problem, plan)
    assert timeline.step_s == pytest.approx((batches + stages - 1) * 3.0)
    assert bubble_share(timeline, plan) == pytest.approx((stages - 1) / (batches + stages - 1))


def split_backward(stages: int, asked: str) -> Problem:
    """Stages whose backward pass is an op for the input and one for the weight, a second each."""
    builder = GraphBuilder("split")
    forward, sent, back = [], [], None
    for s in range(stages):
        param = builder.op(f"w{s}", phase=Phase.PARAM, group=s)
        forward.append(builder.op(f"f{s}", group=s))
        builder.use(builder.tensor(param, 0), forward[s])
        if s:
            builder.use(sent[-1], forward[s])
        sent.append(builder.tensor(forward[s], 0))
    for s in reversed(range(stages)):
        one = builder.op(f"b{s}", phase=Phase.BACKWARD, mirror=forward[s], group=s)
        two = builder.op(f"g{s}", phase=Phase.BACKWARD, mirror=forward[s], group=s)
        update = builder.op(f"u{s}", phase=Phase.UPDATE, group=s)
        for op in (one, two):
            builder.use(sent[s], op)
            if back is not None:
                builder.use(back, op)
        back = builder.tensor(one, 0)
        builder.use(builder.tensor(two, 0), update)
    graph = builder.build()
    seconds = [1.0 if name[0] in "fbg" else 0.0 for name in graph.op_name]
    return problem_of(graph, star_cluster(stages), seconds, links="parallel", pipeline=asked)


@pytest.mark.parametrize(("stages", "batches"), [(2, 4), (3, 6), (4, 8)])
def test_zero_bubble_has_a_third_of_the_bubble(stages: int, batches: int) -> None:
    problem = split_backward(stages, f"auto:{batches}")
    stage = [int(name[1:]) for name in problem.graph.op_name]
    for schedule, bubble in (("1f1b", 3.0), ("zb-h1", 1.0)):  # Qi et al. 2024, table 2: T_F + T_B -(+) T_W
        plan = planned(problem, stage, [list(range(stages))], schedule=schedule, counts=(batches,))
        assert api.simulate(problem, plan).step_s == pytest.approx(3.0 * batches + (stages - 1) * bubble)


@pytest.mark.parametrize(("ranks", "each", "batches"), [(2, 2, 4), (3, 2, 6), (2, 3, 6)])
def test_interleaving_divides_the_bubble(ranks: int, each: int, batches: int) -> None:
    stages = ranks * each
    problem = layers_problem([Layer(1.0, 2.0)] * stages, [1.0] * ranks, f"interleaved:{batches}x{each}")
    devices = [[s % ranks for s in range(stages)]]
    plan = planned(
        problem, layer_stages(problem, tuple(range(stages + 1))), devices,
        schedule="interleaved", counts=(batches,), each=each,
    )  # fmt: skip
    assert api.check_plan(problem, plan) == []
    # Narayanan et al. 2021, section 2.2.2: the bubble is (R - 1)(f + b) of a single stage
    assert api.simulate(problem, plan).step_s == pytest.approx((batches * each + ranks - 1) * 3.0)


# --------------------------------------------------------------------------- a second evaluator

layer = st.builds(
    Layer,
    forward=st.integers(1, 9).map(float),
    backward=st.integers(1, 9).map(float),
    update=st.integers(0, 4).map(float),
)
paces = st.lists(st.sampled_from([1.0, 1.5, 2.0, 4.0]), min_size=1, max_size=4)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_a_step_takes_what_the_second_evaluator_says(data: st.DataObject) -> None:
    layers, pace = data.draw(st.lists(layer, min_size=1, max_size=5)), data.draw(paces)
    stages = data.draw(st.integers(1, min(len(layers), len(pace))))
    cuts = data.draw(st.permutations(range(1, len(layers)))) if len(layers) > 1 else []
    border = (0, *sorted(cuts[: stages - 1]), len(layers))
    devices = data.draw(st.permutations(range(len(pace))))[:stages]
    schedule, batches = data.draw(st.sampled_from(PLAIN)), data.draw(st.integers(1, 7))
    wait = data.draw(st.sampled_from([0.0, 0.5, 3.0]))
    cluster = star_cluster(len(pace), latency=wait)
    problem = layers_problem(layers, pace, f"{schedule}:{batches}", cluster=cluster)
    plan = planned(
        problem, layer_stages(problem, border), [list(devices)], schedule=schedule, counts=(batches,)
    )
    times = stage_seconds(layers, border, [pace[d] for d in devices])
    expected = step_seconds(schedule, batches, *times, [wait] * stages)
    assert api.check_plan(problem, plan) == []
    assert api.simulate(problem, plan).step_s == pytest.approx(expected)


# ------------------------------------------------------------------------- brute force and bound


@settings(max_examples=12, deadline=None)
@given(
    st.lists(layer, min_size=1, max_size=4),
    st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=1, max_size=3),
    st.integers(1, 5),
    st.sampled_from(PLAIN),
)
def test_no_pipeline_beats_the_bound(
    layers: list[Layer], pace: list[float], batches: int, schedule: str
) -> None:
    problem = layers_problem(layers, pace, f"{schedule}:{batches}")
    best = pipeline_steps.best_replicated_seconds(layers, pace, batches, [schedule])
    bound = quick_bound(problem)
    assert bound.seconds <= best
    found = api.plan(problem, algorithm="pipeline", budget="400x")
    assert found.score_s is not None
    assert best * (1 - 1e-9) <= found.score_s <= best * 1.1


@settings(max_examples=12, deadline=None)
@given(
    st.lists(layer, min_size=2, max_size=4),
    st.lists(st.sampled_from([1.0, 2.0]), min_size=2, max_size=3),
    st.integers(1, 5),
    st.sampled_from(PLAIN),
)
def test_filling_is_proven_where_memory_forbids_replicas(
    layers: list[Layer], pace: list[float], batches: int, schedule: str
) -> None:
    heavy = [replace(one, weight=100) for one in layers]
    room = 100 * len(heavy) * 2 - 1  # two devices hold more, one too little for all with gradients
    problem = layers_problem(heavy, pace, f"{schedule}:{batches}", memory=room)
    bound, best = quick_bound(problem), pipeline_steps.best_seconds(layers, pace, batches, [schedule])
    assert bound.seconds <= best
    assert quick_bound(replace(problem, pipeline=f"auto:{batches}")).seconds <= best


def test_filling_counts_where_the_weights_do_not_fit_twice() -> None:
    heavy = [Layer(1.0, 2.0, weight=100)] * 4
    problem = layers_problem(heavy, [1.0] * 4, "1f1b:8", memory=250)
    bound = quick_bound(problem)
    assert bound.name == "filling the pipeline"
    # stages as unequal as is best, 12 / (1 - (1 - 1/8)^4), where work alone is 8 x 12 / 4 = 24
    assert bound.seconds == pytest.approx(12.0 / (1.0 - (7 / 8) ** 4))
    placement = api.plan(problem, algorithm="pipeline", budget="100x")
    assert placement.score_s == pytest.approx(33.0)


def test_a_pinned_op_and_equal_engines_keep_bounds_valid() -> None:
    layers = [Layer(1.0, 1.0), Layer(5.0, 5.0)]
    problem = layers_problem(layers, [1.0, 3.0], "1f1b:4")
    pinned = problem.pinned.copy()
    pinned[problem.graph.op_name.index("f1")] = 1
    problem = replace(problem, pinned=pinned)
    placement = api.plan(problem, algorithm="pipeline", budget="100x")
    assert placement.plan is not None
    assert placement.plan.device[problem.graph.op_name.index("f1")] == 1
    assert placement.score_s is not None
    assert placement.bound_s <= placement.score_s == pytest.approx(min(4 * 30.0 + 2.0, 4 * 36.0))


ASKED = ("auto:3", "1f1b:2", "zb-h1:3", "interleaved:4x2", "gpipe:3")


def require_sound(problem: Problem) -> None:
    """The answer breaks no rule, is simulated as scored, and obeys its bound; or says why there is none."""
    try:
        placement = api.plan(problem, algorithm="pipeline", budget="20x")
    except InputError as refusal:
        if "stages was found that its pins" not in str(refusal):
            raise
        return
    plan = placement.plan or placement.least_overflow_plan
    assert plan is not None
    assert [v for v in api.check_plan(problem, plan) if v.rule != "memory"] == []
    if placement.score_s is not None:
        assert api.simulate(problem, plan).step_s == placement.score_s >= placement.bound_s


@pytest.mark.parametrize("seed", range(10))
def test_any_training_graph_has_a_sound_answer(seed: int) -> None:
    drawn = pipelines.random_pipeline(seed)
    require_sound(replace(drawn, objective="step", split="free", pipeline=ASKED[seed % len(ASKED)]))


@settings(max_examples=15, deadline=None)
@given(problems(), st.sampled_from(ASKED))
def test_graphs_without_any_chain_have_a_sound_answer(problem: Problem, asked: str) -> None:
    assume((problem.graph.phase == Phase.BACKWARD).any())
    require_sound(replace(problem, objective="step", split="free", pipeline=asked))


# ----------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(("schedule", "held"), [("gpipe", [6, 6, 6]), ("1f1b", [3, 2, 1])])
def test_a_stage_holds_its_micro_batches_in_flight(schedule: str, held: list[int]) -> None:
    layers = [Layer(1.0, 1.0, kept=1000, weight=10)] * 3
    problem = layers_problem(layers, [1.0] * 3, f"{schedule}:6")
    plan = planned(problem, layer_stages(problem, (0, 1, 2, 3)), [[0, 1, 2]], schedule=schedule, counts=(6,))
    peak = api.simulate(problem, plan).peak_bytes
    assert peak.tolist() == [1000 * count + 20 for count in held]  # the weight and its gradient


def test_a_stage_is_recomputed_where_it_has_no_room_otherwise() -> None:
    layers = [Layer(1.0, 1.0, kept=1000, sent=10)] * 4
    asked = layers_problem(layers, [1.0, 1.0], "gpipe:8", memory=6000)
    placement = api.plan(asked, algorithm="pipeline", budget="60x")
    assert placement.plan is not None
    assert placement.plan.recompute.any()
    assert (placement.peak_bytes <= 6000).all()
    roomy = api.plan(layers_problem(layers, [1.0, 1.0], "gpipe:8"), algorithm="pipeline", budget="60x")
    assert roomy.plan is not None
    assert not roomy.plan.recompute.any()
    assert roomy.score_s is not None
    assert placement.score_s is not None
    assert roomy.score_s < placement.score_s


def test_a_stage_that_does_not_fit_is_said_with_both_sizes() -> None:
    problem = layers_problem([Layer(1.0, 1.0, weight=3000)], [1.0, 1.0], "1f1b:2", memory=4000)
    placement = api.plan(problem, algorithm="pipeline", budget="20x")
    assert placement.status == Status.NOT_FOUND
    assert "needs" in placement.proof
    assert placement.shortfall_bytes.max() == 2000
    tight = layers_problem([Layer(1.0, 1.0, weight=9000)] * 2, [1.0, 1.0], "1f1b:2", memory=4000)
    assert api.plan(tight, algorithm="pipeline", budget="20x").status == Status.INFEASIBLE


# --------------------------------------------------------------------------- ties and replicas


def test_replicas_sum_gradients_in_a_ring() -> None:
    layers = [Layer(1.0, 1.0, weight=80)]
    problem = layers_problem(layers, [1.0, 1.0], "1f1b:4", cluster=star_cluster(2, rate=10.0))
    plan = planned(problem, layer_stages(problem, (0, 1)), [[0], [1]], schedule="1f1b", counts=(2, 2))
    assert api.check_plan(problem, plan) == []
    # two micro-batches each, then two turns of half the gradient: 2 x 40 bytes at 10 bytes a second
    assert api.simulate(problem, plan).step_s == pytest.approx(2 * 2.0 + 8.0)


def test_replicas_may_take_unequal_numbers_of_micro_batches() -> None:
    problem = layers_problem([Layer(1.0, 1.0)], [1.0, 3.0], "1f1b:4")
    placement = api.plan(problem, algorithm="pipeline", budget="100x")
    assert placement.score_s == pytest.approx(6.0)
    assert placement.plan is not None
    assert placement.plan.pipeline is not None
    assert placement.plan.pipeline.microbatches == (3, 1)


def test_tied_weights_are_held_twice_and_their_gradients_summed() -> None:
    builder = GraphBuilder("tied")
    param = builder.op("w", phase=Phase.PARAM, group=0, resident_bytes=60)
    weight = builder.tensor(param, 20)
    first, last = builder.op("first", group=0), builder.op("last")
    middle = builder.tensor(first, 4)
    builder.use(weight, first, last)
    builder.use(middle, last)
    late = builder.op("last.backward", phase=Phase.BACKWARD, mirror=last)
    early = builder.op("first.backward", phase=Phase.BACKWARD, mirror=first, group=0)
    add = builder.op("w.backward", phase=Phase.BACKWARD, group=0)
    update = builder.op("w.update", phase=Phase.UPDATE, group=0)
    builder.use(builder.tensor(last, 0), late)
    builder.use(builder.tensor(late, 4), early)
    builder.use(builder.tensor(late, 20), add)
    builder.use(builder.tensor(early, 20), add)
    builder.use(builder.tensor(add, 20), update)
    graph = builder.build()
    passes = ("first", "last", "last.backward", "first.backward")
    seconds = [1.0 if name in passes else 0.0 for name in graph.op_name]
    problem = problem_of(graph, star_cluster(2, rate=10.0), seconds, pipeline="1f1b:1")
    stage = [1 if name.startswith("last") else 0 for name in graph.op_name]
    plan = planned(problem, stage, [[0, 1]], schedule="1f1b", counts=(1,))
    timeline, lowered = simulate_step(problem, plan)
    # forward, 0.4 s, forward, backward, 0.4 s, backward, then two turns of half of 20 bytes
    assert timeline.step_s == pytest.approx(4.8 + 2.0)
    resident = np.bincount(lowered.plan.device, lowered.problem.graph.resident_bytes)
    assert resident.tolist() == [80.0, 80.0]  # weight and state of 60, gradient of 20, on both


def test_a_tensor_that_skips_a_stage_is_carried_through_it() -> None:
    builder = GraphBuilder("skip")
    ops = [builder.op(f"f{s}", flops=1.0) for s in range(3)]
    skip = builder.tensor(ops[0], 50)
    builder.use(skip, ops[2])
    builder.use(builder.tensor(ops[0], 5), ops[1])
    builder.use(builder.tensor(ops[1], 5), ops[2])
    back = [builder.op(f"b{s}", phase=Phase.BACKWARD, mirror=ops[s]) for s in range(3)]
    builder.use(builder.tensor(back[2], 5), back[1])
    builder.use(builder.tensor(back[1], 5), back[0])
    graph = builder.build()
    problem = problem_of(graph, star_cluster(3), np.ones(6), pipeline="gpipe:2")
    plan = planned(problem, [int(n[1:]) for n in graph.op_name], [[0, 1, 2]], schedule="gpipe", counts=(2,))
    timeline, lowered = simulate_step(problem, plan)
    moved = timeline.item[timeline.kind == SpanKind.TRANSFER]
    sizes = sorted(lowered.problem.graph.tensor_bytes[moved].tolist())
    assert sizes == [5, 5, 5, 5, 55, 55, 55, 55]
    assert set(timeline.microbatch.tolist()) == {0, 1}


def test_cpu_devices_of_one_host_are_processes_side_by_side() -> None:
    graph = pipeline_steps.layers_graph([Layer(1.0, 1.0)] * 4)
    cluster = parse_cluster("cpu#0-4GB, cpu#1-4GB")
    assert len(set(cluster.engine.tolist())) == 1
    seconds = [1.0 if name[0] in "fb" else 0.0 for name in graph.op_name]
    problem = problem_of(graph, cluster, seconds, links="parallel", pipeline="1f1b:4")
    placement = api.plan(problem, algorithm="pipeline", budget="60x")
    assert placement.score_s is not None
    assert placement.bound_s <= placement.score_s < 0.8 * 32.0


def test_what_crosses_between_processes_of_a_host_takes_the_time_of_a_socket() -> None:
    def step_s(count: int) -> float:
        graph = pipeline_steps.layers_graph([Layer(1e-5, 1e-5, sent=100)] * 4)
        seconds = [1e-5 if name[0] in "fb" else 0.0 for name in graph.op_name]
        cluster = parse_cluster(", ".join(f"cpu#{at}-4GB" for at in range(count)))
        problem = problem_of(graph, cluster, seconds, pipeline="1f1b:8")
        placement = api.plan(problem, algorithm="pipeline_equal")
        assert placement.score_s is not None
        return placement.score_s

    assert step_s(1) == pytest.approx(64e-5)
    assert step_s(2) > 64e-5 + SOCKET_LATENCY_S  # ops of microseconds do not pay for a process more


@pytest.mark.parametrize(("rate", "given"), [(1e9, 1e9), (1e11, SOCKET_BYTES_PER_S)])
def test_only_links_between_cpus_of_a_host_are_those_of_sockets(rate: float, given: float) -> None:
    inside, outside = [0], [1]  # CPUs 0 and 1 stand on one host, the GPU 2 is reached over a link of its own
    routes = {
        (0, 1): inside,
        (1, 0): inside,
        (0, 2): outside,
        (2, 0): outside,
        (1, 2): outside,
        (2, 1): outside,
    }
    cluster = cluster_of(routes, kind=[0, 0, 1], on_host=[True, False], rate=[rate, 1e11])
    cluster = replace(cluster, host=np.zeros(3, dtype=np.int32))
    found = process_cluster(cluster)
    assert found.link_bytes_per_s.tolist() == [given, 1e11]
    assert found.link_latency_s.tolist() == [SOCKET_LATENCY_S, 0.0]
    assert len(set(found.engine.tolist())) == 3


def test_the_pipeline_stays_on_one_host_where_the_network_is_slow() -> None:
    def hosts_used(bytes_per_s: float) -> int:
        inside, outside = [0], [1]
        routes = {
            (i, j): inside if i // 2 == j // 2 else outside for i in range(4) for j in range(4) if i != j
        }
        cluster = cluster_of(routes, kind=[0] * 4, rate=[1e9, bytes_per_s])
        graph = pipeline_steps.layers_graph([Layer(1.0, 2.0, sent=1000, weight=10**6)] * 8)
        seconds = [{"f": 1.0, "b": 2.0}.get(name[0], 0.0) for name in graph.op_name]
        problem = problem_of(graph, cluster, seconds, pipeline="1f1b:8")
        plan = api.plan(problem, algorithm="pipeline", budget="80x").plan
        assert plan is not None
        assert plan.pipeline is not None
        return len(set((plan.pipeline.devices_of(plan.device) // 2).reshape(-1).tolist()))

    assert hosts_used(1e6) == 2
    assert hosts_used(20.0) == 1


# -------------------------------------------------------------------------------------- auto


def chained() -> Problem:
    """Six heavy layers on a fast and two slow devices, as a step of a whole batch."""
    return layers_problem([Layer(8.0, 16.0, sent=1)] * 6, [1.0, 2.0, 2.0], "")


def test_auto_finds_the_pipeline_that_one_pass_cannot_match() -> None:
    placement = api.plan(chained(), pipeline="auto", budget="300x")
    assert placement.plan is not None
    assert placement.plan.pipeline is not None
    assert placement.score_s is not None
    assert placement.score_s < 0.75 * 144.0  # one device
    assert placement.bound_s <= placement.score_s
    names = [member.name for member in placement.members]
    assert names[:2] == ["one pass, op by op", "one pass, one device"]
    assert api.check_plan(placement.problem, placement.plan) == []


def test_an_algorithm_for_steps_alone_may_be_asked_for_pipelines_of_any_number() -> None:
    placement = api.plan(chained(), pipeline="auto", algorithm="pipeline", budget="300x")
    assert placement.plan is not None
    assert placement.plan.pipeline is not None
    assert placement.members[0].name == "one pass, op by op"  # which another algorithm plans


def test_auto_stays_with_one_pass_where_micro_batches_do_not_pay() -> None:
    problem = layers_problem([Layer(1.0, 2.0, sent=10**6, weight=10**6)] * 3, [1.0, 1.0], "")
    placement = api.plan(problem, pipeline="auto", budget="200x")
    assert placement.plan is not None
    assert placement.plan.pipeline is None
    assert placement.score_s == pytest.approx(9.0)


def test_numbers_of_micro_batches_divide_the_batch() -> None:
    assert counts_of(12) == [2, 3, 4, 6, 12]
    assert counts_of(7) == [7]
    assert counts_of(1) == []
    assert all(64 % count == 0 for count in counts_of(64))


def test_a_scaled_micro_batch_keeps_its_weights_and_divides_its_samples() -> None:
    whole = api.problem("gen:transformer:200", "2xA100-80GB")
    part = make_microbatch(whole, 4)
    passes = np.isin(whole.graph.phase, (Phase.FORWARD, Phase.BACKWARD))
    assert part.graph.flops[passes].sum() == pytest.approx(whole.graph.flops[passes].sum() / 4)
    assert (part.graph.resident_bytes == whole.graph.resident_bytes).all()
    updates = whole.graph.phase == Phase.UPDATE
    assert (part.costs.compute_s[updates] == whole.costs.compute_s[updates]).all()
    assert (4 * part.costs.compute_s >= whole.costs.compute_s * (1 - 1e-9)).all()


# ---------------------------------------------------------------------------------- what is wrong


def test_plain_plans_are_not_pipelines_and_the_other_way_round() -> None:
    with pytest.raises(ProblemError, match="single_device makes no steps of micro-batches"):
        api.plan(layers_problem([Layer(1, 1)], [1.0], "1f1b:2"), algorithm="single_device")
    with pytest.raises(ProblemError, match="pipeline makes steps of micro-batches only; ask for some"):
        api.plan(chained(), algorithm="pipeline")
    with pytest.raises(ProblemError, match="did you mean 'interleaved'"):
        layers_problem([Layer(1, 1)], [1.0], "interleave:2")
    with pytest.raises(ProblemError, match="micro-batches"):
        layers_problem([Layer(1, 1)], [1.0], "1f1b:0")
    with pytest.raises(ProblemError, match="no backward op"):
        api.plan("gen:chain:4", pipeline="auto")


def test_a_plan_of_another_step_is_refused() -> None:
    problem = layers_problem([Layer(1, 1)] * 2, [1.0, 1.0], "1f1b:4")
    plan = planned(problem, layer_stages(problem, (0, 1, 2)), [[0, 1]], schedule="gpipe", counts=(4,))
    with pytest.raises(PlanError, match="asks for 1f1b:4, the plan is gpipe:4"):
        api.simulate(problem, plan)
    good = planned(problem, layer_stages(problem, (0, 1, 2)), [[0, 1]], schedule="1f1b", counts=(4,))
    assert good.pipeline is not None
    wrong = replace(good, pipeline=replace(good.pipeline, in_flight=[1, 1]))
    assert "under 1f1b:4 they hold [2, 1]" in api.check_plan(problem, wrong)[0].message
    back = planned(problem, 1 - layer_stages(problem, (0, 1, 2)), [[0, 1]], schedule="1f1b", counts=(4,))
    assert "stages must follow the order of the forward pass" in api.check_plan(problem, back)[0].message


def test_a_saved_step_comes_back(tmp_path: Any) -> None:
    problem = layers_problem([Layer(1.0, 1.0)], [1.0, 3.0], "1f1b:4")
    placement = api.plan(problem, budget="60x")
    api.save(placement, tmp_path / "plan.json")
    again = api.load(tmp_path / "plan.json")
    assert isinstance(again, Placement)
    assert again.digest == placement.digest
    assert again.plan is not None
    assert api.simulate(again.problem, again.plan).step_s == placement.score_s
