"""One training from nothing to a file of weights, on as many processes as there are for the examples."""

import json
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loadmaster.core.errors import InputError
from loadmaster.core.files import write_bytes
from loadmaster.core.problem import Objective
from loadmaster.core.run import ignore_progress
from loadmaster.placers.learned._weights import save_weights, weights_name
from loadmaster.placers.learned.training.examples import HELD_OUT, Example, digest_of, make_example
from loadmaster.placers.learned.training.train import Trainer, TrainSettings

OBJECTIVES = (Objective.STEP, Objective.THROUGHPUT)


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """How many problems are drawn, and where everything goes."""

    out: Path
    problems: int = 800
    held_out: int = 80
    workers: int = 1
    ray: bool = False
    resume: bool = False

    def __post_init__(self) -> None:
        """Refuse what draws nothing."""
        for name in ("problems", "workers"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; give a number >= 1")
        if not self.held_out >= 0 or self.problems > HELD_OUT:
            raise InputError(f"held_out is {self.held_out}, problems {self.problems}; give fewer problems")


@dataclass(frozen=True, slots=True)
class Trained:
    """What a training leaves behind."""

    weights: Path
    curve: Path
    training_set: str
    num_examples: int
    num_proven: int
    held_out: float  # mean log ratio to the usual plans, below zero is better
    untrained: float


def example_of(seed: int) -> Example | None:
    """The example of a seed: even ones for a step, odd ones for throughput."""
    return make_example(seed, OBJECTIVES[seed % 2])


def draw_examples(
    seeds: Sequence[int],
    *,
    workers: int = 1,
    ray: bool = False,
    progress: Callable[[str, float], None] = ignore_progress,
) -> list[Example]:
    """Examples of seeds in their order, made here, by processes, or by Ray's workers."""
    found: list[Example] = []
    for done, one in enumerate(_iterate(seeds, workers, ray)):
        if one is not None:
            found.append(one)
        progress(f"{len(found)} examples of {len(seeds)} problems", (done + 1) / len(seeds))
    return found


def _iterate(seeds: Sequence[int], workers: int, ray: bool) -> Any:
    if ray:
        return _iterate_over_ray(seeds)
    if workers == 1 or len(seeds) < 2:
        return map(example_of, seeds)
    return _iterate_over_processes(seeds, workers)


def _iterate_over_processes(seeds: Sequence[int], workers: int) -> Any:
    example_of(seeds[0])  # compiles what the processes then load
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        yield from pool.map(example_of, seeds, chunksize=4)


def _iterate_over_ray(seeds: Sequence[int]) -> Any:
    try:
        import ray
    except ImportError:
        raise InputError("--ray needs Ray, which is not installed: pip install 'loadmaster[ray]'") from None
    begins = not ray.is_initialized()  # a cluster that is started here ends here
    if begins:
        ray.init(include_dashboard=False, log_to_driver=False)
    try:
        task = ray.remote(example_of)
        yield from (ray.get(one) for one in [task.remote(seed) for seed in seeds])
    finally:
        if begins:
            ray.shutdown()


def train_weights(
    session: SessionSettings,
    settings: TrainSettings,
    progress: Callable[[str, float], None] = ignore_progress,
) -> Trained:
    """Draw, train, write weights and curve; with `resume` go on from the checkpoint in the folder."""
    session.out.mkdir(parents=True, exist_ok=True)
    examples = draw_examples(
        range(session.problems), workers=session.workers, ray=session.ray, progress=progress
    )
    held_out = draw_examples(
        range(HELD_OUT, HELD_OUT + session.held_out), workers=session.workers, ray=session.ray
    )
    return train_on(session, settings, examples, held_out, progress)


def train_on(
    session: SessionSettings,
    settings: TrainSettings,
    examples: list[Example],
    held_out: list[Example],
    progress: Callable[[str, float], None] = ignore_progress,
) -> Trained:
    """Train on examples that are there already."""
    from loadmaster.placers.learned.training.train import mean_log_ratio

    trainer = Trainer(settings, examples, held_out)
    untrained = mean_log_ratio(trainer.network, held_out) if held_out else 0.0
    checkpoint = session.out / "checkpoint.safetensors"
    if session.resume:
        if not checkpoint.exists():
            raise InputError(f"there is no checkpoint in {session.out}; train without --resume first")
        trainer.load_checkpoint(checkpoint)
    trainer.run(checkpoint=checkpoint, every=max(1, min(100, trainer.total // 10)), progress=progress)
    digest = digest_of(examples)
    trainer.network.load_state_dict(trainer.best[1])
    proven = sum(one.proven for one in examples)
    about = {
        "settings": asdict(settings),
        "examples": len(examples),
        "proven": proven,
        "held_out": trainer.best[0] if held_out else None,
        "untrained": untrained,
    }
    weights = session.out / weights_name(digest)
    save_weights(trainer.network, weights, training_set=digest, about=about)
    curve = session.out / "curve.json"
    points = {"training_set": digest, **about, "curve": [asdict(point) for point in trainer.curve]}
    write_bytes(json.dumps(points, indent=1).encode() + b"\n", curve)
    best = float(trainer.best[0]) if held_out else 0.0
    return Trained(weights, curve, digest, len(examples), proven, best, untrained)
