"""Presets: device kinds and links by the names people type, with published peak rates.

Rates are the vendor's peak for *dense* math, never the doubled "with sparsity" figure. What is chosen
where a datasheet leaves a choice:

- float32 is the rate of the plain float32 units, not of TF32, which is off by default in PyTorch;
- float16, bfloat16 and float8 are tensor-core rates with float32 accumulation, where there are any;
- float64 is the tensor-core rate where there is one, else the plain rate;
- a dtype the chip lacks in hardware, or whose rate is not published (int32, int64, bool), has the
  float32 rate;
- GB is 10**9 bytes, so a preset's memory is a little less than the chip has.

Launch overheads and link latencies are *assumptions* of a usual size, not published numbers.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from loadmaster.core.errors import UnknownNameError
from loadmaster.core.graph import Dtype

GPU_OVERHEAD_S = 5e-6  # assumed: one kernel launch
CPU_OVERHEAD_S = 1e-6  # assumed: one call into a kernel library
SEE = "docs/clusters.md lists them"


@dataclass(frozen=True, slots=True)
class KindPreset:
    """What one kind of device can do."""

    name: str
    flops_per_s: Mapping[Dtype, float]  # every Dtype
    memory_bytes: int
    memory_bytes_per_s: float
    overhead_s: float
    on_host: bool  # a CPU: its memory is its host's, its ops run on the thread that issues all ops
    bus: str  # the link preset by which it hangs on its host


@dataclass(frozen=True, slots=True)
class LinkPreset:
    """One direction of a link; every link has two."""

    name: str
    bytes_per_s: float
    latency_s: float


def fill_dtype_rates(float32: float, given: Mapping[Dtype, float]) -> Mapping[Dtype, float]:
    """A rate for every dtype: the given ones, else the float32 rate."""
    return MappingProxyType({dtype: given.get(dtype, float32) for dtype in Dtype} | {Dtype.FLOAT32: float32})


def _make_gpu(
    name: str, memory_gb: float, memory_gb_per_s: float, bus: str, float32: float, **tera: float
) -> KindPreset:
    """A GPU from the datasheet's own units; `tera` holds rates of other dtypes in 10**12 per second."""
    given = {Dtype[dtype.upper()]: rate * 1e12 for dtype, rate in tera.items()}
    return KindPreset(
        name=name,
        flops_per_s=fill_dtype_rates(float32 * 1e12, given),
        memory_bytes=round(memory_gb * 1e9),
        memory_bytes_per_s=memory_gb_per_s * 1e9,
        overhead_s=GPU_OVERHEAD_S,
        on_host=False,
        bus=bus,
    )


def _make_cpu(name: str, cores: int, ghz: float, memory_gb: float) -> KindPreset:
    """A CPU host: two 256-bit fused multiply-adds a cycle and core are 32 float32 operations."""
    float32 = cores * ghz * 1e9 * 32
    return KindPreset(
        name=name,
        flops_per_s=fill_dtype_rates(float32, {Dtype.FLOAT64: float32 / 2}),
        memory_bytes=round(memory_gb * 1e9),
        memory_bytes_per_s=204.8e9,  # eight channels of DDR4-3200
        overhead_s=CPU_OVERHEAD_S,
        on_host=True,
        bus="ram",
    )


