"""Steady-state loads by hand and against published values, and what chain and convex splits are."""

from dataclasses import replace
from typing import Any

import pytest

from loadmaster.core.check import check_plan
from loadmaster.core.graph import Phase
from loadmaster.core.problem import Links, Load, Objective, Problem, Split
from loadmaster.graph.build import GraphBuilder
from loadmaster.simulator.events.throughput import Loads, steady_state
from tests import msr_splits
from tests.builders import (
    chain,
    cluster_of,
    diamond,
    graph_of,
    host_cluster,
    loose_ops,
    plan_on,
    problem_of,
    star_cluster,
)
from tests.unit.public_graphs import THROUGHPUT, problem_from, shared, throughput_input

CPU = 2  # device of host_cluster(2)
EXPERTS = [name for name, values in THROUGHPUT.items() if values.expert]


def pipelined(problem: Problem, **fields: object) -> Problem:
    return replace(problem, objective=Objective.THROUGHPUT, **fields)


def host_loads(load: Load = Load.SUM) -> Loads:
    """
    top (acc0) -> left (acc0), right (acc1) -> bottom (CPU); compute 1, 2, 3, 4; a hop takes 10 s.
    acc0 writes top (right reads it) and left (bottom reads it); acc1 reads top, writes right.
    """
    problem = problem_of(diamond(), host_cluster(2), [1, 2, 3, 4], transfer_s=10, links=Links.HOST, load=load)
    return steady_state(pipelined(problem), plan_on([0, 0, 1, CPU]))


class TestHostModel:
    def test_an_accelerator_pays_for_reads_and_writes(self) -> None:
        loads = host_loads()
        assert loads.compute_s.tolist() == [3, 3, 4]
        assert loads.read_s.tolist() == [0, 10, 0]
        assert loads.write_s.tolist() == [20, 10, 0]
        assert loads.load_s.tolist() == [23, 23, 4]
        assert loads.time_s == 23

    def test_compute_beside_transfers(self) -> None:
        loads = host_loads(Load.MAX2)
        assert loads.load_s.tolist() == [20, 20, 4]
        assert loads.time_s == 20

    def test_compute_beside_reads_beside_writes(self) -> None:
        loads = host_loads(Load.MAX3)
        assert loads.load_s.tolist() == [20, 10, 4]
        assert loads.time_s == 20

    def test_a_tensor_is_written_once_and_read_once_per_device(self) -> None:
        builder = GraphBuilder("one to four")
        source = builder.op("source")
        users = [builder.op(f"user{at}") for at in range(4)]
        builder.use(builder.tensor(source, 1), *users)
        problem = problem_of(builder.build(), host_cluster(3, 1), 0.0, transfer_s=10, links=Links.HOST)
        loads = steady_state(pipelined(problem), plan_on([0, 1, 1, 2, 2]))
        assert loads.write_s.tolist() == [10, 0, 0, 0]
        assert loads.read_s.tolist() == [0, 10, 10, 0]

    def test_a_cpu_neither_pays_nor_is_spared_by_the_accelerator(self) -> None:
        problem = problem_of(chain(3), host_cluster(1), 1.0, transfer_s=10, links=Links.HOST)
        loads = steady_state(pipelined(problem), plan_on([1, 0, 1]))
        assert loads.load_s.tolist() == [1 + 10 + 10, 2]

    def test_a_hop_without_a_given_time_follows_the_route_to_the_host(self) -> None:
        problem = problem_of(chain(2, num_bytes=6), host_cluster(2, rate=2.0), 0.0, links=Links.HOST)
        loads = steady_state(pipelined(problem), plan_on([0, 1]))
        assert (loads.write_s[0], loads.read_s[1]) == (3, 3)

    def test_logical_devices_of_one_chip_share_its_time(self) -> None:
        routes = {(i, j): [0] for i in range(2) for j in range(2) if i != j}
        cluster = cluster_of(routes, kind=[0, 0], engine=[5, 5], on_host=(True,))
        problem = pipelined(problem_of(loose_ops(2), cluster, [3, 4], links=Links.HOST))
        assert steady_state(problem, plan_on([0, 1])).time_s == 7


class TestLinkModels:
    """Devices and links are resources of their own; the busiest of all counts."""

    def test_a_shared_link_adds_up_what_crosses_it(self) -> None:
        """Two devices feed a third over one link: 4 + 4 seconds, though no device computes over 3."""
        builder = GraphBuilder("two to one")
        makers = [builder.op("a"), builder.op("b")]
        user = builder.op("c")
        for maker in makers:
            builder.use(builder.tensor(maker, 4), user)
        routes = {(i, j): [0 if j == 2 else 1] for i in range(3) for j in range(3) if i != j}
        problem = pipelined(problem_of(builder.build(), cluster_of(routes, kind=[0] * 3), [1, 2, 3]))
        plan = plan_on([0, 1, 2])
        assert steady_state(problem, plan).time_s == 8
        assert steady_state(replace(problem, links=Links.PARALLEL), plan).time_s == 3
        assert steady_state(replace(problem, links=Links.HALF_DUPLEX), plan).time_s == 8

    def test_half_duplex_adds_in_and_out(self) -> None:
        problem = pipelined(problem_of(chain(3, num_bytes=2), star_cluster(3), 1.0))
        plan = plan_on([0, 1, 2])
        assert steady_state(problem, plan).time_s == 2  # each port carries one tensor of 2 s
        assert steady_state(replace(problem, links=Links.HALF_DUPLEX), plan).time_s == 4


