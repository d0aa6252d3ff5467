"""parse_cluster: a Cluster from a shorthand, a TOML file or a saved cluster. Grammar: docs/clusters.md.

"2xA100-80GB, 1xV100-16GB, cpu-64GB"
"4xV100 | 4xV100, cpu64-256GB ; intra=nvlink2 ; inter=100gbit"
"2*(4xV100, cpu)"
"""

import dataclasses
import math
import os
import re
import tomllib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from loadmaster.cluster.device_words import DeviceWord, parse_device_word, parse_sized_kind, strip_size
from loadmaster.cluster.local import chip_of, local_kind
from loadmaster.cluster.presets import (
    CPU_OVERHEAD_S,
    GPU_OVERHEAD_S,
    KINDS,
    SEE,
    KindPreset,
    fill_dtype_rates,
    find_kind,
    link_preset,
)
from loadmaster.cluster.topology import MAX_DEVICES, DeviceSpec, LinkSpec, add_default_links, assemble_cluster
from loadmaster.core.arrays import require_unique
from loadmaster.core.cluster import UNLIMITED_BYTES, Cluster
from loadmaster.core.errors import ClusterError, FormatError, InputError, SchemaError, UnknownNameError
from loadmaster.core.files import MAX_BYTES, read_bytes
from loadmaster.core.graph import Dtype
from loadmaster.core.io import load
from loadmaster.core.units import parse_bytes, parse_flops_per_s, parse_seconds

Size = str | int | float
V = TypeVar("V", int, float)
_SUFFIXES = (".toml", ".json", ".json.gz")
_COUNT = re.compile(r"([0-9]+)\s*[x×]\s*(.+)", re.IGNORECASE | re.DOTALL)
_REPEAT = re.compile(r"([0-9]+)\s*\*\s*\((.*)\)", re.DOTALL)
_OPTIONS = ("intra", "inter")


@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    """One device of a shorthand, not yet named."""

    kind: KindPreset
    memory_bytes: int
    logical: str = ""  # 'cpu#0' or 'cuda:0' as it was typed, '' = a device of its own


def parse_cluster(
    source: str | os.PathLike[str] | Cluster, *, reserve_bytes: int = 0, max_bytes: int = MAX_BYTES
) -> Cluster:
    """The cluster a shorthand, a .toml file or a saved .json file describes; a Cluster is itself."""
    if isinstance(source, Cluster):
        cluster = source
    elif isinstance(source, os.PathLike) or _is_file(source):
        cluster = _from_file(os.fspath(source), max_bytes)
    else:
        cluster = _from_shorthand(source)
    return with_reserve(cluster, reserve_bytes) if reserve_bytes else cluster


def with_reserve(cluster: Cluster, reserve_bytes: int) -> Cluster:
    """The cluster with at least that much kept free on every device."""
    if reserve_bytes < 0:
        raise ClusterError(f"a reserve of {reserve_bytes} bytes is negative; give 0 or more")
    reserve = np.maximum(cluster.reserve_bytes, min(reserve_bytes, UNLIMITED_BYTES))
    return dataclasses.replace(cluster, reserve_bytes=reserve)


def _is_file(text: str) -> bool:
    """Whether a string is a path: by its ending, or because such a file is there."""
    if not isinstance(text, str):
        raise ClusterError(f"{text!r} is not a cluster; give a shorthand, a path or a Cluster")
    if text.lower().endswith(_SUFFIXES):
        return True
    return ("." in text or os.sep in text) and os.path.isfile(text)  # a file named 'cpu' is no cluster


def _from_file(path: str, max_bytes: int) -> Cluster:
    if path.lower().endswith((".json", ".json.gz")):
        noun = load(path, max_bytes=max_bytes)
        if not isinstance(noun, Cluster):
            raise SchemaError(f"{path} holds a {type(noun).__name__.lower()}; a cluster is needed")
        return noun
    content = read_bytes(path, max_bytes=max_bytes)
    try:
        data = tomllib.loads(content.decode("utf-8"))
        table = msgspec.convert(data, _ClusterTable)
    except (ValueError, RecursionError, msgspec.ValidationError) as problem:
        raise FormatError(f"{path} is not a cluster in TOML: {problem}") from None
    try:
        return _from_table(table, default_name=Path(path).stem)
    except InputError as problem:
        problem.args = (f"{path}: {problem}",)
        raise


