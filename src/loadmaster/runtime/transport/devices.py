"""Devices: the devices of a cluster as torch knows them, whole or as logical parts of one.

`cpu0` and `gpu1` are whole; `cpu#0`, `cuda:0#1` and `H200#1` are parts, each with a limit in bytes. Numbers
of whole GPUs are those of this machine; a kind with a '#' is the first GPU of that kind.
"""

import re
from dataclasses import dataclass

import torch

from loadmaster.cluster.probe import LocalDevice, is_chip, local_devices
from loadmaster.core.cluster import Cluster
from loadmaster.core.errors import ClusterError

_WHOLE = re.compile(r"(cpu|gpu)([0-9]+)")


@dataclass(frozen=True, slots=True)
class RunDevice:
    """One device of a plan."""

    name: str  # as the plan names it
    where: torch.device
    limit_bytes: int
    logical: bool  # a part of a device, its bytes are counted


def locate_devices(
    cluster: Cluster, *, present: tuple[LocalDevice, ...] | None = None
) -> tuple[RunDevice, ...]:
    """[D] where each device of a cluster is on this machine; `present` is what the machine has."""
    if len(set(cluster.host.tolist())) > 1:
        raise ClusterError("the plan is for several hosts; one process runs on the devices of one")
    here = local_devices() if present is None else present
    found = []
    for index, name in enumerate(cluster.device_name):
        kind = cluster.kind_name[cluster.kind[index]]
        on_host = bool(cluster.on_host[cluster.kind[index]])
        where = _locate_device(name, kind, on_host=on_host, here=here)
        found.append(RunDevice(name, where, int(cluster.usable_bytes[index]), "#" in name))
    return tuple(found)


def locate_device(cluster: Cluster, device: int) -> torch.device:
    """Where one device of a cluster is on the host of this process; the cluster may have several hosts."""
    kind = int(cluster.kind[device])
    return _locate_device(
        cluster.device_name[device],
        cluster.kind_name[kind],
        on_host=bool(cluster.on_host[kind]),
        here=local_devices(),
    )


def _locate_device(name: str, kind: str, *, on_host: bool, here: tuple[LocalDevice, ...]) -> torch.device:
    if on_host:
        return torch.device("cpu")
    head = name.split("/")[-1].partition("#")[0]
    whole = _WHOLE.fullmatch(head)
    wanted = f"cuda:{whole[2]}" if whole else head.lower()
    match = [device for device in here if device.torch_name == wanted]
    if not match and not whole:
        match = [device for device in here if not device.on_host and is_chip(kind, device.chip)]
    if not match:
        has = ", ".join(device.torch_name for device in here)
        raise ClusterError(
            f"the plan needs {name} ({kind}), this machine has {has}; plan on what it has, e.g."
            " devices='auto', or on logical devices such as 'cpu#0-4GB, cpu#1-4GB'"
        )
    return torch.device(match[0].torch_name)
