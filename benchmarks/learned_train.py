"""python -m benchmarks.learned_train OUT [--problems N] [--seconds S]: many trainings at once.

Draws one set of problems, then trains on it: five seeds of the full recipe, and ablations. Each has a
process and `--seconds` of it, so that all of them together take that long on a machine with enough cores.
Writes a curve for each, and the weights of each, under OUT.
"""

import argparse
import json
import multiprocessing
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch

from loadmaster.placers.learned._weights import save_weights
from loadmaster.placers.learned.training.examples import HELD_OUT, Example, digest_of
from loadmaster.placers.learned.training.session import draw_examples
from loadmaster.placers.learned.training.train import Trainer, TrainSettings, mean_log_ratio

_EXAMPLES: tuple[list[Example], list[Example], str]
FULL = TrainSettings(imitation=1200, reinforcement=2400)
RECIPES = {
    **{f"full-{seed}": replace(FULL, seed=seed) for seed in range(5)},
    **{f"imitation-{seed}": replace(FULL, imitation=3600, reinforcement=0, seed=seed) for seed in range(3)},
    **{f"reinforced-{seed}": replace(FULL, imitation=0, reinforcement=3600, seed=seed) for seed in range(3)},
    **{f"wide-{seed}": replace(FULL, width=96, seed=seed) for seed in range(2)},
    **{f"shallow-{seed}": replace(FULL, rounds=1, seed=seed) for seed in range(2)},
    "noisy-0": replace(FULL, noise=0.15),
}


def main() -> None:
    """Draw, fork, train, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--problems", type=int, default=1000)
    parser.add_argument("--held-out", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--recipes", default=",".join(RECIPES))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    asked.out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    train = draw_examples(range(asked.problems), workers=asked.processes)
    held = draw_examples(range(HELD_OUT, HELD_OUT + asked.held_out), workers=asked.processes)
    global _EXAMPLES
    _EXAMPLES = (train, held, digest_of(train))
    print(f"{len(train)} + {len(held)} examples in {time.perf_counter() - began:.0f} s", flush=True)
    names = asked.recipes.split(",")
    # forked, so that every training reads the same examples
    with multiprocessing.get_context("fork").Pool(asked.processes) as pool:
        tasks = [(name, str(asked.out), asked.seconds) for name in names]
        curves = pool.starmap(_train, tasks, chunksize=1)
    about = {
        "training_set": _EXAMPLES[2],
        "examples": len(train),
        "proven": sum(one.proven for one in train),
        "seconds": time.perf_counter() - began,
        "trainings": dict(zip(names, curves, strict=True)),
    }
    (asked.out / "curves.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def _train(name: str, out: str, seconds: float) -> dict[str, object]:
    torch.set_num_threads(1)
    train, held, digest = _EXAMPLES
    settings = RECIPES[name]
    trainer = Trainer(settings, train, held)
    untrained = mean_log_ratio(trainer.network, held)
    trainer.run(most_s=seconds, every=100)
    trainer.network.load_state_dict(trainer.best[1])
    about = {
        "settings": asdict(settings),
        "examples": len(train),
        "proven": sum(one.proven for one in train),
        "held_out": trainer.best[0],
        "untrained": untrained,
        "updates": trainer.update,
    }
    if name.startswith("full"):
        save_weights(trainer.network, Path(out) / f"{name}.safetensors", training_set=digest, about=about)
    print(f"{name}: {untrained:+.4f} -> {trainer.best[0]:+.4f} after {trainer.update} updates", flush=True)
    return {**about, "curve": [asdict(point) for point in trainer.curve]}


if __name__ == "__main__":
    main()
