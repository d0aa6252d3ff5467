"""Step settings: how a step is run, what a question says of it, and batches to compare it with."""

from dataclasses import dataclass

from loadmaster.core.graph import Graph, Phase
from loadmaster.core.question import Question
from loadmaster.graph.capture import DEFAULT_OPTIMIZER
from loadmaster.graph.models import DEFAULT_SEQ
from loadmaster.graph.origin import DEFAULT_BATCH
from loadmaster.graph.source import is_model


@dataclass(frozen=True, slots=True)
class StepSetting:
    """What may differ from one step of a model to another; None is the source's own, or the default."""

    batch: int | None = None
    seq: int | None = None
    optimizer: str | None = None
    precision: str = "fp32"
    target: str | None = None  # kind of device whose kernels are meant
    recompute: bool = False
    passes: int = 1  # of `batch` samples each, their gradients added up


def setting_of(question: Question) -> StepSetting:
    """How the step of a question is run, with the defaults of named models."""
    source = question.source
    named = is_model(source) and str(source).startswith(("hf:", "zoo:", "keras:"))
    long = named and not str(source).startswith("keras:")  # Keras models are built for one length
    return StepSetting(
        batch=DEFAULT_BATCH if named and question.batch is None else question.batch,
        seq=DEFAULT_SEQ if long and question.seq is None else question.seq,
        optimizer=question.optimizer or (DEFAULT_OPTIMIZER if named else None),
        precision=question.precision,
    )


def guess_batches(batch: int) -> tuple[int, int]:
    """Two batches to draw a line through; a batch of 1 is seldom like the others."""
    return (batch, 2 * batch) if batch > 1 else (2, 4)


def is_training(graph: Graph) -> bool:
    """Whether the graph updates weights."""
    return bool((graph.phase == Phase.UPDATE).any())


def describe_capture(setting: StepSetting) -> str:
    """What to say while a step is captured."""
    words = ["capturing"]
    words += [f"batch {setting.batch}"] * (setting.batch is not None)
    words += [setting.precision] * (setting.precision != "fp32")
    words += [str(setting.optimizer)] * (setting.optimizer is not None)
    words += ["recomputing"] * setting.recompute
    return f"{words[0]} {', '.join(words[1:])}".strip()
