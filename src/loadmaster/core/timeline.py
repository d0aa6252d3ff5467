"""Timeline: what ran where and when, simulated or measured, as one type."""

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING

import numpy as np

from loadmaster.core.arrays import (
    Bytes8,
    Floats,
    Ints,
    Longs,
    content_digest,
    require_finite,
    require_range,
    set_column,
    set_names,
)
from loadmaster.core.errors import PlanError

if TYPE_CHECKING:
    from loadmaster.core.graph import Graph
    from loadmaster.core.notebook import Picture


class SpanKind(IntEnum):
    """What a span is."""

    COMPUTE = 0  # item = op, resource = device
    TRANSFER = 1  # item = tensor, resource = source device * D + destination device
    SPILL = 2  # item = tensor, resource = device * D + device: written to host memory


class TimelineOrigin(StrEnum):
    """Predicted or seen."""

    SIMULATED = "simulated"
    MEASURED = "measured"


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """S spans on D devices."""

    origin: TimelineOrigin
    device_name: tuple[str, ...]  # [D]
    kind: Bytes8  # [S] SpanKind
    resource: Ints  # [S] see SpanKind
    item: Ints  # [S]
    microbatch: Ints  # [S]
    start_s: Floats  # [S]
    end_s: Floats  # [S]
    peak_bytes: Longs  # [D] reserve not included

    def __post_init__(self) -> None:
        """Check every invariant once."""
        spans, devices = len(self.kind), len(self.device_name)
        set_names(self, "device_name", devices, PlanError)
        set_column(self, "kind", np.int8, (spans,), PlanError)
        for field in ("resource", "item", "microbatch"):
            set_column(self, field, np.int32, (spans,), PlanError)
        for field in ("start_s", "end_s"):
            set_column(self, field, np.float64, (spans,), PlanError)
            require_finite(getattr(self, field), f"Timeline.{field}", PlanError)
        set_column(self, "peak_bytes", np.int64, (devices,), PlanError)
        require_range(self.kind, 0, len(SpanKind), "Timeline.kind", PlanError)
        require_range(self.resource, 0, devices * devices, "Timeline.resource", PlanError)
        on_device = self.resource[self.kind == SpanKind.COMPUTE]
        require_range(on_device, 0, devices, "Timeline.resource of a compute span", PlanError)
        if (self.end_s < self.start_s).any():
            raise PlanError("Timeline: a span ends before it starts")

    @property
    def step_s(self) -> float:
        """End of the last span."""
        return float(self.end_s.max()) if len(self.end_s) else 0.0

    @property
    def busy_s(self) -> Floats:
        """[D] seconds each device computes."""
        compute = self.kind == SpanKind.COMPUTE
        busy = np.zeros(len(self.device_name))
        np.add.at(busy, self.resource[compute], (self.end_s - self.start_s)[compute])
        return busy

    def plot(self, graph: "Graph | None" = None) -> "Picture":
        """The Gantt as a picture; with the graph its phases have colours."""
        from loadmaster.core.notebook import picture_of

        return picture_of(self, graph)

    def _repr_html_(self) -> str:
        from loadmaster.core.notebook import html_of

        return html_of(self)

    def __repr__(self) -> str:
        """One line; the columns may be long."""
        return f"<Timeline {self.origin}: {len(self.kind)} spans, {self.step_s:.6g} s>"

    @property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of the content."""
        return content_digest(self)
