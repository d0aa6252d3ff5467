"""What a user is told: admit or not, which devices, when it will be done, why, and what would do instead."""

from dataclasses import dataclass
from enum import StrEnum

from loadmaster.core.units import format_seconds


class Reason(StrEnum):
    """Why."""

    FITS = "fits"
    IMPOSSIBLE_DEADLINE = "impossible_deadline"
    NO_CAPACITY_UNTIL = "no_capacity_until"
    FRAGMENTED = "fragmented"
    PRICED_OUT = "priced_out"
    UNKNOWN_CURVE = "unknown_curve"


@dataclass(frozen=True, slots=True)
class Offer:
    """What would do: this many devices from this time, done by this deadline."""

    degree: int
    kind: str
    start_s: float
    deadline_s: float
    device_s: float

    def __str__(self) -> str:
        """One line."""
        kind = f" {self.kind}" if self.kind else ""
        when = "now" if self.start_s <= 0 else f"in {format_seconds(self.start_s)}"
        return f"{self.degree}{kind} starting {when}: done in {format_seconds(self.deadline_s)}"


@dataclass(frozen=True, slots=True)
class Advice:
    """Times are seconds from the state's clock."""

    admit: bool
    devices: tuple[int, ...]
    device_names: tuple[str, ...]
    start_s: float | None
    finish_s: float | None
    finish_interval_s: tuple[float, float] | None  # 90 %
    on_time_probability: float
    cost: float  # value of other jobs that the devices would have served
    code: Reason
    reason: str
    earliest_deadline_s: float | None  # that could be kept, at any number and start
    cheapest: Offer | None  # least device time that meets the deadline
    offers: tuple[Offer, ...]
    curve_origin: str
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Plain values."""

        def offer(o: Offer | None) -> dict[str, object] | None:
            names = ("degree", "kind", "start_s", "deadline_s", "device_s")
            return None if o is None else {name: getattr(o, name) for name in names}

        plain = {
            name: getattr(self, name)
            for name in self.__dataclass_fields__
            if name not in ("offers", "cheapest", "code")
        }
        return plain | {
            "code": self.code.value,
            "cheapest": offer(self.cheapest),
            "offers": [offer(o) for o in self.offers],
        }

    def __str__(self) -> str:
        """The reason, and offers where it is a no."""
        lines = [("admit: " if self.admit else "reject: ") + self.reason]
        if self.admit and self.finish_interval_s is not None:
            low, high = map(format_seconds, self.finish_interval_s)
            lines.append(f"devices: {', '.join(self.device_names)}")
            lines.append(f"done in {format_seconds(self.finish_s or 0)} (90 %: {low} to {high})")
        cheapest = self.cheapest if len(self.offers) > 1 else None
        for o in () if self.admit else self.offers:
            lines.append(f"would do: {o}{' (least device time)' if o == cheapest else ''}")
        return "\n".join(lines)
