"""Replays trace streams: jobs that wait, start on a fixed number of devices (rigid) or are resized (elastic).

The loops are compiled: `rigid_replay.py` and `elastic_replay.py`.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from loadmaster.advisor.environments.elastic_replay import replay_elastic
from loadmaster.advisor.environments.rigid_replay import replay_rigid
from loadmaster.advisor.environments.trace import LEVELS, TraceStream
from loadmaster.core.errors import InputError


class Order(IntEnum):
    """How a trace rule works."""

    FIFO = 0  # the requested count, strictly by arrival
    EDF = 1  # the requested count, by deadline
    MAX = 2  # as many devices as there are, by arrival
    MEETS = 3  # the smallest count that meets the deadline, by deadline
    LIST = 4  # least device time first, on the count with least device time that meets the deadline
    RESERVE = 5  # reservations by deadline: ElasticFlow's minimum satisfactory share
    SET = 6  # at every event, least device time first, all jobs with which a plan by deadline keeps each


ONE_KIND_ORDERS = (Order.RESERVE, Order.SET)  # plans count the devices of one kind
ELASTIC_ORDERS = (Order.LIST, Order.RESERVE, Order.SET)
MOST_DEVICES = 16_384


@dataclass(frozen=True, slots=True)
class TraceRule:
    """A policy for traces as numbers."""

    order: Order
    by_area: bool = (
        False  # RESERVE: of the counts that meet, the one with least device time, not the smallest
    )
    retry: bool = False  # RESERVE: a job that cannot be promised yet waits and is asked again
    most_share: float = (
        np.inf
    )  # admit a job only if it takes at most this share of the free device time until its deadline
    most_area_s: float = np.inf  # admit no job that needs more device seconds
    resize_s: float = 0.0  # elastic: time lost when the count changes

    @property
    def numbers(self) -> NDArray[np.float64]:
        """For the kernel."""
        return np.array(
            [self.order, self.by_area, self.retry, self.most_share, self.most_area_s, self.resize_s]
        )


@dataclass(frozen=True, slots=True, eq=False)
class TraceOutcome:
    """What became of every job."""

    end_s: NDArray[np.float64]  # [J] nan where it never ran
    start_s: NDArray[np.float64]  # [J]
    devices: NDArray[np.int64]  # [J] count at the start
    admitted: NDArray[np.bool_]  # [J]
    met: NDArray[np.bool_]  # [J]
    device_s: float
    history: NDArray[np.float64]  # [E, 3] until when so many devices were free, and most of them on one host

    @property
    def num_met(self) -> int:
        """Deadlines met."""
        return int(self.met.sum())

    @property
    def num_late(self) -> int:
        """Admitted and not in time: broken promises."""
        return int((self.admitted & ~self.met).sum())


def host_sizes(num_devices: int, per_host: int = 8) -> NDArray[np.int64]:
    """Full hosts, then what is left."""
    if num_devices < 1 or per_host < 1:
        raise InputError(f"{num_devices} devices on hosts of {per_host}: both must be at least 1")
    if num_devices > MOST_DEVICES:
        raise InputError(
            f"{num_devices} devices are too many to replay a trace on; give at most {MOST_DEVICES}"
        )
    full, rest = divmod(num_devices, per_host)
    return np.array([per_host] * full + [rest] * (rest > 0), np.int64)


def replay_trace(
    stream: TraceStream,
    rule: TraceRule,
    hosts: NDArray[np.int64],
    *,
    host_kind: NDArray[np.int64] | None = None,
    elastic: bool = False,
) -> TraceOutcome:
    """One stream under one rule on hosts of given sizes."""
    kinds = np.zeros(len(hosts), np.int64) if host_kind is None else np.asarray(host_kind, np.int64)
    if kinds.max(initial=0) >= len(stream.kinds):
        raise InputError(
            f"a host has kind {kinds.max()}, the stream has {len(stream.kinds)} ({', '.join(stream.kinds)})"
        )
    if rule.order in ONE_KIND_ORDERS and len(np.unique(kinds)) > 1:
        raise InputError("the rules RESERVE and SET serve one kind of device; take another rule")
    levels = np.array(LEVELS, np.int64)
    if not elastic:
        end, start, devices, admitted, device_s, history = replay_rigid(
            stream.arrival_s,
            stream.due_s,
            stream.duration_s,
            stream.reference,
            hosts,
            kinds,
            levels,
            rule.numbers,
        )
    else:
        if len(stream.kinds) > 1 or rule.order not in ELASTIC_ORDERS:
            raise InputError(
                "an elastic replay supports one kind of device and the rules LIST, RESERVE and SET"
            )
        inside = np.where(levels <= hosts.max(), stream.duration_s[:, 0, 0], np.inf)
        apart = np.where((levels > 1) & (len(hosts) > 1), stream.duration_s[:, 0, 1], np.inf)
        duration = np.minimum(inside, apart)
        end, start, devices, admitted, device_s, history = replay_elastic(
            stream.arrival_s, stream.due_s, duration, int(hosts.sum()), levels, rule.numbers
        )
    met = end <= stream.due_s * (1 + 1e-12) + 1e-6
    return TraceOutcome(end, start, devices, admitted, met, device_s, history)
