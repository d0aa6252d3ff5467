"""Trial run: some steps of a launched plan on synthetic data, predicted beside measured."""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from loadmaster.core.answers.run_report import SCHEMA_VERSION, LinkRan, Pair, PipelineRan, StageRan
from loadmaster.core.answers.strategy_report import SCHEMA_VERSION as STRATEGY_SCHEMA
from loadmaster.core.answers.strategy_report import RankRan, StrategyRan
from loadmaster.core.errors import PlanError
from loadmaster.core.graph import Graph
from loadmaster.core.placement import Placement
from loadmaster.core.problem import Objective
from loadmaster.core.strategy_answer import StrategyAnswer
from loadmaster.core.timeline import Timeline
from loadmaster.runtime.distributed import checkpoints
from loadmaster.runtime.distributed.pipeline_run import PipelineRun
from loadmaster.runtime.distributed.strategy_run import StrategyRun
from loadmaster.simulator.pipelines.unrolled import simulate_step

Tell = Callable[[int, float, float, dict[str, int]], None]


@dataclass(frozen=True, slots=True)
class _Trained:
    """What some steps gave."""

    asked: int
    seconds: list[float]
    losses: list[float]
    ended: str
    saved: str | None

    @property
    def notes(self) -> list[str]:
        """What is worth a word."""
        if self.seconds or self.saved is None:
            return []
        return [f"{self.saved} has all {self.asked} steps already; ask for more to go on from it"]

    @property
    def shown_losses(self) -> tuple[float | None, ...]:
        """Losses as JSON can hold them."""
        return tuple(loss if math.isfinite(loss) else None for loss in self.losses)

    @property
    def step_s(self) -> float | None:
        """The median of all steps but the first, where there are others."""
        return median(self.seconds[1:] or self.seconds) if self.seconds else None


@dataclass(frozen=True, slots=True, eq=False)
class PredictedStep:
    """A step of micro-batches as it was simulated, and the flat graph that its spans speak of."""

    timeline: Timeline
    graph: Graph


@dataclass(frozen=True, slots=True, eq=False)
class StrategyOutcome:
    """What came of a strategy."""

    ran: StrategyRan
    answer: StrategyAnswer
    measured: Timeline
    predicted: PredictedStep | None = None

    @property
    def graph(self) -> Graph:
        """What was trained."""
        return self.answer.problem.graph


@dataclass(frozen=True, slots=True, eq=False)
class PipelineOutcome:
    """What came of it."""

    ran: PipelineRan
    placement: Placement
    predicted: PredictedStep | None
    measured: Timeline

    @property
    def graph(self) -> Graph:
        """What was trained."""
        return self.placement.problem.graph


def run_steps(
    run: PipelineRun | StrategyRun,
    steps: int,
    tell: Tell,
    *,
    source: str,
    checkpoint: str | None = None,
    every: int = 0,
) -> PipelineOutcome | StrategyOutcome:
    """Train; with a folder go on from its newest checkpoint, and write more there."""
    saved: str | None = None
    if checkpoint is not None:
        newest = checkpoints.find_latest(Path(checkpoint))
        if newest is not None:
            run.load(newest)
            saved = str(newest)
    seconds: list[float] = []
    losses: list[float] = []
    ended = "done"
    for number in range(run.steps_done + 1, steps + 1):
        begun = time.perf_counter()
        loss = run.synthetic_step()
        seconds.append(time.perf_counter() - begun)
        losses.append(loss)
        tell(number, seconds[-1], loss, {})
        if not math.isfinite(loss):
            ended = f"loss is {loss}"
            break
        if checkpoint is not None and (number == steps or (every and number % every == 0)):
            saved = run.save(checkpoint)
    trained = _Trained(steps, seconds, losses, ended, saved)
    if isinstance(run, StrategyRun):
        return _report_strategy(run, trained, source)
    return _report_pipeline(run, trained, source)


