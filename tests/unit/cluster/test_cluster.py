"""Clusters as they are written: shorthand, TOML, links, routes, and what is refused."""

import contextlib
import itertools
import random
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.cluster.parse import parse_cluster, with_reserve
from loadmaster.cluster.presets import KINDS
from loadmaster.cluster.probe import local_devices
from loadmaster.cluster.topology import DeviceSpec, LinkSpec, add_default_links, assemble_cluster
from loadmaster.core.cluster import NO_LINK, Cluster, star
from loadmaster.core.errors import (
    ClusterError,
    FileError,
    FormatError,
    InputError,
    SchemaError,
    UnknownNameError,
)
from loadmaster.core.io import save
from tests.builders import two_ops


def path_of(cluster: Cluster, source: str, target: str) -> list[str]:
    """The names of the links of a route."""
    i, j = cluster.device_name.index(source), cluster.device_name.index(target)
    return [cluster.link_name[link] for link in cluster.route[i, j] if link != NO_LINK]


def from_toml(folder: Path, text: str) -> Cluster:
    path = folder / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    return parse_cluster(path)


# ---- shorthand


def test_unequal_devices_keep_their_kind_memory_and_order() -> None:
    cluster = parse_cluster("2xA100-80GB, 1xV100-16GB, cpu-64GB")
    assert cluster.device_name == ("gpu0", "gpu1", "gpu2", "cpu0")
    assert cluster.kind_name == ("A100-80GB", "V100", "cpu16")
    assert cluster.kind.tolist() == [0, 0, 1, 2]
    assert cluster.memory_bytes.tolist() == [80 * 10**9, 80 * 10**9, 16 * 10**9, 64 * 10**9]
    assert cluster.engine.tolist() == [0, 1, 2, 3]
    assert cluster.on_host.tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("text", "kind", "memory_bytes"),
    [
        ("V100", "V100", 16 * 10**9),
        ("V100-32GB", "V100", 32 * 10**9),
        ("RTX 3090", "RTX3090", 24 * 10**9),
        ("A100", "A100-40GB", 40 * 10**9),
        ("A100-80GB", "A100-80GB", 80 * 10**9),
        ("A100-80GB-20GB", "A100-80GB", 20 * 10**9),
        ("cpu-512MiB", "cpu16", 512 * 2**20),
        ("cpu64-1.5TB", "cpu64", 1_500 * 10**9),
        ("ref", "ref", 16 * 10**9),
        ("1 x T4-8G", "T4", 8 * 10**9),
    ],
)
def test_a_device_is_a_kind_and_a_memory(text: str, kind: str, memory_bytes: int) -> None:
    cluster = parse_cluster(text)
    assert cluster.kind_name == (kind,)
    assert cluster.memory_bytes.tolist() == [memory_bytes]


def test_names_are_counted_over_the_whole_cluster() -> None:
    cluster = parse_cluster("2xV100, cpu | T4, cpu, ref")
    assert cluster.device_name == ("gpu0", "gpu1", "cpu0", "gpu2", "cpu1", "ref0")
    assert cluster.host.tolist() == [0, 0, 0, 1, 1, 1]


def test_a_repetition_is_that_many_hosts() -> None:
    cluster = parse_cluster("2*(4xV100, cpu) | 2*(T4 | L4)")
    assert cluster.host.tolist() == [0] * 5 + [1] * 5 + [2, 3, 4, 5]
    assert [cluster.kind_name[kind] for kind in cluster.kind[10:]] == ["T4", "L4", "T4", "L4"]


def test_a_cluster_is_itself_and_a_single_device_has_no_links() -> None:
    cluster = parse_cluster("cpu")
    assert cluster.device_name == ("cpu0",)
    assert cluster.num_links == 0
    assert parse_cluster(cluster) is cluster