# ---- shorthand


def _from_shorthand(text: str) -> Cluster:
    body, *options = text.split(";")
    if not body.strip():
        raise ClusterError("the cluster is empty; write for example '2xA100-80GB, cpu-64GB'")
    chosen = _parse_options(options)
    hosts = [(f"host{index}", _parse_entries(part, ())) for index, part in enumerate(_split_hosts(body))]
    devices = _name_devices(hosts)
    kinds = {entry.kind.name: entry.kind for _, entries in hosts for entry in entries}
    intra = {host: link_preset(chosen["intra"]) for host, _ in hosts} if "intra" in chosen else {}
    inter = link_preset(chosen["inter"]) if "inter" in chosen else None
    links = add_default_links(devices, kinds, intra=intra, inter=inter)
    return assemble_cluster(text.strip(), devices, kinds, links)


def _parse_options(parts: Sequence[str]) -> dict[str, str]:
    """The 'key=value' parts after ';'."""
    chosen: dict[str, str] = {}
    for part in filter(str.strip, parts):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise ClusterError(f"cluster option {part.strip()!r} is not 'key=value'; write 'intra=nvlink3'")
        if key.lower() not in _OPTIONS:
            raise UnknownNameError("cluster option", key, _OPTIONS)
        if key.lower() in chosen:
            raise ClusterError(f"cluster option {key!r} is given twice; give it once")
        chosen[key.lower()] = value
    return chosen


def _split_hosts(body: str) -> list[str]:
    """The device list of every host, repetitions written out."""
    hosts: list[str] = []
    for part in re.split(r"\|(?![^(]*\))", body):  # a '|' inside parentheses belongs to the repetition
        repeat = _REPEAT.fullmatch(part.strip())
        inner, count = (repeat[2], _parse_number(repeat[1])) if repeat else (part, 1)
        if "(" in inner or ")" in inner:
            raise ClusterError(f"{part.strip()!r} is not a host; write devices, or '2*(4xV100, cpu)'")
        if not 0 < count <= MAX_DEVICES:
            raise ClusterError(
                f"{part.strip()!r} asks for {_format_amount(count)} hosts; give 1 to {MAX_DEVICES}"
            )
        hosts += inner.split("|") * count
        _require_at_most(len(hosts), "hosts")
    return hosts


def _parse_entries(text: str, own: Sequence[KindPreset]) -> list[_Entry]:
    """The devices of one host, counts written out."""
    entries: list[_Entry] = []
    for part in (piece.strip() for piece in text.split(",")):
        if not part:
            raise ClusterError(f"{text.strip()!r} has an empty entry; write devices like '2xA100-80GB, cpu'")
        counted = _COUNT.fullmatch(part)
        count, what = (_parse_number(counted[1]), counted[2]) if counted else (1, part)
        if not 0 < count <= MAX_DEVICES:
            raise ClusterError(f"{part!r} asks for {_format_amount(count)} devices; give 1 to {MAX_DEVICES}")
        entry = _parse_entry(what.strip(), own)
        if entry.logical and count > 1:
            raise ClusterError(f"{part!r}: a logical device is one; write {what.strip()!r} once for each")
        entries += [entry] * count
        _require_at_most(len(entries), "devices")
    return entries


def _require_at_most(number: int, what: str) -> None:
    if number > MAX_DEVICES:
        raise ClusterError(f"the cluster has {number} {what} or more; at most {MAX_DEVICES} can be given")


def _parse_number(digits: str) -> int:
    return int(digits) if len(digits) < 10 else 10**9  # Python reads no number of 5,000 digits


def _format_amount(count: int) -> str:
    return "zero" if count == 0 else "too many"


def _parse_entry(text: str, own: Sequence[KindPreset]) -> _Entry:
    """'A100-80GB', 'cpu-64GB' or the logical 'V100#0-8GB'."""
    word = parse_device_word(text, partial(_find_kind, own=own))
    head = text.partition("#")[0].strip()
    if word is None:
        raise _make_unknown_kind_error(head, own)
    return _Entry(word.kind, _memory_of(word), f"{head}#{word.number}" if word.number else chip_of(text))


def _find_kind(name: str, *, own: Sequence[KindPreset]) -> KindPreset | None:
    return find_kind(name, own) or local_kind(name)


