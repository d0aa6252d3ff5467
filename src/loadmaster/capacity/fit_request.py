"""Asking: from what the user wrote to settings, devices, and an Asker that reads, poses and searches.

`pose` and `search` are `api.problem` and `api.plan`: they stand above this room and are handed in.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from loadmaster.capacity.fit import assess_fit
from loadmaster.capacity.step_setting import Asker, Setting
from loadmaster.cluster.parse import parse_cluster, with_reserve
from loadmaster.core.cluster import Cluster
from loadmaster.core.fit_answer import Fit
from loadmaster.core.placement import Placement, Status
from loadmaster.core.problem import Objective, Problem, Workload
from loadmaster.core.run import Budget
from loadmaster.graph.capture import DEFAULT_OPTIMIZER
from loadmaster.graph.models import DEFAULT_BATCH, DEFAULT_SEQ, CaptureOptions
from loadmaster.graph.source import is_model, read_source

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Question:
    """What `fit` was asked; see `api.fit`."""

    source: Any
    devices: Any
    batch: int | None
    seq: int | None
    optimizer: str | None
    precision: str
    reserve_bytes: int
    format: str | None
    max_bytes: int

    @property
    def is_model(self) -> bool:
        """Whether the source is captured, so that every setting can be changed."""
        return is_model(self.source)

    @property
    def setting(self) -> Setting:
        """How the step is run, with the defaults of named models."""
        named = self.is_model and self.source.startswith(("hf:", "zoo:"))
        return Setting(
            batch=DEFAULT_BATCH if named and self.batch is None else self.batch,
            seq=DEFAULT_SEQ if named and self.seq is None else self.seq,
            optimizer=self.optimizer or (DEFAULT_OPTIMIZER if named else None),
            precision=self.precision,
        )

    @property
    def title(self) -> str:
        """What to call the source."""
        graph = getattr(self.source, "graph", self.source)
        return str(getattr(graph, "name", graph))

    def read(self, setting: Setting) -> Workload:
        """The source under a setting."""
        asked = CaptureOptions(setting.batch, setting.seq)
        if self.is_model:
            asked = replace(
                asked,
                optimizer=setting.optimizer,
                precision=setting.precision,
                target=setting.target,
                recompute=setting.recompute,
            )
        return read_source(self.source, format=self.format, max_bytes=self.max_bytes, asked=asked)


def answer_question(
    question: Question,
    pose: Callable[..., Problem],
    search: Callable[..., Placement],
    *,
    budget: Budget,
    quick: bool,
    every: bool,
    progress: Progress,
) -> Fit:
    """Read what must be read, and answer."""
    devices, reserve = question.devices, question.reserve_bytes
    cluster = parse_cluster(devices, max_bytes=question.max_bytes) if devices is not None else None
    asker = Asker(
        read=question.read,
        pose=_make_poser(pose, reserve_bytes=reserve, is_model=question.is_model),
        find=_make_finder(search, budget, progress),
        is_model=question.is_model,
        say=progress,
    )
    setting = question.setting
    if not question.is_model:
        workload = asker.workload(setting)
        cluster = workload.cluster if cluster is None else cluster
        setting = replace(setting, optimizer=setting.optimizer or workload.optimizer)
    if cluster is not None and reserve:
        cluster = with_reserve(cluster, reserve)
    return assess_fit(
        asker, question.title, setting, cluster, named=devices is not None, quick=quick, every=every
    )


def _make_poser(
    pose: Callable[..., Problem], *, reserve_bytes: int, is_model: bool
) -> Callable[[Setting, Workload, Cluster | None], Problem]:
    """A workload on devices; a captured one has its optimizer and its precision already."""

    def posed(setting: Setting, workload: Workload, cluster: Cluster | None) -> Problem:
        if is_model:
            return pose(workload, cluster, Objective.STEP, reserve_bytes=reserve_bytes)
        chosen = {"optimizer": setting.optimizer, "precision": setting.precision}
        return pose(workload, cluster, Objective.STEP, reserve_bytes=reserve_bytes, **chosen)

    return posed


def _make_finder(
    search: Callable[..., Placement], budget: Budget, progress: Progress
) -> Callable[[Problem], Placement]:
    """Memory comes first; where that finds nothing and nothing is proven, every algorithm."""

    def say(message: str, share: float) -> None:
        if "compiling" in message:  # what single algorithms do is of no interest here
            progress(message, share)

    def found(problem: Problem) -> Placement:
        first = search(problem, algorithm="memory_first", budget=budget, progress=say)
        if first.fits or first.status == Status.INFEASIBLE:
            return first
        return search(problem, algorithm="auto", budget=budget, progress=say)

    return found