def test_logical_devices_share_an_engine_a_bus_and_nothing_else() -> None:
    cluster = parse_cluster("cpu#0-64MB, cpu#1-64MB, V100#0-8GB, V100#1-4GB, V100")
    assert cluster.device_name == ("cpu#0", "cpu#1", "V100#0", "V100#1", "gpu0")
    assert cluster.engine.tolist() == [0, 0, 1, 1, 2]
    assert cluster.memory_bytes.tolist() == [64 * 10**6] * 2 + [8 * 10**9, 4 * 10**9, 16 * 10**9]
    assert path_of(cluster, "cpu#0", "cpu#1") == ["ram host0"]
    assert path_of(cluster, "V100#0", "cpu#0") == path_of(cluster, "V100#1", "cpu#1")
    assert len(path_of(cluster, "V100#0", "cpu#0")) == 1
    inside = cluster.link_bytes_per_s[cluster.link_name.index(path_of(cluster, "V100#0", "V100#1")[0])]
    assert inside == 450e9  # half of 900 GB/s: a copy reads and writes


def test_logical_devices_of_two_hosts_have_names_and_engines_of_their_own() -> None:
    cluster = parse_cluster("2*(cpu#0-1GB, cpu#1-1GB)")
    assert cluster.device_name == ("cpu#0", "cpu#1", "host1/cpu#0", "host1/cpu#1")
    assert cluster.engine.tolist() == [0, 0, 1, 1]


def test_a_reserve_is_kept_free_on_every_device() -> None:
    cluster = parse_cluster("V100, cpu", reserve_bytes=10**9)
    assert cluster.usable_bytes.tolist() == [15 * 10**9, 63 * 10**9]
    more = with_reserve(cluster, 2 * 10**9)
    assert more.reserve_bytes.tolist() == [2 * 10**9] * 2
    assert cluster.reserve_bytes.tolist() == [10**9] * 2  # the first is untouched
    assert with_reserve(more, 1).reserve_bytes.tolist() == [2 * 10**9] * 2  # never less than before


# ---- links and routes


def test_gpus_of_a_host_meet_over_two_buses_and_reach_the_cpu_over_one() -> None:
    cluster = parse_cluster("2xV100, cpu")
    assert path_of(cluster, "gpu0", "gpu1") == ["pcie3 gpu0->host0", "pcie3 host0->gpu1"]
    assert path_of(cluster, "gpu0", "cpu0") == ["pcie3 gpu0->host0"]
    assert path_of(cluster, "cpu0", "gpu1") == ["pcie3 host0->gpu1"]


def test_both_directions_of_a_bus_are_links_of_their_own() -> None:
    cluster = parse_cluster("2xV100")
    assert not set(path_of(cluster, "gpu0", "gpu1")) & set(path_of(cluster, "gpu1", "gpu0"))


def test_nvlink_joins_gpus_and_leaves_the_cpu_on_pcie() -> None:
    cluster = parse_cluster("3xA100-80GB, cpu ; intra=nvlink3")
    assert path_of(cluster, "gpu0", "gpu2") == ["nvlink3 gpu0->gpu2"]
    assert path_of(cluster, "gpu0", "cpu0") == ["pcie4 gpu0->host0"]
    link = cluster.link_name.index("nvlink3 gpu0->gpu2")
    assert cluster.link_bytes_per_s[link] == 300e9


def test_a_bus_can_be_replaced() -> None:
    assert path_of(parse_cluster("T4, cpu ; intra=pcie5"), "gpu0", "cpu0") == ["pcie5 gpu0->host0"]


def test_every_host_has_one_nic_that_its_devices_share() -> None:
    cluster = parse_cluster("2xV100 | 2xV100, cpu ; inter=100gbit")
    route = path_of(cluster, "gpu0", "gpu2")
    assert route == ["pcie3 gpu0->host0", "100gbit host0->net", "100gbit net->host1", "pcie3 host1->gpu2"]
    assert set(route) & set(path_of(cluster, "gpu1", "gpu3")) == {"100gbit host0->net", "100gbit net->host1"}
    assert "25gbit host0->net" in path_of(parse_cluster("V100 | V100"), "gpu0", "gpu1")


def test_a_route_through_nvlink_does_not_pass_through_a_device() -> None:
    cluster = parse_cluster("V100, V100 | V100 ; intra=nvlink ; inter=400g")
    assert path_of(cluster, "gpu0", "gpu2")[0] == "pcie3 gpu0->host0"


