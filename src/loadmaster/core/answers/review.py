"""Review: everything about a plan beyond its times: memory, waiting, critical path, links, modules.

Made by the room `review`, drawn by `report`. Times are seconds of one step, as the timeline has them.
"""

from dataclasses import dataclass

from loadmaster.core.arrays import Floats, Longs
from loadmaster.core.graph import Graph
from loadmaster.core.timeline import Timeline

MEMORY_KINDS = ("weights", "gradients", "optimizer", "activations", "workspace", "resident", "in flight")


@dataclass(frozen=True, slots=True, eq=False)
class MemoryCurve:
    """What stands on one device over time; a point holds from its time to that of the next."""

    time_s: Floats  # [P]
    held_bytes: Longs  # [P, MEMORY_KINDS] where points were merged, the highest of them
    peak_s: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Why a device stood idle: what it waited for, and how long in all."""

    device: int
    kind: str  # transfer, queue, op, engine, launch, end, empty
    cause: str  # the op it waited for, or whose output; '' = none
    module: str
    source: int  # the device it waited for, -1 = none
    seconds: float
    count: int


@dataclass(frozen=True, slots=True)
class CriticalPart:
    """A stretch of the critical path: neighbours on one resource in one part of the model."""

    kind: str  # compute, transfer, wait
    resource: str  # a device's name, or 'gpu0 to gpu1'
    module: str
    first: str  # op
    last: str
    num: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """What crosses one link in a step."""

    name: str
    num_bytes: int
    num_transfers: int
    busy_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class ModuleUse:
    """A module with all below it: its time on every device, and its bytes."""

    path: str  # '' = the whole model
    depth: int
    num_ops: int
    num_below: int  # modules under it
    seconds: tuple[float, ...]  # [D]
    ops_on: tuple[int, ...]  # [D]
    resident_bytes: int
    output_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Review:
    """All of it, of one timeline of one plan."""

    timeline: Timeline
    memory: tuple[MemoryCurve, ...]  # [D]; empty for a measured timeline
    waits: tuple[Wait, ...]
    critical: tuple[CriticalPart, ...]
    critical_ops: tuple[int, ...]  # spans of the timeline that lie on the critical path
    links: tuple[LinkLoad, ...]
    modules: tuple[ModuleUse, ...]
    limit: str  # what limits the step, in a sentence
    samples: int | None = None  # in a step, where the graph says so
    notes: tuple[str, ...] = ()
    graph: Graph | None = None  # what the spans speak of, where that is not the problem's: passes of stages
