"""python -m benchmarks.capture_one SOURCE BATCH SEQ: capture one named model; one JSON object.

A process of its own, so that its peak memory is that of one capture and what it imports.
"""

import json
import sys
import time

from benchmarks.measure import peak_bytes


def main() -> None:
    """Capture the training step once, cold, and say what it took."""
    if len(sys.argv) != 4:
        sys.exit("usage: python -m benchmarks.capture_one hf:NAME|zoo:NAME BATCH SEQ")
    source, batch, seq = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    import torch

    torch.set_num_threads(1)
    family, _, name = source.partition(":")
    example = _example(family, name, batch, seq)
    loaded_bytes, began, wall = peak_bytes(), time.process_time(), time.perf_counter()
    from loadmaster.graph.capture import capture

    graph = capture(
        example.model, example.args, example.kwargs, loss=example.loss, optimizer=torch.optim.AdamW
    )
    cpu_s, wall_s = time.process_time() - began, time.perf_counter() - wall
    share = [word for word in graph.capture.split("; ") if word.endswith("attributed")]
    answer = {
        "num_ops": graph.num_ops,
        "path": graph.capture.split(";")[0],
        "attributed": float(share[0].split()[0]) / 100 if share else 0.0,
        "capture": graph.capture,
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        "weight_bytes": sum(weight.numel() * weight.itemsize for weight in example.model.parameters()),
        "loaded_bytes": loaded_bytes,
        "peak_bytes": peak_bytes(),
    }
    print(json.dumps(answer))


def _example(family: str, name: str, batch: int, seq: int) -> object:
    if family == "hf":
        from loadmaster.zoo.hf import hf_example

        return hf_example(name, batch=batch, seq=seq)
    from loadmaster.zoo.named import zoo_example

    return zoo_example(name, batch=batch, seq=seq)


if __name__ == "__main__":
    main()