def _report_pipeline(run: PipelineRun, trained: _Trained, source: str) -> PipelineOutcome:
    placement, layout = run.placement, run.layout
    assert placement.plan is not None, "it ran"
    pipeline = placement.plan.pipeline
    assert pipeline is not None, "it ran as a pipeline"
    times, reports, measured = run.stage_times(), run.reports(), run.timeline()
    rows = tuple(
        StageRan(
            one.stage,
            one.rank,
            one.device,
            reports[one.rank]["where"],
            Pair(float(pipeline.stage_s[one.stage]), one.forward_s + one.backward_s),
            one.forward_s,
            one.backward_s,
            one.update_s,
            one.bubble_share,
            reports[one.rank]["weight_bytes"],
        )
        for one in times
    )
    bubbles = {one.rank: one.bubble_share for one in times}
    used = sorted({device for row in layout.device for device in row})
    links = tuple(
        LinkRan(
            one.stage,
            one.to_stage,
            one.rank,
            one.to_rank,
            one.num_bytes,
            Pair(one.predicted_s, one.measured_s),
        )
        for one in run.link_times()
    )
    predicted = _predict_step(placement) if run.rank == 0 else None  # after all that ranks do together
    whole = predicted.timeline.step_s if predicted is not None else _predicted_step_s(placement)
    expected = 0.0
    if predicted is not None and whole:
        expected = float(np.mean(1.0 - predicted.timeline.busy_s[used] / whole))
    ran = PipelineRan(
        loadmaster="pipeline run",
        schema=SCHEMA_VERSION,
        source=source,
        graph=placement.problem.graph.name,
        placement_digest=placement.digest,
        processes=layout.world,
        replicas=layout.num_replicas,
        schedule=layout.schedule,
        num_microbatches=sum(layout.micro_batches),
        steps_asked=trained.asked,
        steps_done=run.steps_done,
        ended=trained.ended,
        losses=trained.shown_losses,
        step_times_s=tuple(trained.seconds),
        step_s=Pair(whole, trained.step_s),
        bubble_share=Pair(expected, sum(bubbles.values()) / len(bubbles) if bubbles else None),
        stages=rows,
        sent_bytes=sum(size for report in reports for _, _, size in report["sent"]),
        checkpoint=trained.saved,
        notes=_collect_notes(trained, reports),
        links=links,
    )
    return PipelineOutcome(ran, placement, predicted, measured)


def _predict_step(placement: Placement) -> PredictedStep | None:
    """The simulated step, also of a plan that was asked for a steady state.

    None where it cannot be unrolled: a plan made by hand may run all the same.
    """
    assert placement.plan is not None, "it ran"
    try:
        timeline, flat = simulate_step(placement.problem, placement.plan)
    except PlanError:
        return None
    return PredictedStep(timeline, flat.problem.graph)


def _collect_notes(trained: _Trained, reports: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Of the run and of its ranks, each once."""
    return tuple(dict.fromkeys([*trained.notes, *(note for report in reports for note in report["notes"])]))


def _report_strategy(run: StrategyRun, trained: _Trained, source: str) -> StrategyOutcome:
    answer, layout, reports = run.answer, run.layout, run.reports()
    names, drift = answer.problem.cluster.device_name, run.drift()
    ranks = []
    for rank, report in enumerate(reports):
        took: Counter[str] = Counter()
        for work, _, _, begin, end in report["spans"]:
            took[work] += end - begin
        own = [one for one in layout.shares if rank in one.ranks]
        ranks.append(
            RankRan(
                rank=rank,
                device=names[layout.device_of(rank)],
                where=report["where"],
                rows=tuple(one.rows[one.ranks.index(rank)] for one in own),
                forward_s=took["F"],
                backward_s=took["B"],
                waited_s=took["WAIT"],
                meeting_s=took["REDUCE"],
                update_s=took["UPDATE"],
                weight_bytes=report["weight_bytes"],
                sent_bytes=sum(size for _, _, size in report["sent"]),
            )
        )
    ran = StrategyRan(
        loadmaster="strategy run",
        schema=STRATEGY_SCHEMA,
        source=source,
        graph=answer.problem.graph.name,
        answer_digest=answer.digest,
        strategy=answer.strategy.name,
        processes=layout.world,
        groups=len(answer.strategy.groups),
        steps_asked=trained.asked,
        steps_done=run.steps_done,
        ended=trained.ended,
        losses=trained.shown_losses,
        step_times_s=tuple(trained.seconds),
        step_s=Pair(answer.score_s, trained.step_s),
        ranks=tuple(ranks),
        sent_bytes=dict(sorted(run.sent_bytes().items())),
        comparisons=drift.checks,
        largest_drift=drift.largest,
        drifted_weight=drift.weight,
        checkpoint=trained.saved,
        notes=_collect_notes(trained, reports),
    )
    return StrategyOutcome(ran, answer, run.timeline())


def _predicted_step_s(placement: Placement) -> float:
    """Of a step; of a plan that was scored by its slowest stage, that times the micro-batches."""
    assert placement.plan is not None, "it ran"
    score, pipeline = placement.score_s or 0.0, placement.plan.pipeline
    if placement.problem.objective == Objective.STEP or pipeline is None:
        return score
    return score * (pipeline.num_microbatches + len(pipeline.replicas) - 1)
