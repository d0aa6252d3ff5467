"""One training session of the guide: models captured, episodes played, weights and curve written. [torch]

Episodes are played here, by processes, or by Ray's workers; the weights do not depend on which.
"""

import json
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from loadmaster.core.errors import InputError
from loadmaster.core.graph import Graph
from loadmaster.core.question import Question
from loadmaster.core.run import ignore_progress
from loadmaster.modules.threads import one_thread
from loadmaster.questions.problem import batch_of, build_problem
from loadmaster.strategies.guide_training import Settings, Workers, train
from loadmaster.strategies.learned.network import save_network

MODELS = ("zoo:vgg16@64", "zoo:resnet50@64", "hf:bert-base@32", "hf:gpt2@16")
_SEQ = 128


@dataclass(frozen=True, slots=True)
class Trained:
    """What came of it; losses are means of the first and the last ten rounds."""

    weights: Path
    curve: Path
    num_bytes: int
    seconds: float
    first_loss: float
    last_loss: float


def train_guide(
    out: Path,
    settings: Settings,
    *,
    models: Sequence[str] = MODELS,
    workers: int = 1,
    ray: bool = False,
    progress: Callable[[str, float], None] = ignore_progress,
) -> Trained:
    """Weights in `out` (a .safetensors file), and the loss of each round beside it."""
    if out.suffix != ".safetensors":
        raise InputError(
            f"weights go to a .safetensors file, not to {out.name!r}; name one, such as guide.safetensors"
        )
    for name, count in (("episodes", settings.episodes), ("replays", settings.replays), ("workers", workers)):
        if count < 1:
            raise InputError(f"{name} is {count}; it must be at least 1")
    out.parent.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    graphs = capture_graphs(models, progress)
    with one_thread(), _make_workers(workers, ray) as mapped:
        network, losses = train(graphs, settings, progress, mapped)
    notes = {"episodes": settings.episodes, "replays": settings.replays, "seed": settings.seed}
    notes["together"] = settings.together
    save_network(network, out, {name: str(value) for name, value in notes.items()})
    curve = out.with_suffix(".json")
    curve.write_text(json.dumps({**notes, "models": list(models), "losses": losses}) + "\n", encoding="utf-8")
    first, last = losses[:10], losses[-10:]
    return Trained(
        weights=out,
        curve=curve,
        num_bytes=out.stat().st_size,
        seconds=time.perf_counter() - started,
        first_loss=sum(first) / len(first),
        last_loss=sum(last) / len(last),
    )


def capture_graphs(
    models: Sequence[str], progress: Callable[[str, float], None] = ignore_progress
) -> list[tuple[Graph, int]]:
    """The step of each model with its batch; a batch may stand behind the name: `hf:gpt2@16`."""
    graphs = []
    for number, text in enumerate(models):
        progress(f"capturing {text}", number / len(models))
        name, at, count = text.rpartition("@")
        if at and not count.isdigit():
            raise InputError(f"the batch of {text!r} is not a number; write NAME@BATCH, such as hf:gpt2@16")
        source = name or count
        question = Question(
            source=source,
            devices="V100-16GB",
            batch=int(count) if at else None,
            seq=_SEQ if source.startswith("hf:") else None,
        )
        graph = build_problem(question).graph
        batch = batch_of(graph, question)
        if batch is None or batch < 2:
            raise InputError(
                f"{text!r} has a batch of {batch}; rows are shared from 2 on, such as {name or count}@16"
            )
        graphs.append((graph, batch))
    return graphs


@contextmanager
def _make_workers(workers: int, ray: bool) -> Iterator[Workers | None]:
    if ray:
        with _run_over_ray() as mapped:
            yield mapped
    elif workers == 1:
        yield None
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(
            workers, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            yield pool.map


@contextmanager
def _run_over_ray() -> Iterator[Workers]:
    """Ray's workers; a cluster that is started here ends here."""
    try:
        import ray
    except ImportError:
        raise InputError("--ray needs Ray, which is not installed: pip install 'loadmaster[ray]'") from None
    begins = not ray.is_initialized()
    if begins:
        ray.init(include_dashboard=False, log_to_driver=False)

    def mapped(play: Callable[[int], Any], numbers: Sequence[int]) -> Iterable[Any]:
        task = ray.remote(play.func)  # type: ignore[attr-defined]
        shared = [ray.put(value) for value in play.args]  # type: ignore[attr-defined]
        return [ray.get(one) for one in [task.remote(*shared, number) for number in numbers]]

    try:
        yield mapped
    finally:
        if begins:
            ray.shutdown()