class TestPublishedLoads:
    @pytest.mark.parametrize("name", EXPERTS)
    def test_the_experts_split_has_its_published_load(self, name: str) -> None:
        """The ResNet-50 training expert is the inference split extended by colour."""
        work = throughput_input(name)
        stem = name.partition("/")[2]
        split = "resnet50_inference" if stem == "resnet50_training" else stem
        ids = msr_splits.ids_in_op_order(shared("throughput-inputs", f"{name}.json"))
        device = msr_splits.read_split(shared("human-experts", f"{split}_expert.json"), work, ids=ids)
        load = steady_state(problem_from(work), plan_on(device.tolist())).time_s
        assert f"{load:.6g}" == THROUGHPUT[name].expert

    @pytest.mark.parametrize("name", THROUGHPUT)
    def test_one_accelerator_has_its_published_load(self, name: str) -> None:
        work = throughput_input(name)
        loads = steady_state(problem_from(work), plan_on([0] * work.graph.num_ops))
        assert float(f"{loads.time_s:.6g}") == float(THROUGHPUT[name].one_accelerator)
        assert loads.read_s.sum() == loads.write_s.sum() == 0

    def test_the_published_optimum_beats_the_expert_and_one_accelerator(self) -> None:
        """Guards the table against slips of the pen."""
        for values in THROUGHPUT.values():
            assert float(values.work_bound) < values.chain < float(values.one_accelerator)
            assert not values.expert or values.chain < float(values.expert)


def crossed(split: Split) -> Problem:
    """a -> d and c -> b: with {a, b} and {c, d} each set is convex, and they feed each other."""
    builder = GraphBuilder("crossed")
    a, c, b, d = (builder.op(name) for name in "acbd")
    builder.use(builder.tensor(a, 1), d)
    builder.use(builder.tensor(c, 1), b)
    return pipelined(problem_of(builder.build(), star_cluster(2), 1.0, split=split))


class TestSplits:
    def test_sets_that_feed_each_other_are_convex_but_no_chain(self) -> None:
        plan = plan_on([0, 1, 0, 1])  # a, c, b, d
        found = check_plan(crossed(Split.CHAIN), plan)
        assert [v.rule for v in found] == ["chain"]
        assert "ref0, ref1 feed each other in a cycle" in found[0].message
        assert check_plan(crossed(Split.CONVEX), plan) == []
        assert check_plan(crossed(Split.FREE), plan) == []

    def test_a_path_that_leaves_and_returns_is_neither(self) -> None:
        plan = plan_on([0, 1, 0])
        for split, rules in ((Split.CHAIN, ["chain"]), (Split.CONVEX, ["convex"]), (Split.FREE, [])):
            problem = pipelined(problem_of(chain(3), star_cluster(2), 1.0, split=split))
            assert [v.rule for v in check_plan(problem, plan)] == rules

    def test_a_long_way_round_is_found(self) -> None:
        """Out of the set, through two others, and back."""
        problem = pipelined(problem_of(chain(5), star_cluster(3), 1.0, split=Split.CONVEX))
        found = check_plan(problem, plan_on([0, 1, 1, 2, 0]))
        assert [v.rule for v in found] == ["convex"]
        assert "leaves ref0 and returns at op 'op4'" in found[0].message

    def test_stages_may_stand_in_any_order_and_be_empty(self) -> None:
        problem = pipelined(problem_of(chain(4), star_cluster(4), 1.0, split=Split.CHAIN))
        assert check_plan(problem, plan_on([3, 3, 0, 0])) == []

    def test_a_split_does_not_concern_a_step(self) -> None:
        problem = problem_of(chain(3), star_cluster(2), 1.0, split=Split.CHAIN)
        assert check_plan(problem, plan_on([0, 1, 0])) == []

    def test_backward_edges_may_run_against_the_chain(self) -> None:
        """f0 -> f1 -> b1 -> b0: there and back again, as every training step does."""
        forward: list[dict[str, Any]] = [{"group": 0, "makes": [1]}, {"group": 1, "makes": [1], "uses": [0]}]
        backward: list[dict[str, Any]] = [{"group": 1, "makes": [1], "uses": [1]}, {"group": 0, "uses": [2]}]
        ops = forward + [op | {"phase": Phase.BACKWARD} for op in backward]
        for split in (Split.CHAIN, Split.CONVEX):
            problem = pipelined(problem_of(graph_of(*ops), star_cluster(2), 1.0, split=split))
            assert check_plan(problem, plan_on([0, 1, 1, 0])) == []