@pytest.mark.parametrize("text", ["5xV100 ; intra=ramp", "2*(2xV100, cpu) ; intra=ramp ; inter=ramp"])
def test_ramp_gives_every_pair_a_circuit_that_no_other_pair_uses(text: str) -> None:
    cluster = parse_cluster(text)
    num = cluster.num_devices
    assert cluster.route.shape == (num, num, 1)
    used = [int(cluster.route[i, j, 0]) for i, j in itertools.permutations(range(num), 2)]
    assert len(set(used)) == num * (num - 1) == cluster.num_links
    assert set(cluster.link_bytes_per_s) == {4e11}
    assert set(cluster.link_latency_s) == {250e-9}


def test_ramp_between_hosts_leaves_the_inside_of_a_host_alone() -> None:
    cluster = parse_cluster("2xV100 | V100 ; inter=ramp")
    assert path_of(cluster, "gpu0", "gpu2") == ["ramp gpu0->gpu2"]
    assert path_of(cluster, "gpu0", "gpu1") == ["pcie3 gpu0->host0", "pcie3 host0->gpu1"]


@pytest.mark.parametrize(
    "text", ["64*(8xV100) ; intra=nvlink2", "512*(T4)", "64*(8xA100) ; intra=ramp ; inter=ramp"]
)
def test_512_devices_all_reach_each_other(text: str) -> None:
    cluster = parse_cluster(text)
    assert cluster.num_devices == 512
    reached = (cluster.route != NO_LINK).any(axis=2)
    assert (reached | np.eye(512, dtype=bool)).all()


def test_the_same_text_gives_the_same_cluster() -> None:
    text = "3*(2xV100, cpu#0-1GB, cpu#1-1GB) ; intra=nvlink2"
    assert parse_cluster(text).digest == parse_cluster(text).digest


def test_routes_cost_what_networkx_finds_on_random_topologies() -> None:
    rng = random.Random(7)
    for _ in range(20):
        devices = [DeviceSpec(f"d{i}", "ref", f"h{i % 3}", 1) for i in range(6)]
        middle = ["h0", "h1", "h2", "s0", "s1", "s2", "net"]
        links = [
            LinkSpec(d.name, rng.choice(middle), rng.uniform(1e8, 1e10), rng.random() * 1e-4) for d in devices
        ]
        links += [
            LinkSpec(a, b, rng.uniform(1e8, 1e10), rng.random() * 1e-4)
            for a, b in itertools.combinations([*middle, *(d.name for d in devices)], 2)
            if rng.random() < 0.4 or middle[-1] in (a, b)
        ]
        cluster = assemble_cluster("random", devices, KINDS, links, switches=middle)
        cost = cluster.link_latency_s + 2**20 / cluster.link_bytes_per_s
        for a, b in itertools.permutations(range(6), 2):
            ends = {f"d{a}", f"d{b}"}
            graph = nx.Graph()  # the other devices are left out: no route passes through them
            for link in links:
                if {e for e in (link.a, link.b) if e.startswith("d")} <= ends:
                    weight = link.latency_s + 2**20 / link.bytes_per_s
                    if weight < graph.get_edge_data(link.a, link.b, {"weight": np.inf})["weight"]:
                        graph.add_edge(link.a, link.b, weight=weight)
            route = [link for link in cluster.route[a, b] if link != NO_LINK]
            assert cost[route].sum() == pytest.approx(nx.dijkstra_path_length(graph, f"d{a}", f"d{b}"))
            stops = [cluster.link_name[link].split("->") for link in route]
            assert [stops[0][0], stops[-1][1]] == [f"d{a}", f"d{b}"]
            assert all(left[1] == right[0] for left, right in itertools.pairwise(stops))


def test_of_parallel_links_the_faster_is_taken() -> None:
    devices = [DeviceSpec("a", "ref", "h", 1), DeviceSpec("b", "ref", "h", 1)]
    links = [LinkSpec("a", "b", 1e9, 0.0, "slow"), LinkSpec("b", "a", 2e9, 0.0, "fast")]
    assert path_of(assemble_cluster("pair", devices, KINDS, links), "a", "b") == ["fast a->b"]


