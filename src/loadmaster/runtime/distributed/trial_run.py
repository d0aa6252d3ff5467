"""Trial run: some steps of a launched pipeline on synthetic data, predicted beside measured."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from loadmaster.core.answers.run_report import SCHEMA_VERSION, Pair, PipelineRan, StageRan
from loadmaster.core.placement import Placement
from loadmaster.core.problem import Objective
from loadmaster.core.timeline import Timeline
from loadmaster.runtime.distributed import checkpoints
from loadmaster.runtime.distributed.launch import PipelineRun

Tell = Callable[[int, float, float, dict[str, int]], None]


@dataclass(frozen=True, slots=True, eq=False)
class PipelineOutcome:
    """What came of it."""

    ran: PipelineRan
    placement: Placement
    predicted: Timeline | None
    measured: Timeline


def run_steps(
    run: PipelineRun,
    steps: int,
    tell: Tell,
    *,
    source: str,
    predicted: Timeline | None = None,
    checkpoint: str | None = None,
    every: int = 0,
) -> PipelineOutcome:
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
    return _report(run, steps, seconds, losses, ended, source, predicted, saved)


def _report(
    run: PipelineRun,
    steps: int,
    seconds: list[float],
    losses: list[float],
    ended: str,
    source: str,
    predicted: Timeline | None,
    saved: str | None,
) -> PipelineOutcome:
    placement, layout = run.placement, run.layout
    assert placement.plan is not None, "it ran"
    pipeline = placement.plan.pipeline
    assert pipeline is not None, "it ran as a pipeline"
    times, reports = run.stage_times(), run.reports()
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
    whole = predicted.step_s if predicted is not None else _predicted_step_s(placement)
    measured = run.timeline()
    bubbles = {one.rank: one.bubble_share for one in times}
    used = sorted({device for row in layout.device for device in row})
    expected = 0.0
    if predicted is not None and predicted.step_s:
        expected = float(np.mean(1.0 - predicted.busy_s[used] / predicted.step_s))
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
        steps_asked=steps,
        steps_done=run.steps_done,
        ended=ended,
        losses=tuple(loss if math.isfinite(loss) else None for loss in losses),
        step_times_s=tuple(seconds),
        step_s=Pair(whole, median(seconds[1:] or seconds) if seconds else None),
        bubble_share=Pair(expected, sum(bubbles.values()) / len(bubbles) if bubbles else None),
        stages=rows,
        sent_bytes=sum(size for report in reports for _, _, size in report["sent"]),
        checkpoint=saved,
        notes=tuple(dict.fromkeys(note for report in reports for note in report["notes"])),
    )
    return PipelineOutcome(ran, placement, predicted, measured)


def _predicted_step_s(placement: Placement) -> float:
    """Of a step; of a plan that was scored by its slowest stage, that times the micro-batches."""
    assert placement.plan is not None, "it ran"
    score, pipeline = placement.score_s or 0.0, placement.plan.pipeline
    if placement.problem.objective == Objective.STEP or pipeline is None:
        return score
    return score * (pipeline.num_microbatches + len(pipeline.replicas) - 1)