def _memory_of(word: DeviceWord[KindPreset]) -> int:
    return word.kind.memory_bytes if word.memory_bytes is None else word.memory_bytes


def _make_unknown_kind_error(text: str, own: Sequence[KindPreset]) -> UnknownNameError:
    known = [*KINDS, *(kind.name for kind in own)]
    return UnknownNameError("device kind", strip_size(text), known, see=SEE)


def _name_devices(hosts: Sequence[tuple[str, Sequence[_Entry]]]) -> list[DeviceSpec]:
    """Names counted over the cluster: gpu0, gpu1, ..., cpu0, ...; logical devices keep theirs."""
    _require_at_most(sum(len(entries) for _, entries in hosts), "devices")
    counts = {"gpu": 0, "cpu": 0, "ref": 0}
    taken: dict[str, str] = {}  # logical name -> host
    devices = []
    for host, entries in hosts:
        for entry in entries:
            kind, name = entry.kind, entry.logical
            if name and taken.setdefault(name, host) != host:
                name = f"{host}/{name}"
            elif not name:
                family = "cpu" if kind.on_host else "ref" if kind.name == "ref" else "gpu"
                name = f"{family}{counts[family]}"
                counts[family] += 1
            engine = chip_of(name) or kind.name if entry.logical else ""
            devices.append(DeviceSpec(name, kind.name, host, entry.memory_bytes, 0, engine))
    return devices


# ---- TOML


class _KindTable(msgspec.Struct, forbid_unknown_fields=True):
    flops: Size | dict[str, Size]
    memory: Size
    memory_rate: Size
    overhead: Size | None = None
    host: bool = False
    bus: str = "pcie4"