def test_default_links_add_to_the_given_ones_without_touching_them() -> None:
    devices = [DeviceSpec("a", "V100", "h", 1), DeviceSpec("b", "V100", "h", 1)]
    given = [LinkSpec("a", "b", 5e9, 0.0)]
    links = add_default_links(devices, KINDS, given)
    assert links[0] is given[0]
    assert given == [LinkSpec("a", "b", 5e9, 0.0)]
    assert {(link.a, link.b) for link in links} == {("a", "b"), ("a", "h"), ("b", "h")}


# ---- TOML and files

SWITCHED = """
name = "switched"
[[host]]
name = "box0"
devices = "2xV100, cpu"
[[switch]]
name = "plx0"
[[link]]
between = ["gpu0", "plx0"]
preset = "pcie3"
[[link]]
between = ["gpu1", "plx0"]
preset = "pcie3"
[[link]]
between = ["plx0", "box0"]
rate = "16GB/s"
latency = "5us"
name = "uplink"
"""


def test_two_gpus_behind_one_switch_share_its_uplink(tmp_path: Path) -> None:
    cluster = from_toml(tmp_path, SWITCHED)
    first, second = path_of(cluster, "gpu0", "cpu0"), path_of(cluster, "gpu1", "cpu0")
    assert first == ["pcie3 gpu0->plx0", "uplink plx0->box0"]
    assert set(first) & set(second) == {"uplink plx0->box0"}
    gpu0, gpu1, cpu0 = (cluster.device_name.index(name) for name in ("gpu0", "gpu1", "cpu0"))
    assert cluster.route[gpu0, cpu0, 1] == cluster.route[gpu1, cpu0, 1]
    # without the switch nothing is shared, and between the two the uplink is not needed
    plain = parse_cluster("2xV100, cpu")
    assert not set(path_of(plain, "gpu0", "cpu0")) & set(path_of(plain, "gpu1", "cpu0"))
    assert path_of(cluster, "gpu0", "gpu1") == ["pcie3 gpu0->plx0", "pcie3 plx0->gpu1"]


def test_a_switch_inside_a_host_leaves_the_host_its_nic(tmp_path: Path) -> None:
    cluster = from_toml(tmp_path, SWITCHED + '[[host]]\nname = "box1"\ndevices = "V100"\n')
    assert path_of(cluster, "gpu0", "gpu2")[:3] == [
        "pcie3 gpu0->plx0",
        "uplink plx0->box0",
        "25gbit box0->net",
    ]


def test_hosts_joined_by_a_cable_get_no_nic(tmp_path: Path) -> None:
    text = """
    [[host]]
    name = "a"
    devices = "V100"
    [[host]]
    name = "b"
    devices = "V100"
    [[link]]
    between = ["a", "b"]
    rate = "100Gbit"
    name = "cable"
    """
    cluster = from_toml(tmp_path, text)
    assert path_of(cluster, "gpu0", "gpu1") == ["pcie3 gpu0->a", "cable a->b", "pcie3 b->gpu1"]
    assert not any("net" in name for name in cluster.link_name)
    assert cluster.link_bytes_per_s[cluster.link_name.index("cable a->b")] == 12.5e9
    assert cluster.link_latency_s[cluster.link_name.index("cable a->b")] == 5e-6


def test_a_link_between_two_devices_leaves_them_their_buses(tmp_path: Path) -> None:
    text = LINK.replace("2xV100", "2xV100, cpu") + 'between = ["gpu0", "gpu1"]\npreset = "nvlink2"\n'
    cluster = from_toml(tmp_path, text)
    assert path_of(cluster, "gpu0", "gpu1") == ["nvlink2 gpu0->gpu1"]
    assert path_of(cluster, "gpu0", "cpu0") == ["pcie3 gpu0->h"]


