"""Train the network that guides the search for strategies: `python -m benchmarks.train_strategy_guide`.

Captures a few models once, plays searches on random clusters and writes the weights that the package ships.
Reproducible by seed.
"""

import argparse
import time
from pathlib import Path

import torch
from rich.progress import Progress

from loadmaster.core.question import Question
from loadmaster.core.run import ignore_progress
from loadmaster.questions.problem import build_problem
from loadmaster.strategies.guide_training import Settings, train
from loadmaster.strategies.learned.guide import SHIPPED
from loadmaster.strategies.learned.network import save_network

MODELS = (("zoo:vgg16", 64), ("zoo:resnet50", 64), ("hf:bert-base", 32), ("hf:gpt2", 16))
SEQ = 128


def main() -> None:
    """Train, with a progress bar, and write the weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=Settings().episodes)
    parser.add_argument("--replays", type=int, default=Settings().replays)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=SHIPPED)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    started = time.perf_counter()
    with Progress() as bar:
        task = bar.add_task("capturing models", total=1.0)
        graphs = []
        for number, (name, batch) in enumerate(MODELS):
            question = Question(source=name, devices="V100-16GB", batch=batch, seq=SEQ)
            graphs.append((build_problem(question, progress=ignore_progress).graph, batch))
            bar.update(task, completed=(number + 1) / len(MODELS))
        task = bar.add_task("training", total=1.0)
        settings = Settings(episodes=asked.episodes, replays=asked.replays, seed=asked.seed)
        network, losses = train(
            graphs, settings, lambda text, share: bar.update(task, description=text, completed=share)
        )
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    notes = {"episodes": str(asked.episodes), "replays": str(asked.replays), "seed": str(asked.seed)}
    save_network(network, asked.out, notes)
    seconds = time.perf_counter() - started
    first, last = sum(losses[:10]) / len(losses[:10]), sum(losses[-10:]) / len(losses[-10:])
    print(f"{asked.out}: {asked.out.stat().st_size} bytes, {seconds:.0f} s, loss {first:.3f} to {last:.3f}")


if __name__ == "__main__":
    main()
