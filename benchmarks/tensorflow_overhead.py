"""What a plan on one device costs: steps of a TensorFlow model, unplaced and placed in turns.

Run it on an idle machine.

python -m benchmarks.tensorflow_overhead [--rounds 2] [--out benchmarks/results/tensorflow-overhead.json]
"""

import argparse
import json
import os
import statistics
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

ROUNDS, MOST_STEPS, TURN_S = 15, 10, 0.5
BATCH = {"MobileNetV2": 4}  # of images of 224 pixels; others 32


def measure(name: str, rounds: int) -> dict[str, Any]:
    import loadmaster as lm
    import tensorflow as tf
    from loadmaster.graph.tf_capture.keras_zoo import keras_example

    size = BATCH.get(name, 32)
    plain, (x, y) = keras_example(name, batch=size, optimizer="adam")
    model, _ = keras_example(name, batch=size, optimizer="adam")
    placed = lm.place(model, (x, y), devices="cpu#0-8GB", costs="roofline", budget="10x")
    step = tf.function(lambda x, y: plain.train_step((x, y)))
    batch = (tf.constant(x), tf.constant(y))
    runs = {"unplaced": lambda: step(*batch), "placed": lambda: placed.train_on(*batch)}
    seconds: dict[str, list[float]] = {kind: [] for kind in runs}
    for run in runs.values():
        run(), run()
    began = time.perf_counter()
    runs["unplaced"]()
    steps = min(MOST_STEPS, max(1, round(TURN_S / (time.perf_counter() - began))))
    for _ in range(rounds):
        for kind, run in runs.items():
            began = time.perf_counter()
            for _ in range(steps):
                run()
            seconds[kind].append((time.perf_counter() - began) / steps)
    ratios = [b / a for a, b in zip(seconds["unplaced"], seconds["placed"], strict=True)]
    medians = {kind: statistics.median(found) for kind, found in seconds.items()}
    return {
        "model": name,
        "batch": size,
        "steps": rounds * steps,
        **{f"{kind}_s": value for kind, value in medians.items()},
        "ratio": statistics.median(ratios),
    }


def main() -> None:
    import tensorflow as tf

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out")
    parser.add_argument("--models", default="mlp,lstm,transformer,MobileNetV2")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="2 for a short run")
    asked = parser.parse_args()
    rows = [measure(name, asked.rounds) for name in asked.models.split(",")]
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "tensorflow": tf.__version__,
        "cores": os.cpu_count(),
        "rows": rows,
    }
    print(json.dumps(found, indent=1))
    if asked.out:
        with open(asked.out, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
