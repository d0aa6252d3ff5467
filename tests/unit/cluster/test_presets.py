"""Presets against the numbers of the datasheets, typed here a second time, and against docs/clusters.md."""

import re
from pathlib import Path

import pytest

from loadmaster.cluster.parse import parse_cluster
from loadmaster.cluster.presets import KINDS, LINKS, find_kind, link_preset
from loadmaster.core.errors import UnknownNameError
from loadmaster.core.graph import Dtype

DOCS = Path(__file__).resolve().parents[3] / "docs" / "clusters.md"
# kind: float32, float16, float64 in TFLOP/s, memory in GB, memory rate in GB/s
DATASHEET = {
    "H200": (67, 989.5, 67, 141, 4800),
    "H100": (67, 989.5, 67, 80, 3350),
    "A100-80GB": (19.5, 312, 19.5, 80, 2039),
    "A100-40GB": (19.5, 312, 19.5, 40, 1555),
    "V100": (15.7, 125, 7.8, 16, 900),
    "T4": (8.1, 65, 0.253125, 16, 320),
    "L4": (30.3, 121, 0.4734375, 24, 300),
    "RTX4090": (82.6, 165.2, 1.290625, 24, 1008),
    "RTX3090": (35.6, 71, 0.55625, 24, 936),
    "RTX2080": (10.1, 40.3, 0.315625, 8, 448),
    "GTX1080Ti": (11.3, 11.3, 0.353125, 11, 484),
    "P100": (10.6, 21.2, 5.3, 16, 732),
    "cpu16": (1.536, 1.536, 0.768, 64, 204.8),
    "cpu64": (5.0176, 5.0176, 2.5088, 256, 204.8),
    "ref": (1, 1, 1, 16, 1e6),
}


@pytest.mark.parametrize("name", DATASHEET)
def test_kind_has_the_published_rates_and_memory(name: str) -> None:
    float32, float16, float64, memory_gb, memory_gb_per_s = DATASHEET[name]
    kind = KINDS[name]
    assert kind.name == name
    assert kind.flops_per_s[Dtype.FLOAT32] == pytest.approx(float32 * 1e12)
    assert kind.flops_per_s[Dtype.FLOAT16] == pytest.approx(float16 * 1e12)
    assert kind.flops_per_s[Dtype.FLOAT64] == pytest.approx(float64 * 1e12)
    assert kind.memory_bytes == memory_gb * 10**9
    assert kind.memory_bytes_per_s == pytest.approx(memory_gb_per_s * 1e9)


def test_every_kind_of_the_table_is_checked() -> None:
    assert set(KINDS) == set(DATASHEET)


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_builds_a_cluster_with_a_rate_for_every_dtype(name: str) -> None:
    cluster = parse_cluster(f"2x{name}")
    assert cluster.kind_name == (name,)
    assert cluster.flops_per_s.shape == (1, len(Dtype))
    assert cluster.memory_bytes.tolist() == [KINDS[name].memory_bytes] * 2
    assert cluster.on_host.tolist() == [name.startswith("cpu")]


@pytest.mark.parametrize(
    ("name", "bytes_per_s", "latency_s"),
    [
        ("100mbit", 12.5e6, 50e-6),
        ("2.5 Gbit", 312.5e6, 25e-6),
        ("40g", 5e9, 5e-6),
        ("10 Mbit/s", 1.25e6, 50e-6),
    ],
)
def test_a_network_may_have_any_speed(name: str, bytes_per_s: float, latency_s: float) -> None:
    found = link_preset(name)
    assert (found.bytes_per_s, found.latency_s) == (bytes_per_s, latency_s)


@pytest.mark.parametrize("name", LINKS)
def test_every_link_builds_clusters_inside_and_between_hosts(name: str) -> None:
    assert LINKS[name].bytes_per_s in parse_cluster(f"2xV100 ; intra={name}").link_bytes_per_s
    assert LINKS[name].bytes_per_s in parse_cluster(f"V100 | V100 ; inter={name}").link_bytes_per_s


def test_dtypes_a_chip_lacks_have_its_float32_rate() -> None:
    v100 = KINDS["V100"].flops_per_s
    for dtype in (Dtype.BFLOAT16, Dtype.FLOAT8, Dtype.INT32, Dtype.BOOL):
        assert v100[dtype] == v100[Dtype.FLOAT32]