def test_every_field_of_the_toml_arrives(tmp_path: Path) -> None:
    text = """
    name = "lab"
    inter = "10g"
    [kind.mychip]
    flops = { float32 = "19.5T", bfloat16 = "312T" }
    memory = "40GB"
    memory_rate = "1.5TB/s"
    overhead = "7us"
    [kind.mycpu]
    flops = 1e12
    memory = 1000
    memory_rate = "1GB/s"
    host = true
    [[host]]
    name = "box0"
    devices = "2xmychip, mycpu-2kB"
    intra = "nvlink4"
    [[device]]
    name = "big"
    kind = "H100"
    host = "box1"
    memory = "70GB"
    reserve = "1GiB"
    engine = "chip0"
    [[device]]
    name = "twin"
    kind = "V100-32GB"
    host = "box1"
    count = 2
    [[device]]
    kind = "T4"
    host = "box1"
    """
    cluster = from_toml(tmp_path, text)
    assert cluster.name == "lab"
    assert cluster.device_name == ("gpu0", "gpu1", "cpu0", "big", "twin0", "twin1", "gpu2")
    assert cluster.kind_name == ("mychip", "mycpu", "H100", "V100", "T4")
    assert cluster.memory_bytes.tolist() == [
        40 * 10**9, 40 * 10**9, 2000, 70 * 10**9, 32 * 10**9, 32 * 10**9, 16 * 10**9,
    ]  # fmt: skip
    assert cluster.reserve_bytes.tolist() == [0, 0, 0, 2**30, 0, 0, 0]
    assert cluster.host.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert cluster.flops_per_s[0, :3].tolist() == [19.5e12, 19.5e12, 312e12]  # float32, float16, bfloat16
    assert cluster.memory_bytes_per_s[:2].tolist() == [1.5e12, 1e9]
    assert cluster.overhead_s[:3].tolist() == [7e-6, 1e-6, 5e-6]
    assert cluster.on_host.tolist() == [False, True, False, False, False]
    assert path_of(cluster, "gpu0", "gpu1") == ["nvlink4 gpu0->gpu1"]
    assert "10gbit box0->net" in path_of(cluster, "cpu0", "big")


def test_devices_with_one_engine_label_share_an_engine_within_their_host(tmp_path: Path) -> None:
    device = '[[device]]\nkind = "V100"\nengine = "chip0"\nmemory = "8GB"\nhost = "{}"\ncount = {}\n'
    cluster = from_toml(tmp_path, device.format("a", 2) + device.format("b", 1))
    assert cluster.engine.tolist() == [0, 0, 1]


def test_a_saved_cluster_is_read_back(tmp_path: Path) -> None:
    cluster = parse_cluster("2xV100, cpu")
    for name in ("lab.json", "lab.json.gz"):
        save(cluster, tmp_path / name)
        assert parse_cluster(str(tmp_path / name)).digest == cluster.digest


