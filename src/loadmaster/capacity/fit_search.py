"""Fit search: the steps, problems and plans that the answer to one `fit` question is made of.

A source is read once for each setting, a problem is built from what was read, and a plan is looked for within
a budget.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from loadmaster.capacity.accumulate import with_accumulated_gradients
from loadmaster.capacity.scale import scale_graph
from loadmaster.capacity.step_setting import StepSetting, describe_capture, guess_batches
from loadmaster.core.cluster import Cluster
from loadmaster.core.placement import Placement, Status
from loadmaster.core.problem import Objective, Problem, Workload
from loadmaster.core.question import Question
from loadmaster.core.run import Budget, ignore_progress
from loadmaster.placers.ask import PlanRequest, find_placement
from loadmaster.placers.registry import placer
from loadmaster.questions.problem import build_problem, read_workload


@dataclass(frozen=True, slots=True, eq=False)
class FitSearch:
    """One question about fitting, and what was read for it so far."""

    question: Question
    budget: Budget  # of each search of a plan
    is_model: bool  # captured, so that every setting can be changed
    say: Callable[[str, float], None] = ignore_progress
    known: dict[StepSetting, Workload] = field(default_factory=dict)

    def workload(self, setting: StepSetting) -> Workload:
        """What the source is under a setting; passes differ in their graph only."""
        key = replace(setting, passes=1)
        if not self.is_model:  # optimizer and precision are applied to what was read
            key = StepSetting(batch=setting.batch, seq=setting.seq)
        if key not in self.known:
            self.say(describe_capture(key) if self.is_model else "reading", 0.0)
            self.known[key] = self._read(key)
        workload = self.known[key]
        return (
            workload
            if setting.passes == 1
            else replace(workload, graph=with_accumulated_gradients(workload.graph))
        )

    def problem(self, setting: StepSetting, cluster: Cluster | None) -> Problem:
        """The step on devices; None: those that the source brings."""
        return self._build(setting, self.workload(setting), cluster)

    def guess(self, setting: StepSetting, batch: int, cluster: Cluster) -> Problem | None:
        """The step at another batch, its sizes on a line through two others; None: there is none."""
        assert setting.batch is not None
        low, high = guess_batches(setting.batch)
        one, other = (self.workload(replace(setting, batch=b)).graph for b in (low, high))
        graph = scale_graph(one, other, low, high, batch)
        return None if graph is None else self._build(setting, Workload(graph), cluster)

    def find_placement(self, problem: Problem) -> Placement:
        """Memory comes first; where that finds nothing and nothing is proven, every algorithm."""
        first = self._ask("memory_first", problem)
        return first if first.fits or first.status == Status.INFEASIBLE else self._ask("auto", problem)

    def _read(self, setting: StepSetting) -> Workload:
        asked = replace(
            self.question,
            batch=setting.batch,
            seq=setting.seq,
            optimizer=setting.optimizer,
            precision=setting.precision,
            target=setting.target,
            recompute=setting.recompute,
        )
        return read_workload(asked)

    def _build(self, setting: StepSetting, workload: Workload, cluster: Cluster | None) -> Problem:
        """A workload on devices; a captured one has its optimizer and its precision already."""
        asked = Question(workload, cluster, Objective.STEP, reserve_bytes=self.question.reserve_bytes)
        if not self.is_model:
            asked = replace(asked, optimizer=setting.optimizer, precision=setting.precision)
        return build_problem(asked)

    def _ask(self, algorithm: str, problem: Problem) -> Placement:
        return find_placement(
            problem, PlanRequest(placer(algorithm), self.budget, progress=self._say_compiling)
        )

    def _say_compiling(self, message: str, share: float) -> None:
        if "compiling" in message:  # what single algorithms do is of no interest here
            self.say(message, share)
