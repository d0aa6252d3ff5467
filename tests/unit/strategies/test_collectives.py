"""Collectives: bytes by the closed forms, seconds from the links used."""

import numpy as np
import pytest

from loadmaster.cluster.parse import parse_cluster
from loadmaster.core.errors import PlanError
from loadmaster.strategies.lowering.collectives import (
    Wires,
    cheapest_sum,
    gather,
    ring_sum,
    tree_sum,
    two_level_sum,
)
from tests.builders import cluster_of, star_cluster

MIB = 2**20


def star(num: int, *, rate: float = 1.0, latency: float = 0.0) -> Wires:
    return Wires.of(star_cluster(num, rate=rate, latency=latency))


@pytest.mark.parametrize("num", [2, 3, 4, 8])
def test_a_ring_takes_what_the_closed_form_says(num: int) -> None:
    wires = star(num, rate=1e9, latency=1e-3)
    schedule = ring_sum(wires, range(num), 8 * MIB)
    assert wires.seconds(schedule) == pytest.approx(2 * (num - 1) * (1e-3 + 8 * MIB / num / 1e9), rel=1e-6)
    assert max(wires.link_bytes(schedule).values()) == np.ceil(2 * (num - 1) * 8 * MIB / num)


def test_latency_and_bandwidth_are_independent() -> None:
    fast, slow, late = (star(4, rate=r, latency=a) for r, a in ((2e9, 1e-3), (1e9, 1e-3), (2e9, 2e-3)))
    base, by_rate, by_latency = (w.seconds(ring_sum(w, range(4), 64 * MIB)) for w in (fast, slow, late))
    assert by_rate - base == pytest.approx(1.5 * 64 * MIB * (1 / 1e9 - 1 / 2e9), rel=1e-6)
    assert by_latency - base == pytest.approx(6 * 1e-3, rel=1e-6)


def test_small_sums_go_up_a_tree_and_large_ones_round_a_ring() -> None:
    wires = star(16, rate=1e9, latency=1e-3)
    assert cheapest_sum(wires, range(16), 64).name == "tree"
    assert cheapest_sum(wires, range(16), 512 * MIB).name == "ring"


def test_a_tree_reaches_every_device_whatever_their_number() -> None:
    for num in range(2, 9):
        rounds = tree_sum(star(num), range(num), 10).rounds
        up = [edge for step in rounds[: len(rounds) // 2] for edge in step.edges]
        assert sorted({a for a, _, _ in up} | {0}) == list(range(num))
        assert len(up) == num - 1


def test_hosts_with_several_devices_sum_inside_first() -> None:
    cluster = parse_cluster("8xV100-16GB | 8xV100-16GB ; inter=10gbit")
    wires = Wires.of(cluster)
    two = two_level_sum(wires, range(16), 64 * MIB)
    assert two is not None
    nic = [link for link, name in enumerate(cluster.link_name) if "net" in name]
    ring = wires.link_bytes(ring_sum(wires, range(16), 64 * MIB))
    assert max(wires.link_bytes(two).get(link, 0) for link in nic) < max(ring.get(link, 0) for link in nic)
    assert cheapest_sum(wires, range(16), 64 * MIB).name == "two-level"
    assert two_level_sum(star(4), range(4), 64) is None


def test_a_ring_leaves_each_host_once_whatever_the_order_of_devices() -> None:
    cluster = parse_cluster("2xV100-16GB | 2xV100-16GB ; inter=10gbit")
    wires = Wires.of(cluster)
    orders = [wires.link_bytes(ring_sum(wires, order, 64)) for order in ((0, 1, 2, 3), (0, 2, 1, 3))]
    assert orders[0] == orders[1]


def test_an_uneven_gather_sends_each_part_once_to_everyone_else() -> None:
    wires = star(3)
    schedule = gather(wires, (2, 0, 1), (30, 10, 20))  # parts go with the devices as they are named
    assert {(a, b): n for a, b, n in schedule.rounds[0].edges} == {(0, 1): 40, (1, 2): 30, (2, 0): 50}


def test_edges_that_share_a_link_wait_for_each_other() -> None:
    shared = cluster_of(
        {(0, 1): [0], (1, 0): [1], (0, 2): [0], (2, 0): [1], (1, 2): [0], (2, 1): [1]}, kind=[0] * 3
    )
    wires = Wires.of(shared)
    schedule = ring_sum(wires, range(3), 300)
    assert wires.seconds(schedule) == 2 * 400  # 0 to 1 and 1 to 2 over link 0, one after the other


def test_a_collective_needs_two_devices() -> None:
    with pytest.raises(PlanError, match="two or more"):
        cheapest_sum(star(3), (1,), 10)