# ---- refusals


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the cluster is empty"),
        ("   ; intra=nvlink", "the cluster is empty"),
        ("0xV100", "zero devices"),
        ("99999xV100", "too many devices"),
        ("9" * 6000 + "xV100", "too many devices"),
        ("0*(V100)", "zero hosts"),
        ("2*(V100", "is not a host"),
        ("2*(2*(V100))", "is not a host"),
        ("V100)", "is not a host"),
        ("2xV100,, cpu", "empty entry"),
        ("V100 | ", "empty entry"),
        ("V100-0GB", "memory is 0"),
        ("V100-32", "'32' is not a memory size"),
        ("V100#0-8", "'8' is not a memory size"),
        ("V100#x-8GB", "logical devices are numbered"),
        ("2xcpu#0-1GB", "a logical device is one"),
        ("cpu#0-1GB, cpu#0-1GB", "duplicate device 'cpu#0'"),
        ("V100 ; fast", "is not 'key=value'"),
        ("V100 ; intra=", "is not 'key=value'"),
        ("V100 ; intra=nvlink ; intra=nvlink", "given twice"),
        ("2048xV100, V100", "at most 2048"),
        ("1500*(2xV100)", "at most 2048"),
    ],
)
def test_a_bad_shorthand_is_refused_with_its_reason(text: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        parse_cluster(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2xV10O", "unknown device kind 'V10O'; did you mean 'V100'"),
        ("A1000-80GB", "unknown device kind 'A1000'; did you mean 'A100-"),
        ("V100 ; intra=nvlinkk", "unknown link 'nvlinkk'; did you mean 'nvlink"),
        ("V100 ; inter=1parsec", "unknown link '1parsec'; known"),
        ("V100 ; intar=nvlink", "unknown cluster option 'intar'; did you mean 'intra'"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(text: str, message: str) -> None:
    with pytest.raises(UnknownNameError, match=message):
        parse_cluster(text)


@pytest.mark.parametrize("reserve_bytes", [16 * 10**9, -1])
def test_a_reserve_that_leaves_nothing_or_is_negative_is_refused(reserve_bytes: int) -> None:
    with pytest.raises(ClusterError, match="reserve"):
        parse_cluster("V100", reserve_bytes=reserve_bytes)


LINK = '[[host]]\nname = "h"\ndevices = "2xV100"\n[[link]]\n'
KIND = '[[device]]\nkind = "k"\n[kind.k]\n'
DEVICE = '[[device]]\nkind = "V100"\n'


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("", ClusterError, "zero devices"),
        ("name = ", FormatError, "not a cluster in TOML"),
        ("a = " + "[" * 5000, FormatError, "not a cluster in TOML"),
        ("colour = 1", FormatError, "colour"),
        ("name = 3", FormatError, r"Expected `str`.*\$\.name"),
        ("[[device]]\nname = 'a'", FormatError, "kind"),
        (DEVICE + "memory = true", FormatError, "memory"),
        (DEVICE + "memory = '0GB'", ClusterError, "memory is 0"),
        (DEVICE + "memory = -5", ClusterError, "memory"),
        (DEVICE + "memory = 'much'", ClusterError, "'much' is not a size"),
        (DEVICE + "reserve = '16GB'", ClusterError, "reserve"),
        (DEVICE + "count = 0", ClusterError, "count is 0"),
        (DEVICE + "count = 2000\n" + DEVICE + "count = 2000", ClusterError, "at most 2048"),
        (DEVICE + "name = 'a'\n" + DEVICE + "name = 'a'", ClusterError, "duplicate device 'a'"),
        (DEVICE + "host = 'net'", ClusterError, "rename"),
        (DEVICE + "name = 'x'\nhost = 'x'", ClusterError, "names a device and a host"),
        (DEVICE + "[[host]]\nname='a'\n[[host]]\nname='b'", ClusterError, "names no host and there are 2"),
        (DEVICE + "[[host]]\nname='a'\n[[host]]\nname='a'", ClusterError, "duplicate host or switch 'a'"),
        ("[[device]]\nkind = 'V10O'", UnknownNameError, "did you mean 'V100'"),
        (
            LINK + "between = ['gpu0', 'gpu7']\npreset = 'pcie3'",
            ClusterError,
            "link to unknown device 'gpu7'",
        ),
        (LINK + "between = ['gpu0', 'gpu0']\npreset = 'pcie3'", ClusterError, "to itself"),
        (LINK + "between = ['gpu0', 'gpu1']", ClusterError, "has no rate"),
        (LINK + "between = ['gpu0']\npreset = 'pcie3'", FormatError, "between"),
        (LINK + "between = ['gpu0', 'gpu1']\npreset = 'warp'", UnknownNameError, "unknown link 'warp'"),
        (LINK + "between = ['gpu0', 'gpu1']\nrate = 0", ClusterError, "rate is 0"),
        (LINK + "between = ['gpu0', 'gpu1']\nrate = 1\nlatency = nan", ClusterError, "latency"),
        (LINK + "between = ['gpu0', 'gpu1']\nrate = 1\nlatency = -1", ClusterError, "latency"),
        (LINK + "between = ['gpu0', 'h']\nrate = 1\ninter = '25g'", FormatError, "inter"),
        (KIND + "memory = 1\nmemory_rate = 1", FormatError, "flops"),
        (KIND + "flops = inf\nmemory = 1\nmemory_rate = 1", ClusterError, "flops"),
        (KIND + "flops = 0\nmemory = 1\nmemory_rate = 1", ClusterError, "flops of float32 is 0"),
        (KIND + "flops = {float16 = 1}\nmemory = 1\nmemory_rate = 1", ClusterError, "no float32 rate"),
        (
            KIND + "flops = {float23 = 1}\nmemory = 1\nmemory_rate = 1",
            UnknownNameError,
            "did you mean 'float",
        ),
        (KIND + "flops = 1\nmemory = 1\nmemory_rate = 1\nbus = 'x'", UnknownNameError, "unknown link"),
    ],
)
def test_a_bad_toml_file_is_refused_with_its_reason(
    tmp_path: Path, text: str, error: type[InputError], message: str
) -> None:
    with pytest.raises(error, match=message) as raised:
        from_toml(tmp_path, text)
    assert "cluster.toml" in str(raised.value) or "cluster 'cluster'" in str(raised.value)


def test_an_unreachable_pair_is_named(tmp_path: Path) -> None:
    text = '[[switch]]\nname = "lonely"\n' + LINK + 'between = ["gpu0", "lonely"]\npreset = "pcie3"\n'
    with pytest.raises(ClusterError, match="no route from device 'gpu0' to 'gpu1'; add a link"):
        from_toml(tmp_path, text)


def test_a_link_to_an_unknown_device_is_answered_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="link to unknown device 'gppu1'; did you mean 'gpu1'"):
        from_toml(tmp_path, LINK + "between = ['gpu0', 'gppu1']\npreset = 'pcie3'")


