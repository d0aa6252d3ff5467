"""Placement: a placer's answer, with its proof or its reasons."""

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from loadmaster.core.arrays import Longs, require_range, set_column
from loadmaster.core.errors import PlanError
from loadmaster.core.plan import Plan
from loadmaster.core.problem import Problem

if TYPE_CHECKING:
    from loadmaster.core.device_map import DeviceMap
    from loadmaster.core.notebook import Picture


class Status(StrEnum):
    """What is known about an answer: optimal, feasible, infeasible (proven) or not_found."""

    OPTIMAL = "optimal"  # proven in the simulator's own semantics
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"  # proven: `proof` holds the certificate
    NOT_FOUND = "not_found"  # searched, nothing fits; `least_overflow_plan` came closest


@dataclass(frozen=True, slots=True)
class Member:
    """One algorithm of a portfolio and how it did."""

    name: str
    status: Status | None  # None = not tried
    score_s: float | None
    seconds: float
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """The answer to a problem: a plan with its score and bound. `plan` is None if no plan fits."""

    problem: Problem
    plan: Plan | None
    algorithm: str
    status: Status
    score_s: float | None
    bound_s: float
    bound_name: str
    proof: str  # the certificate of optimal or infeasible; not found: what the nearest plan breaks or lacks
    shortfall_bytes: Longs  # [D] bytes lacking on each device; zeros when it fits
    peak_bytes: Longs  # [D] of the plan, or of the least overflow
    least_overflow_plan: Plan | None
    members: tuple[Member, ...]
    wall_s: float
    guarantee: str = ""  # what theory promises of the algorithm here, '' = nothing

    def __post_init__(self) -> None:
        """Check that status, plan and score agree."""
        if not isinstance(self.problem, Problem):
            raise PlanError(f"Placement.problem is a {type(self.problem).__name__}; needs a Problem")
        if self.status not in list(Status):
            raise PlanError(f"Placement.status: {self.status!r} is none of {', '.join(Status)}")
        object.__setattr__(self, "status", Status(self.status))
        devices = self.problem.cluster.num_devices
        for field in ("shortfall_bytes", "peak_bytes"):
            set_column(self, field, np.int64, (devices,), PlanError)
            require_range(getattr(self, field), 0, 2**63 - 1, f"Placement.{field}", PlanError)
        _require_seconds(self, "bound_s", "wall_s", *(("score_s",) if self.score_s is not None else ()))
        fits = self.status in (Status.OPTIMAL, Status.FEASIBLE)
        if fits != (self.plan is not None) or fits != (self.score_s is not None):
            raise PlanError(
                f"Placement.status is {self.status}, Placement.plan is {'' if self.plan else 'not '}there and"
                f" Placement.score_s is {self.score_s}; plan and score belong to a status that fits"
            )
        if self.status in (Status.INFEASIBLE, Status.OPTIMAL) and not self.proof:
            raise PlanError(f"Placement.proof is empty; a placement that is {self.status} needs its proof")
        if self.score_s is not None and self.score_s < self.bound_s:
            raise PlanError(f"Placement.score_s is {self.score_s}, below the bound of {self.bound_s}")

    @property
    def fits(self) -> bool:
        """Whether there is a plan within every device's memory."""
        return self.plan is not None

    @property
    def gap(self) -> float | None:
        """score / bound - 1, or None without a plan or a positive bound."""
        if self.score_s is None or self.bound_s <= 0:
            return None
        return self.score_s / self.bound_s - 1.0

    @property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of question and answer; who searched how long is left out."""
        sha = hashlib.sha256(self.problem.digest.encode())
        for plan in (self.plan, self.least_overflow_plan):
            sha.update(plan.digest.encode() if plan is not None else b"none")
        claims = (self.status.value, self.score_s, self.bound_s, self.bound_name, self.peak_bytes.tolist())
        sha.update(repr(claims).encode())
        return sha.hexdigest()

    def to_device_map(self) -> "DeviceMap":
        """Hugging Face's dict of modules and devices, as `accelerate` takes it (`core/device_map.py`)."""
        if self.plan is None:
            raise PlanError(f"no plan was found ({self.status.value}), so there is no device map")
        return self.plan.to_device_map(self.problem)

    def plot(self) -> "Picture":
        """The Gantt of the plan, or of the one that came nearest, as a picture."""
        from loadmaster.core.notebook import picture_of

        if self.plan is None and self.least_overflow_plan is None:
            raise PlanError(f"no plan was found ({self.status.value}), so there is nothing to draw")
        return picture_of(self)

    def _repr_html_(self) -> str:
        from loadmaster.core.notebook import html_of

        return html_of(self)

    def __repr__(self) -> str:
        """One line; a placement holds whole graphs."""
        score = "no plan" if self.score_s is None else f"{self.score_s:.6g} s"
        return f"<Placement {self.status.value}: {score}, bound {self.bound_s:.6g} s ({self.bound_name})>"


def _require_seconds(placement: Placement, *fields: str) -> None:
    """Refuse what is not a finite number >= 0."""
    for field in fields:
        value = getattr(placement, field)
        if not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise PlanError(f"Placement.{field} is {value!r}; needs a finite number >= 0")
