"""Answers to questions about a plan: why it is so (`Explanation`), what changed (`Difference`), what if
(`Outcomes`).

Every number in them was simulated or planned for, none is guessed; `loadmaster explain|diff|whatif --json`
prints them.
"""

from dataclasses import dataclass

from loadmaster.core.notebook import PrintedAnswer


@dataclass(frozen=True, slots=True)
class Changed:
    """What came of one change."""

    name: str  # in words that `whatif` takes
    time_s: float | None  # None: no plan fits, or it could not be asked
    per_sample_s: float | None
    bound_s: float
    peak_bytes: tuple[int, ...]
    devices: tuple[str, ...]
    note: str
    value: str = ""  # of a sweep


@dataclass(frozen=True, slots=True)
class Outcomes(PrintedAnswer):
    """Changes side by side."""

    before_s: float | None  # the plan as it is
    rows: tuple[Changed, ...]
    sweep: str = ""  # what was swept over, '' = single changes
    lead: str = ""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """An op or a module on another device, all else where it is."""

    device: str
    is_here: bool
    time_s: float | None  # None: it cannot run there
    moved_bytes: int  # sent between devices in a step
    over_bytes: int  # above the memory of the fullest device, 0 = fits
    over_device: str
    replanned_s: float | None  # the best plan found that has it there; None: none fits, or not asked
    note: str
    binds: str = ""  # what makes it worse there: 'memory of gpu1', 'link gpu0-gpu1', 'speed of cpu0'


@dataclass(frozen=True, slots=True)
class Explanation(PrintedAnswer):
    """Why a plan, or a part of it, is as it is."""

    target: str  # '' = the whole plan
    ops: tuple[str, ...]
    where: tuple[str, ...]
    time_s: float
    fits: bool
    own_s: float  # seconds the ops of the target take
    critical_s: float  # of which on the critical path
    reasons: tuple[str, ...]  # sentences
    elsewhere: tuple[Elsewhere, ...]
    changes: tuple[Changed, ...]  # single changes, the best first


@dataclass(frozen=True, slots=True)
class MovedModule:
    """A module whose ops are elsewhere in the other plan."""

    module: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    num_ops: int
    seconds: float  # in the first plan
    resident_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceDifference:
    """One device in both plans; None: it is not there."""

    name: str
    busy_s: tuple[float | None, float | None]
    peak_bytes: tuple[int | None, int | None]
    num_ops: tuple[int | None, int | None]


@dataclass(frozen=True, slots=True)
class Difference(PrintedAnswer):
    """Two plans of one model."""

    names: tuple[str, str]
    time_s: tuple[float, float]
    fits: tuple[bool, bool]
    sent_bytes: tuple[int, int]
    num_ops: tuple[int, int]
    num_matched: int  # ops found in both
    how_matched: tuple[tuple[str, int], ...]
    num_moved: int
    modules: tuple[MovedModule, ...]
    devices: tuple[DeviceDifference, ...]
    notes: tuple[str, ...]
