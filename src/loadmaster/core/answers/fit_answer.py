"""Answer: what `fit` says, as plain numbers and words; `--json` prints exactly this (docs/schemas)."""

from dataclasses import dataclass

from loadmaster.core.findings import Assumption, Finding
from loadmaster.core.notebook import PrintedAnswer

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Parts:
    """Bytes of a peak by what they are for; `total_bytes` is their sum."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    workspace_bytes: int
    resident_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class ModuleParts:
    """What a module and all below it hold at the peak; `depth` 0 is the whole model."""

    module: str
    depth: int
    parts: Parts


@dataclass(frozen=True, slots=True)
class LargestBatch:
    """The largest batch that fits; None: no limit was found. `confirmed`: captured at it and at one more."""

    batch: int | None
    confirmed: bool
    note: str = ""


@dataclass(frozen=True, slots=True)
class DeviceFit:
    """One device alone. `needs_bytes` is the peak of the step in the model's own order."""

    device: str
    kind: str
    memory_bytes: int | None  # what may be used; None: no limit
    needs_bytes: int
    fits: bool
    proven: bool  # that it does not fit, whatever the order
    reason: str
    step_s: float | None
    largest: LargestBatch | None


@dataclass(frozen=True, slots=True)
class ClusterFit:
    """All devices together, by the plan that was found or that came nearest."""

    devices: tuple[str, ...]
    memory_bytes: tuple[int | None, ...]
    fits: bool
    proven: bool
    reason: str
    algorithm: str
    step_s: float | None
    peak_bytes: tuple[int, ...]
    parts: tuple[Parts, ...]
    largest: LargestBatch | None


@dataclass(frozen=True, slots=True)
class PresetFit:
    """One kind of device that can be named."""

    kind: str
    memory_bytes: int
    needs_bytes: int
    fits: bool
    largest: LargestBatch | None


@dataclass(frozen=True, slots=True)
class Change:
    """Something to do differently, what it costs, and whether it makes the model fit (None: not checked)."""

    name: str
    text: str
    price: str
    fits: bool | None
    reason: str
    step_s: float | None  # of the whole batch


@dataclass(frozen=True, slots=True)
class Fit(PrintedAnswer):
    """Whether a model fits, on what, why, and what would make it fit."""

    loadmaster: str  # always 'fit'
    schema: int
    source: str
    graph: str
    capture: str
    assumptions: tuple[Assumption, ...]  # values that capture could not know
    warnings: tuple[Finding, ...]  # what looks wrong in the captured step
    notes: tuple[str, ...]
    num_ops: int
    batch: int | None
    seq: int | None
    optimizer: str | None
    precision: str
    fits: bool | None  # on the devices named (or brought by the source); None: there are none
    parts: Parts  # of one device that holds everything
    modules: tuple[ModuleParts, ...]
    devices: tuple[DeviceFit, ...]
    cluster: ClusterFit | None
    presets: tuple[PresetFit, ...]
    changes: tuple[Change, ...]
    cheapest: str | None  # name of the first change that makes it fit