@given(st.text(alphabet="0123456789xX*()|,;=-# .GMBVTcpuA\n\0é", max_size=40))
def test_any_text_is_a_cluster_or_a_clear_refusal(text: str) -> None:
    with contextlib.suppress(InputError):  # any other error fails the test
        assert parse_cluster(text).num_devices >= 1


def test_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot read"):
        parse_cluster("nowhere.toml")
    with pytest.raises(FileError, match="cannot read"):
        parse_cluster(tmp_path)
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(FormatError, match="not a cluster in TOML"):
        parse_cluster(tmp_path / "bytes.toml")
    with pytest.raises(FileError, match="the limit is"):
        parse_cluster(tmp_path / "bytes.toml", max_bytes=1)
    save(two_ops(), tmp_path / "graph.json")
    with pytest.raises(SchemaError, match="holds a graph; a cluster is needed"):
        parse_cluster(tmp_path / "graph.json")


def test_a_file_beside_you_does_not_hide_a_shorthand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu").write_text("junk", encoding="utf-8")
    (tmp_path / "lab.cluster").write_text("[[device]]\nkind = 'T4'\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert parse_cluster("cpu").device_name == ("cpu0",)
    assert parse_cluster("lab.cluster").kind_name == ("T4",)


def test_what_is_no_cluster_at_all_is_refused() -> None:
    with pytest.raises(ClusterError, match="is not a cluster"):
        parse_cluster(5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "link",
    [
        LinkSpec("a", "h", 0.0, 0.0),
        LinkSpec("a", "h", float("nan"), 0.0),
        LinkSpec("a", "h", 1.0, float("inf")),
        LinkSpec("a", "h", float("inf"), 1.0),
        LinkSpec("h", "h", float("inf"), 0.0),
    ],
)
def test_a_link_without_a_usable_rate_or_latency_is_refused(link: LinkSpec) -> None:
    with pytest.raises(ClusterError, match="it needs a rate above 0"):
        assemble_cluster("bad", [DeviceSpec("a", "ref", "h", 1)], KINDS, [link])


# ---- this machine


def test_this_machine_has_a_cpu_with_cores_and_memory() -> None:
    cpu = local_devices()[0]
    assert cpu.name == "cpu0"
    assert int(cpu.description.split()[0]) >= 1
    assert cpu.memory_bytes > 2**28


def test_a_star_cluster_passes_through_unchanged() -> None:
    cluster = star("port", memory_bytes=[1, 2], bytes_per_s=1.0, latency_s=0.0)
    assert parse_cluster(cluster) is cluster
