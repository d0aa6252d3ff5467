"""Setting: how a step is run, and the questions that may be asked of it without capturing anything twice."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from loadmaster.capacity.accumulate import with_accumulated_gradients
from loadmaster.capacity.scale import scale_graph
from loadmaster.core.cluster import Cluster
from loadmaster.core.graph import Graph, Phase
from loadmaster.core.placement import Placement
from loadmaster.core.problem import Problem, Workload
from loadmaster.core.run import ignore_progress


@dataclass(frozen=True, slots=True)
class Setting:
    """What may differ from one step of a model to another; None is the source's own, or the default."""

    batch: int | None = None
    seq: int | None = None
    optimizer: str | None = None
    precision: str = "fp32"
    target: str | None = None  # kind of device whose kernels are meant
    recompute: bool = False
    passes: int = 1  # of `batch` samples each, their gradients added up


@dataclass(frozen=True, slots=True, eq=False)
class Asker:
    """Reads a source under settings, each once, and makes problems of it."""

    read: Callable[[Setting], Workload]
    pose: Callable[[Setting, Workload, Cluster | None], Problem]
    find: Callable[[Problem], Placement]
    is_model: bool  # captured, so that every setting can be changed
    say: Callable[[str, float], None] = ignore_progress
    known: dict[Setting, Workload] = field(default_factory=dict)

    def workload(self, setting: Setting) -> Workload:
        """What the source is under a setting; passes differ in their graph only."""
        key = replace(setting, passes=1)
        if not self.is_model:  # optimizer and precision are applied to what was read
            key = Setting(batch=setting.batch, seq=setting.seq)
        if key not in self.known:
            self.say(_describe_capture(key) if self.is_model else "reading", 0.0)
            self.known[key] = self.read(key)
        workload = self.known[key]
        return (
            workload
            if setting.passes == 1
            else replace(workload, graph=with_accumulated_gradients(workload.graph))
        )

    def problem(self, setting: Setting, cluster: Cluster | None) -> Problem:
        """The step on devices; None: those that the source brings."""
        return self.pose(setting, self.workload(setting), cluster)

    def guess(self, setting: Setting, batch: int, cluster: Cluster) -> Problem | None:
        """The step at another batch, its sizes on a line through two others; None: there is none."""
        assert setting.batch is not None
        low, high = guess_batches(setting.batch)
        one, other = (self.workload(replace(setting, batch=b)).graph for b in (low, high))
        graph = scale_graph(one, other, low, high, batch)
        return None if graph is None else self.pose(setting, Workload(graph), cluster)


def guess_batches(batch: int) -> tuple[int, int]:
    """Two batches to draw a line through; a batch of 1 is seldom like the others."""
    return (batch, 2 * batch) if batch > 1 else (2, 4)


def is_training(graph: Graph) -> bool:
    """Whether the graph updates weights."""
    return bool((graph.phase == Phase.UPDATE).any())


def _describe_capture(setting: Setting) -> str:
    words = ["capturing"]
    words += [f"batch {setting.batch}"] * (setting.batch is not None)
    words += [setting.precision] * (setting.precision != "fp32")
    words += [str(setting.optimizer)] * (setting.optimizer is not None)
    words += ["recomputing"] * setting.recompute
    return f"{words[0]} {', '.join(words[1:])}".strip()
