"""Admits where a job is worth more than the devices it takes: a price of device time and of blocks that
are lost."""

import math
from dataclasses import dataclass, replace

from loadmaster.advisor.environments.engine import Kind, Rule
from loadmaster.advisor.jobs.job import Job
from loadmaster.advisor.jobs.state import REJECT, ClusterState, Decision
from loadmaster.advisor.policies.registry import Run
from loadmaster.core.errors import InputError


@dataclass(frozen=True, slots=True)
class ShadowPrice:
    """Value of a device second (0: the state's), and of a free block of each degree that is lost."""

    device_price: float = 0.0
    block_price: tuple[float, ...] = (0.0,) * 6

    def __post_init__(self) -> None:
        """Prices are not negative."""
        for price in (self.device_price, *self.block_price):
            if not 0 <= price < math.inf:
                raise InputError(f"policy shadow_price has a price of {price!r}; give a number >= 0")

    @property
    def rule(self) -> Rule:
        """For the compiled engine."""
        return Rule(Kind.PRICED, device_price=self.device_price, block_price=self.block_price)

    def __call__(self, job: Job, state: ClusterState, run: Run) -> Decision:
        """The largest value less price, if it is positive; the price is told in the note."""
        price = self.device_price or state.price
        degrees = sorted(state.layout.blocks)
        free = {n: [set(b.devices) for b in state.free_blocks(n)] for n in degrees}
        best, best_value, cheapest = REJECT, 0.0, math.inf
        for n in job.curve.degrees:
            for block in state.free_blocks(n):
                time = job.curve.time(n, block.kind, block.form)
                if time > job.deadline_s:
                    continue
                held = math.ceil(time / state.period_s) * state.period_s if state.period_s > 0 else time
                cost = price * n * held
                for m, extra in zip(degrees, self.block_price, strict=False):
                    if extra > 0:
                        cost += extra * sum(bool(b & set(block.devices)) for b in free[m])
                cheapest = min(cheapest, cost)
                if job.value - cost > best_value + 1e-12:
                    best_value, best = job.value - cost, Decision(n, block, note=f"{cost:.6g}")
        if price <= 0 and not any(self.block_price):
            told = "device time has no price, so every job in time is admitted; set a price in the state"
            return replace(best, warning=told)
        if best.admit or math.isinf(cheapest):
            return best
        return Decision(0, note=f"priced out: {cheapest:.6g}")


POLICY = ShadowPrice