def test_reference_kind_has_one_teraflop_in_every_dtype_and_no_overhead() -> None:
    ref = KINDS["ref"]
    assert set(ref.flops_per_s.values()) == {1e12}
    assert ref.overhead_s == 0
    assert ref.memory_bytes_per_s == 1e15


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("RTX 3090", "RTX3090"),
        ("rtx-3090", "RTX3090"),
        ("GTX 1080 Ti", "GTX1080Ti"),
        ("gtx_1080_ti", "GTX1080Ti"),
        ("A100", "A100-40GB"),
        ("a100-80gb", "A100-80GB"),
        ("A100 80GB", "A100-80GB"),
        ("A100-80G", "A100-80GB"),
        ("cpu", "cpu16"),
        ("CPU64", "cpu64"),
        (" h100 ", "H100"),
    ],
)
def test_kinds_are_found_however_they_are_spelled(spelling: str, name: str) -> None:
    kind = find_kind(spelling)
    assert kind is not None
    assert kind.name == name


@pytest.mark.parametrize(
    ("spelling", "name", "gb_per_s"),
    [
        ("100g", "100gbit", 12.5),
        ("100 Gbit", "100gbit", 12.5),
        ("400GbE", "400gbit", 50),
        ("25 gbps", "25gbit", 3.125),
        ("nvlink", "nvlink3", 300),
        ("NVLink 2", "nvlink2", 150),
        ("NVLINK4", "nvlink4", 450),
        ("PCIe 4.0 x16", "pcie4", 31.5),
        ("pcie-gen5", "pcie5", 63),
        ("PCIe3", "pcie3", 15.75),
        ("RAMP", "ramp", 400),
    ],
)
def test_links_are_found_however_they_are_spelled(spelling: str, name: str, gb_per_s: float) -> None:
    assert link_preset(spelling).name == name
    assert link_preset(spelling).bytes_per_s == pytest.approx(gb_per_s * 1e9)


def test_an_unknown_link_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="unknown link 'nvlinc3'; did you mean 'nvlink3'"):
        link_preset("nvlinc3")


def test_own_kinds_come_before_presets() -> None:
    assert find_kind("t4", [KINDS["H100"]]) is KINDS["T4"]
    assert find_kind("nothing of the sort") is None


def _table(heading: str) -> list[list[str]]:
    section = DOCS.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+) \|$", section, re.MULTILINE)
    return [row.split(" | ") for row in rows][1:]


def test_the_table_of_kinds_in_the_docs_is_the_table_in_the_code() -> None:
    rows = _table("Device kinds")
    assert [row[0] for row in rows] == list(KINDS)
    for name, float32, float16, memory_gb, memory_gb_per_s, bus in rows:
        kind = KINDS[name]
        assert kind.flops_per_s[Dtype.FLOAT32] == pytest.approx(float(float32) * 1e12)
        assert kind.flops_per_s[Dtype.FLOAT16] == pytest.approx(float(float16) * 1e12)
        assert kind.memory_bytes == pytest.approx(float(memory_gb) * 1e9)
        assert kind.memory_bytes_per_s == pytest.approx(float(memory_gb_per_s) * 1e9)
        assert kind.bus == bus


def test_the_table_of_links_in_the_docs_is_the_table_in_the_code() -> None:
    rows = _table("Links")
    assert [row[0] for row in rows] == list(LINKS)
    for name, gb_per_s, latency_us in rows:
        assert LINKS[name].bytes_per_s == pytest.approx(float(gb_per_s) * 1e9)
        assert LINKS[name].latency_s == pytest.approx(float(latency_us) * 1e-6)


def test_every_cluster_written_in_the_docs_can_be_read(tmp_path: Path) -> None:
    text = DOCS.read_text(encoding="utf-8")
    shorthands = [row[0] for row in re.findall(r"^\| `(.+?)` \| (.+) \|$", text, re.MULTILINE)]
    clusters = [parse_cluster(shorthand.replace(r"\|", "|")) for shorthand in shorthands]
    assert [cluster.num_devices for cluster in clusters] == [1, 4, 9, 10, 4, 32, 2]
    for number, block in enumerate(re.findall(r"```toml\n(.+?)```", text, re.DOTALL)):
        path = tmp_path / f"{number}.toml"
        path.write_text(block, encoding="utf-8")
        assert parse_cluster(path).num_devices == (4, 3, 5)[number]
