"""How long a job takes on n devices of a kind: no shape is assumed, every point is data."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from loadmaster.core.errors import InputError

HOST, SPREAD = "host", "spread"
ANY_KIND = ""


@dataclass(frozen=True, slots=True, eq=False)
class ScalingCurve:
    """Seconds by (kind, number of devices, form); a missing point is a number the job cannot run on.

    A form is `host` (all devices on one host), `spread` (over hosts) or the name of a block's shape. A
    point of the kind
    '' holds on every kind; `host` stands in for a form that has no point of its own, except for `spread`
    where spread points are given.
    """

    seconds: Mapping[tuple[str, int, str], float]
    origin: str = "given"  # measured, simulated, given, unknown
    rel_error: float = 0.05  # one standard deviation of the times
    warnings: tuple[str, ...] = ()
    _has_spread: bool = field(default=False, init=False)
    degrees: tuple[int, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        """Positive times on whole numbers of devices."""
        for (kind, count, form), time in self.seconds.items():
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise InputError(f"a curve has {count!r} devices; give whole numbers >= 1")
            if not math.isfinite(time) or time <= 0:
                raise InputError(
                    f"a job takes {time!r} s on {count} device{'s' * (count > 1)}{_where(kind, form)};"
                    " give a time > 0"
                )
        if not 0 <= self.rel_error < 10:
            raise InputError(f"the error of a curve is {self.rel_error!r}; give a share such as 0.05")
        object.__setattr__(self, "_has_spread", any(form == SPREAD for _, _, form in self.seconds))
        object.__setattr__(self, "degrees", tuple(sorted({count for _, count, _ in self.seconds})))

    def time(self, count: int, kind: str = ANY_KIND, form: str = HOST) -> float:
        """Seconds on a block; inf where the job cannot run."""
        for k in (kind, ANY_KIND):
            if (found := self.seconds.get((k, count, form))) is not None:
                return found
            stands_in = form != SPREAD or not self._has_spread
            if stands_in and (found := self.seconds.get((k, count, HOST))) is not None:
                return found
        return math.inf

    def best(self, count: int) -> float:
        """Seconds on the best kind and form."""
        return min((t for (_, n, _), t in self.seconds.items() if n == count), default=math.inf)

    @property
    def fastest_s(self) -> float:
        """Seconds on the best of all."""
        return min(self.seconds.values(), default=math.inf)

    def findings(self) -> tuple[str, ...]:
        """Points that are unusual: more devices that are slower, or more than proportionally faster."""
        notes = list(self.warnings)
        for few, many in zip(self.degrees, self.degrees[1:], strict=False):
            a, b = self.best(few), self.best(many)
            if b > a:
                notes.append(f"{many} devices are slower than {few}")
            elif a / b > 1.1 * many / few:
                notes.append(f"{many} devices are {a / b:.1f} times as fast as {few}: more than proportional")
        return tuple(notes)


def _where(kind: str, form: str) -> str:
    return f" of {kind} ({form})" if kind else ""


def measured_curve(times: Mapping[int, float], *, rel_error: float = 0.05) -> ScalingCurve:
    """A curve from seconds by number of devices."""
    for n, t in times.items():
        whole = isinstance(n, int | float | np.number) and not isinstance(n, bool) and n == int(n)
        if not whole or isinstance(t, bool) or not isinstance(t, int | float | np.number):
            raise InputError(
                f"a measured curve has {t!r} s on {n!r} devices; give numbers of seconds by whole numbers"
            )
    return ScalingCurve({(ANY_KIND, int(n), HOST): float(t) for n, t in times.items()}, "measured", rel_error)