_HOPPER = {"float16": 989.5, "bfloat16": 989.5, "float64": 67, "float8": 1979, "int8": 1979}
_A100 = {"float16": 312, "bfloat16": 312, "float64": 19.5, "int8": 624}
_RTX4090 = {"float16": 165.2, "bfloat16": 165.2, "float64": 82.6 / 64, "float8": 330.3, "int8": 660.6}
_KIND_ROWS = (
    # NVIDIA H200 Tensor Core GPU datasheet, SXM (its 1,979 / 3,958 are with sparsity, halved here)
    _make_gpu("H200", 141, 4800, "pcie5", 67, **_HOPPER),
    # NVIDIA H100 Tensor Core GPU datasheet, SXM (likewise)
    _make_gpu("H100", 80, 3350, "pcie5", 67, **_HOPPER),
    # NVIDIA A100 Tensor Core GPU datasheet, SXM4, both memory sizes
    _make_gpu("A100-80GB", 80, 2039, "pcie4", 19.5, **_A100),
    _make_gpu("A100-40GB", 40, 1555, "pcie4", 19.5, **_A100),
    # NVIDIA V100 Tensor Core GPU datasheet, SXM2
    _make_gpu("V100", 16, 900, "pcie3", 15.7, float16=125, float64=7.8),
    # NVIDIA T4 datasheet; float64 at 1/32 (Turing whitepaper)
    _make_gpu("T4", 16, 320, "pcie3", 8.1, float16=65, int8=130, float64=8.1 / 32),
    # NVIDIA L4 datasheet (242 / 485 are with sparsity, halved here); float64 at 1/64
    _make_gpu(
        "L4", 24, 300, "pcie4", 30.3, float16=121, bfloat16=121, float8=242.5, int8=242.5, float64=30.3 / 64
    ),
    # NVIDIA Ada GPU architecture whitepaper, GeForce RTX 4090 column
    _make_gpu("RTX4090", 24, 1008, "pcie4", 82.6, **_RTX4090),
    # NVIDIA Ampere GA102 whitepaper, GeForce RTX 3090 column
    _make_gpu("RTX3090", 24, 936, "pcie4", 35.6, float16=71, bfloat16=71, int8=284, float64=35.6 / 64),
    # NVIDIA Turing GPU architecture whitepaper, GeForce RTX 2080, reference clocks
    _make_gpu("RTX2080", 8, 448, "pcie3", 10.1, float16=40.3, int8=161.1, float64=10.1 / 32),
    # NVIDIA GeForce GTX 1080 Ti specifications: 3,584 cores at 1,582 MHz; float64 at 1/32. Its float16
    # units run at 1/64 and libraries avoid them, so float16 has the float32 rate
    _make_gpu("GTX1080Ti", 11, 484, "pcie3", 11.3, float64=11.3 / 32),
    # NVIDIA Tesla P100 datasheet, SXM2
    _make_gpu("P100", 16, 732, "pcie3", 10.6, float16=21.2, float64=5.3),
    # AMD EPYC 7313 (16 cores, 3.0 GHz base) and 7763 (64 cores, 2.45 GHz base) product pages;
    # the installed memory is an assumption
    _make_cpu("cpu16", 16, 3.0, 64),
    _make_cpu("cpu64", 64, 2.45, 256),
    # The device on which a generated graph's microseconds are microseconds: 1 TFLOP/s, nothing else
    KindPreset("ref", fill_dtype_rates(1e12, {}), 16 * 10**9, 1e15, 0.0, False, "pcie3"),
)
_LINK_ROWS = (
    # NVIDIA V100, A100 and H100 datasheets: 300, 600 and 900 GB/s per GPU are the sum of both directions
    LinkPreset("nvlink2", 150e9, 2e-6),
    LinkPreset("nvlink3", 300e9, 2e-6),
    LinkPreset("nvlink4", 450e9, 2e-6),
    # PCI-SIG base specifications: 8, 16 and 32 GT/s a lane, 16 lanes, 128b/130b coding
    LinkPreset("pcie3", 15.75e9, 5e-6),
    LinkPreset("pcie4", 31.5e9, 5e-6),
    LinkPreset("pcie5", 63e9, 5e-6),
    # a copy reads and writes: half of eight channels of DDR4-3200
    LinkPreset("ram", 102.4e9, 1e-7),
    # Ethernet or InfiniBand line rates; the latency is that of one of the two ends
    LinkPreset("100mbit", 12.5e6, 50e-6),
    LinkPreset("1gbit", 125e6, 25e-6),
    LinkPreset("10gbit", 1.25e9, 10e-6),
    LinkPreset("25gbit", 3.125e9, 5e-6),
    LinkPreset("100gbit", 12.5e9, 2e-6),
    LinkPreset("200gbit", 25e9, 2e-6),
    LinkPreset("400gbit", 50e9, 2e-6),
    # optical circuits, one of its own for every pair of devices
    LinkPreset("ramp", 4e11, 250e-9),
)

KINDS: Mapping[str, KindPreset] = MappingProxyType({row.name: row for row in _KIND_ROWS})
LINKS: Mapping[str, LinkPreset] = MappingProxyType({row.name: row for row in _LINK_ROWS})
_KIND_ALIASES = {
    "a100": "A100-40GB",
    "a10040g": "A100-40GB",
    "a10040gib": "A100-40GB",
    "a10080g": "A100-80GB",
    "a10080gib": "A100-80GB",
    "cpu": "cpu16",
}
_LINK_ALIASES = {"nvlink": "nvlink3", "pcie": "pcie4"}


def normalize_name(name: str) -> str:
    """A name without what spellings differ in: case, spaces, hyphens, underscores."""
    return re.sub(r"[\s_-]+", "", name).casefold()


def find_kind(name: str, own: Sequence[KindPreset] = ()) -> KindPreset | None:
    """The kind of that name, `own` ones first, or None."""
    key = normalize_name(name)
    key = (
        normalize_name(_KIND_ALIASES.get(key, key))
        if key not in {normalize_name(kind.name) for kind in own}
        else key
    )
    return next((kind for kind in (*own, *KINDS.values()) if normalize_name(kind.name) == key), None)


def _make_network(bits_per_s: float, name: str) -> LinkPreset:
    """The network of some speed."""
    if not bits_per_s:
        raise UnknownNameError("link", name, LINKS, see=SEE)
    listed = sorted(
        (row for row in LINKS.values() if row.name.endswith("bit")), key=lambda row: row.bytes_per_s
    )
    bytes_per_s = bits_per_s / 8
    slower = [row for row in listed if row.bytes_per_s <= bytes_per_s] or listed[:1]
    if slower[-1].bytes_per_s == bytes_per_s:
        return slower[-1]
    text = f"{bits_per_s / 1e9:g}gbit" if bits_per_s >= 1e9 else f"{bits_per_s / 1e6:g}mbit"
    return LinkPreset(text, bytes_per_s, slower[-1].latency_s)


def link_preset(name: str) -> LinkPreset:
    """The link of that name, however it is spelled ('100g', '100 Gbit', 'PCIe 4.0 x16', 'nvlink').

    A network of another speed ('2.5gbit') has the latency of the next slower one that is listed.
    """
    key = normalize_name(name)
    if network := re.fullmatch(r"([0-9]{1,4}(?:\.[0-9]{1,3})?)([gm])(?:bit|bps|be|bit/s)?", key):
        return _make_network(float(network[1]) * (1e9 if network[2] == "g" else 1e6), name)
    if pcie := re.fullmatch(r"pcie(?:gen)?([0-9])(?:\.0)?(?:x16)?", key):
        key = f"pcie{pcie[1]}"
    found = LINKS.get(_LINK_ALIASES.get(key, key))
    if found is None:
        raise UnknownNameError("link", name, LINKS, see=SEE)
    return found