class _HostTable(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    devices: str = ""
    intra: str = ""


class _DeviceTable(msgspec.Struct, forbid_unknown_fields=True):
    kind: str
    name: str = ""
    host: str = ""
    memory: Size | None = None
    reserve: Size = 0
    engine: str = ""
    count: int = 1


class _SwitchTable(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class _LinkTable(msgspec.Struct, forbid_unknown_fields=True):
    between: tuple[str, str]
    preset: str = ""
    rate: Size | None = None
    latency: Size | None = None
    name: str = ""


class _ClusterTable(msgspec.Struct, forbid_unknown_fields=True):
    name: str = ""
    intra: str = ""
    inter: str = ""
    kind: dict[str, _KindTable] = {}
    host: list[_HostTable] = []
    device: list[_DeviceTable] = []
    switch: list[_SwitchTable] = []
    link: list[_LinkTable] = []


def _from_table(table: _ClusterTable, *, default_name: str) -> Cluster:
    switches = (*(host.name for host in table.host), *(switch.name for switch in table.switch))
    require_unique(switches, "host or switch", ClusterError)
    own = tuple(_read_kind(name, kind) for name, kind in table.kind.items())
    devices = _read_devices(table, own)
    kinds = {kind.name: kind for kind in (*KINDS.values(), *own)}
    intra = {host.name: host.intra or table.intra for host in table.host}
    intra = {device.host: intra.get(device.host, table.intra) for device in devices}
    links = add_default_links(
        devices,
        kinds,
        [_read_link(link) for link in table.link],
        intra={host: link_preset(name) for host, name in intra.items() if name},
        inter=link_preset(table.inter) if table.inter else None,
    )
    return assemble_cluster(table.name or default_name, devices, kinds, links, switches=switches)


def _read_devices(table: _ClusterTable, own: Sequence[KindPreset]) -> list[DeviceSpec]:
    """Devices of the hosts' shorthands, then the [[device]] tables; unnamed ones are counted together."""
    hosts = [(host.name, _parse_entries(host.devices, own)) for host in table.host if host.devices.strip()]
    _require_at_most(sum(map(_device_count, table.device)), "devices")
    listed = [(_host_of(d, table), [_read_entry(d, own)] * _device_count(d)) for d in table.device]
    unnamed = [entries for entries, device in zip(listed, table.device, strict=True) if not device.name]
    automatic = iter(_name_devices([*hosts, *unnamed]))
    devices = [next(automatic) for _, entries in hosts for _ in entries]
    for device, (host, entries) in zip(table.device, listed, strict=True):
        reserve_bytes = _parse_field(
            parse_bytes, device.reserve, f"device {device.name or device.kind!r}: reserve"
        )
        for index, entry in enumerate(entries):
            name = device.name if len(entries) == 1 else f"{device.name}{index}"
            name = name if device.name else next(automatic).name
            size = entry.memory_bytes
            devices.append(DeviceSpec(name, entry.kind.name, host, size, reserve_bytes, device.engine))
    return devices


def _host_of(device: _DeviceTable, table: _ClusterTable) -> str:
    if device.host or len(table.host) <= 1:
        return device.host or (table.host[0].name if table.host else "host0")
    label = device.name or device.kind
    raise ClusterError(f'device {label!r} names no host and there are {len(table.host)}; add host = "..."')


def _device_count(device: _DeviceTable) -> int:
    if not 0 < device.count <= MAX_DEVICES:
        raise ClusterError(f"device {device.kind!r}: count is {device.count}; give 1 to {MAX_DEVICES}")
    return device.count


def _read_entry(device: _DeviceTable, own: Sequence[KindPreset]) -> _Entry:
    word = parse_sized_kind(device.kind, partial(_find_kind, own=own))
    if word is None:
        raise _make_unknown_kind_error(device.kind, own)
    memory_bytes = _memory_of(word)
    if device.memory is not None:
        memory_bytes = _parse_positive(
            parse_bytes, device.memory, f"device {device.name or device.kind!r}: memory"
        )
    return _Entry(word.kind, memory_bytes)


def _read_kind(name: str, table: _KindTable) -> KindPreset:
    label = f"kind {name!r}"
    given = table.flops if isinstance(table.flops, dict) else {"float32": table.flops}
    rates: dict[Dtype, float] = {}
    for dtype, rate in given.items():
        if dtype.upper() not in Dtype.__members__:
            raise UnknownNameError("dtype", dtype, [known.name.lower() for known in Dtype])
        rates[Dtype[dtype.upper()]] = _parse_positive(parse_flops_per_s, rate, f"{label}: flops of {dtype}")
    if Dtype.FLOAT32 not in rates:
        raise ClusterError(f"{label}: flops has no float32 rate; give it, others fall back on it")
    overhead_s = CPU_OVERHEAD_S if table.host else GPU_OVERHEAD_S
    if table.overhead is not None:
        overhead_s = _parse_field(parse_seconds, table.overhead, f"{label}: overhead")
    return KindPreset(
        name=name,
        flops_per_s=fill_dtype_rates(rates[Dtype.FLOAT32], rates),
        memory_bytes=_parse_positive(parse_bytes, table.memory, f"{label}: memory"),
        memory_bytes_per_s=float(_parse_positive(parse_bytes, table.memory_rate, f"{label}: memory_rate")),
        overhead_s=overhead_s,
        on_host=table.host,
        bus=link_preset(table.bus).name,
    )


def _read_link(table: _LinkTable) -> LinkSpec:
    a, b = table.between
    label = f"link {a!r} - {b!r}"
    if a == b:
        raise ClusterError(f"{label} joins an endpoint to itself; name two")
    if not table.preset and table.rate is None:
        raise ClusterError(f'{label} has no rate; add preset = "pcie4" or rate = "16GB/s"')
    preset = link_preset(table.preset or "pcie4")  # without a preset: the latency of one
    rate, latency_s = preset.bytes_per_s, preset.latency_s
    if table.rate is not None:
        rate = float(_parse_positive(parse_bytes, table.rate, f"{label}: rate"))
    if table.latency is not None:
        latency_s = _parse_field(parse_seconds, table.latency, f"{label}: latency")
    return LinkSpec(a, b, rate, latency_s, table.name or (preset.name if table.preset else ""))


def _parse_field(parse: Callable[[Size], V], value: Size, label: str) -> V:
    """A number with its unit, its errors naming the field."""
    try:
        number = parse(value)
    except InputError as problem:
        raise ClusterError(f"{label}: {problem}") from None
    if not (math.isfinite(number) and number >= 0):
        raise ClusterError(f"{label}: {value!r} is not a finite number >= 0; give one")
    return number


def _parse_positive(parse: Callable[[Size], V], value: Size, label: str) -> V:
    number = _parse_field(parse, value, label)
    if number == 0:
        raise ClusterError(f"{label} is 0; give a number above 0")
    return number
