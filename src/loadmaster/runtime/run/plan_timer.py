"""Measured evaluations: a plan is placed for real, some steps are run and timed, and that is its score.

    timer = PlanTimer(problem, rebuilt)    timer.score(plan) -> Score    timer.measured -> an entry a plan

A plan that the simulator finds too large is not run. One that fails or runs out of memory on its devices has
no time, and the search goes on: it is counted like any other. A plan whose first steps are hopeless against
the best is given up early. Plans with the same devices are timed once. The noise of a time is the spread of
its steps over the root of their number.
"""

import copy
import gc
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import numpy as np
import torch

from loadmaster.core.errors import InputError, LoadmasterError
from loadmaster.core.placement import Placement, Status
from loadmaster.core.plan import Plan, in_graph_order
from loadmaster.core.problem import Objective, Problem
from loadmaster.core.run import Score
from loadmaster.runtime.place_request import place_on_plan
from loadmaster.runtime.run.launch import RebuiltModel
from loadmaster.runtime.run.running import find_input_device
from loadmaster.runtime.run.training import Training
from loadmaster.simulator.events.engine import prepare

WARM_STEPS = 2
_HOPELESS = 1.5  # times the best: given up after one timed step
_TO_SIGMA = 1.4826  # of a median of absolute deviations


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """What came of one evaluation."""

    digest: str  # of the devices
    step_s: float  # inf: it failed
    noise_s: float  # standard error of the step
    steps: tuple[float, ...]
    simulated_s: float
    note: str = ""


@dataclass(slots=True)
class PlanTimer:
    """Runs plans of one problem."""

    problem: Problem
    rebuilt: RebuiltModel
    repeats: int = 5
    seed: int = 0
    tell: Callable[[MeasuredPlan], None] = lambda _measured: None
    measured: list[MeasuredPlan] = field(default_factory=list)
    _known: dict[bytes, tuple[Score, MeasuredPlan]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what cannot be timed."""
        if isinstance(self.repeats, bool) or not isinstance(self.repeats, int) or self.repeats < 1:
            raise InputError(f"repeats is {self.repeats!r}; give a whole number >= 1")
        if self.problem.objective != Objective.STEP or self.problem.pipeline:
            raise InputError("measured evaluations time a step; ask for --objective step, without a pipeline")

    @property
    def best_s(self) -> float:
        """The fastest step so far."""
        return min((one.step_s for one in self.measured), default=math.inf)

    @property
    def summary(self) -> str:
        """How many plans were evaluated, and how sure their times are."""
        ran = [one for one in self._known.values() if one[1].steps]
        failed = len(self._known) - len(ran)
        return (
            f"{len(self.measured)} evaluations on this machine, {len(ran)} different plans run,"
            f" {failed} not run or failed, noise {100 * self.noise:.1f} %"
        )

    @property
    def noise(self) -> float:
        """Median relative noise of what was measured."""
        known = [one.noise_s / one.step_s for one in self.measured if 0 < one.step_s < math.inf]
        return median(known) if known else 0.0

    def score(self, plan: Plan) -> Score:
        """The measured score of a plan, as torch runs it: in the captured order."""
        key = plan.device.tobytes()
        if key not in self._known:
            self._known[key] = self._measure(in_graph_order(plan))
        score, found = self._known[key]
        self.measured.append(found)
        self.tell(found)
        return score

    def arrange(self, plan: Plan) -> tuple[Plan, Score]:
        """The plan in the captured order, and its score."""
        return in_graph_order(plan), self.score(plan)

    def _measure(self, plan: Plan) -> tuple[Score, MeasuredPlan]:
        simulated = prepare(self.problem).score(plan)
        digest = plan.digest[:12]
        if simulated.overflow_bytes:
            note = "not run: too large by the simulator"
            return simulated, MeasuredPlan(digest, math.inf, 0.0, (), simulated.time_s, note)
        note, steps = "", []
        try:
            steps = self._run(plan, simulated)
        except (LoadmasterError, torch.OutOfMemoryError, RuntimeError, ValueError) as trouble:
            told = str(trouble).strip().partition("\n")[0]
            note = f"failed: {told or type(trouble).__name__}"
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if not steps:
            failed = Score(1, math.inf, simulated.peak_bytes)  # fits on paper, but gave no time
            return failed, MeasuredPlan(digest, math.inf, 0.0, (), simulated.time_s, note)
        step_s = float(median(steps))
        spread = _TO_SIGMA * float(np.median(np.abs(np.array(steps) - step_s)))
        if len(steps) < self.repeats:
            note = f"given up after {len(steps)} of {self.repeats} steps"
        noise_s = spread / math.sqrt(len(steps))
        found = MeasuredPlan(digest, step_s, noise_s, tuple(steps), simulated.time_s, note)
        return Score(0, step_s, simulated.peak_bytes), found

    def _run(self, plan: Plan, simulated: Score) -> list[float]:
        """Seconds of the timed steps of a copy of the model."""
        placement = placement_of(self.problem, plan, simulated)
        model = copy.deepcopy(self.rebuilt.model)
        wishes = {"loss": self.rebuilt.loss, "on_nan": None}
        placed = place_on_plan(model, placement, wishes)  # type: ignore[arg-type]
        training = Training(placed, self.rebuilt.task, self.seed, find_input_device(placement, placed))
        for _ in range(WARM_STEPS):
            training.step()
        steps: list[float] = []
        while len(steps) < self.repeats:
            steps.append(training.step()[0])
            if steps[0] > _HOPELESS * self.best_s:
                break
        return steps


def placement_of(problem: Problem, plan: Plan, score: Score) -> Placement:
    """A plan as a placement that can be placed."""
    return Placement(
        problem=problem,
        plan=plan,
        algorithm="measured",
        status=Status.FEASIBLE,
        score_s=score.time_s,
        bound_s=0.0,
        bound_name="none",
        proof="",
        shortfall_bytes=np.zeros(problem.cluster.num_devices, dtype=np.int64),
        peak_bytes=np.array(score.peak_bytes, dtype=np.int64),
        least_overflow_plan=None,
        members=(),
        wall_s=0.0,
    )
