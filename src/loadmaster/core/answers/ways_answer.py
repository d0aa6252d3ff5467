"""Ways: every way to run a training step on some devices, one row each; `--json` prints exactly this."""

from dataclasses import dataclass

from loadmaster.core.notebook import PrintedAnswer

SCHEMA_VERSION = 1
BIT_EQUAL, ROUNDING = "bit-equal", "up to rounding"


@dataclass(frozen=True, slots=True)
class Way:
    """One way. Where it cannot be taken `step_s` is None and `reason` says why."""

    name: str
    text: str
    reason: str  # '' where it can be taken
    step_s: float | None  # predicted, of the whole batch
    samples_per_s: float | None
    peak_bytes: tuple[int, ...]  # of each device; () where it cannot be taken
    bound_s: float | None  # no plan of this kind takes less; None: nothing is proven
    gap: float | None  # step / bound - 1
    exactness: str  # against plain training of the whole batch: 'bit-equal' or 'up to rounding'
    deviations: tuple[str, ...]  # how its numbers differ beyond that
    command: str  # what runs it; '' where there is none
    note: str = ""  # how it is run where there is no command, and what else to know


@dataclass(frozen=True, slots=True)
class Ways(PrintedAnswer):
    """All ways, the fastest first, those that cannot be taken last."""

    loadmaster: str  # always 'ways'
    schema: int
    source: str
    graph: str
    batch: int | None
    devices: tuple[str, ...]
    memory_bytes: tuple[int, ...]  # what may be used of each
    best: str | None  # the fastest that keeps the numbers; None: no way fits
    ways: tuple[Way, ...]
