"""Devices: the devices of a plan as TensorFlow knows them.

Every CPU of a plan, whole or a part ('cpu0', 'cpu#1'), is one logical CPU of TensorFlow; a GPU or a part of
one is a logical GPU, whose memory TensorFlow limits. Logical devices can be made only before TensorFlow has
started, which the first tensor does. TensorFlow has no limit for CPUs: there the plan alone keeps it.
"""

import re
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from loadmaster.core.cluster import Cluster
from loadmaster.core.errors import ClusterError
from loadmaster.core.units import format_bytes

_WHOLE = re.compile(r"(?:gpu|cuda:)([0-9]+)")
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class PlacedDevice:
    """One device of a plan."""

    name: str  # as the plan names it
    where: str  # 'CPU:1', 'GPU:0'
    limit_bytes: int

    @property
    def on_host(self) -> bool:
        """Whether it is a CPU."""
        return self.where.startswith("CPU")

    @property
    def full_name(self) -> str:
        """As nodes name it."""
        return f"/job:localhost/replica:0/task:0/device:{self.where}"


def locate_devices(cluster: Cluster) -> tuple[PlacedDevice, ...]:
    """[D] each device of a cluster; logical devices are made where there are too few."""
    if len(set(cluster.host.tolist())) > 1:
        raise ClusterError("the plan is for several hosts; one process runs on the devices of one")
    host = [d for d in range(cluster.num_devices) if cluster.on_host[cluster.kind[d]]]
    others = [d for d in range(cluster.num_devices) if d not in host]
    where = {d: f"CPU:{at}" for at, d in enumerate(host)}
    _make_cpus(len(host))
    where |= _locate_gpus(cluster, others)
    return tuple(
        PlacedDevice(name, where[d], int(cluster.usable_bytes[d]))
        for d, name in enumerate(cluster.device_name)
    )


def _make_cpus(wanted: int) -> None:
    physical = tf.config.list_physical_devices("CPU")[0]
    made = tf.config.get_logical_device_configuration(physical)
    has = len(made) if made else 1
    if has >= wanted:
        return
    try:
        tf.config.set_logical_device_configuration(
            physical, [tf.config.LogicalDeviceConfiguration() for _ in range(wanted)]
        )
    except RuntimeError:
        raise ClusterError(
            f"the plan needs {wanted} CPU devices and TensorFlow has started with {has}; before the first"
            " tensor or model is made, call tf.config.set_logical_device_configuration("
            f"tf.config.list_physical_devices('CPU')[0], [tf.config.LogicalDeviceConfiguration()] * {wanted})"
        ) from None


def _locate_gpus(cluster: Cluster, wanted: list[int]) -> dict[int, str]:
    """Logical GPUs in the order of physical ones; parts of one get its memory by the plan's limits."""
    if not wanted:
        return {}
    physical = tf.config.list_physical_devices("GPU")
    at: dict[int, list[int]] = {}
    for d in wanted:
        name = cluster.device_name[d]
        match = _WHOLE.match(name.split("/")[-1].partition("#")[0])
        number = int(match[1]) if match else 0
        if number >= len(physical):
            raise ClusterError(
                f"the plan needs {name}, and TensorFlow sees {len(physical)} GPUs here; plan on what this"
                " machine has, e.g. 'cpu#0-4GB, cpu#1-4GB' (tensorflow-cpu has no GPUs)"
            )
        at.setdefault(number, []).append(d)
    for number, devices in at.items():
        if len(devices) > 1 or "#" in cluster.device_name[devices[0]]:
            _divide_gpu(physical[number], [int(cluster.usable_bytes[d]) for d in devices])
    found: dict[int, str] = {}
    logical = 0
    for number in range(len(physical)):
        made = tf.config.get_logical_device_configuration(physical[number])
        for place, d in enumerate(at.get(number, ())):
            found[d] = f"GPU:{logical + place}"
        logical += len(made) if made else 1
    return found


def _divide_gpu(physical: Any, limits: list[int]) -> None:
    parts = [tf.config.LogicalDeviceConfiguration(memory_limit=max(1, limit // _MIB)) for limit in limits]
    made = tf.config.get_logical_device_configuration(physical)
    if made and [part.memory_limit for part in made] == [part.memory_limit for part in parts]:
        return
    try:
        tf.config.set_logical_device_configuration(physical, parts)
    except RuntimeError:
        raise ClusterError(
            f"the plan divides {physical.name} into {len(limits)} parts, and TensorFlow has started; place"
            " the model before the first tensor is made, in a new process"
        ) from None


def describe_use(device: PlacedDevice) -> str:
    """The memory in use on a device, where TensorFlow can tell."""
    limit = format_bytes(device.limit_bytes)
    if device.on_host:
        return f"planned for {limit}; TensorFlow does not report the memory of CPU devices"
    info = tf.config.experimental.get_memory_info(device.where)
    return f"at most {format_bytes(int(info['peak']))} of {limit} so far"


def peak_bytes(device: PlacedDevice) -> int | None:
    """The most that stood on a GPU; None of a CPU, which TensorFlow does not report."""
    if device.on_host:
        return None
    return int(tf.config.experimental.get_memory_info(device.where)["peak"])
