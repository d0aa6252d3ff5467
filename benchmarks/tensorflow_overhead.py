"""What a plan on one device costs: steps of a TensorFlow model, unplaced and placed in turns.

Run it on an idle machine.

python -m benchmarks.tensorflow_overhead [--out benchmarks/results/tensorflow-overhead.json]
"""

import argparse
import json
import os
import statistics
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

ROUNDS, STEPS = 15, 10


def measure(name: str) -> dict[str, Any]:
    import loadmaster as lm
    import tensorflow as tf
    from loadmaster.graph.tf_capture.keras_zoo import keras_example

    plain, (x, y) = keras_example(name, batch=32, optimizer="adam")
    model, _ = keras_example(name, batch=32, optimizer="adam")
    placed = lm.place(model, (x, y), devices="cpu#0-8GB", costs="roofline", budget="10x")
    step = tf.function(lambda x, y: plain.train_step((x, y)))
    batch = (tf.constant(x), tf.constant(y))
    runs = {"unplaced": lambda: step(*batch), "placed": lambda: placed.train_on(*batch)}
    seconds: dict[str, list[float]] = {kind: [] for kind in runs}
    for run in runs.values():
        run(), run()
    for _ in range(ROUNDS):
        for kind, run in runs.items():
            began = time.perf_counter()
            for _ in range(STEPS):
                run()
            seconds[kind].append((time.perf_counter() - began) / STEPS)
    ratios = [b / a for a, b in zip(seconds["unplaced"], seconds["placed"], strict=True)]
    medians = {kind: statistics.median(found) for kind, found in seconds.items()}
    return {
        "model": name,
        **{f"{kind}_s": value for kind, value in medians.items()},
        "ratio": statistics.median(ratios),
    }


def main() -> None:
    import tensorflow as tf

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out")
    parser.add_argument("--models", default="mlp,lstm,transformer,MobileNetV2")
    asked = parser.parse_args()
    rows = [measure(name) for name in asked.models.split(",")]
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
