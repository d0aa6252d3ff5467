"""Sections that list their figures as they were taken: plans that were run, and trials that were trained."""

# ruff: noqa: E501

from typing import Any

from benchmarks.pages.figures import NOT_RUN, Figures, digits, mark, table

_RUNNING = """- The model with 1.5 billion weights is GPT-2-XL, batch 1 x 1024, float32. The cap is `set_per_process_memory_fraction`, which includes the gaps of the allocator. The plan was made with a reserve of 1.25 GiB.
- PyTorch's default AdamW reads spilled weights a dozen times on the host, a fused one once. With the fused one the aim is reached, without it it is not. The figures of the default one are from the day before, on the plan of the fused one.
- ResNet-50's steps on the GPU are 11 and 12 % longer than predicted: its ops are so short that Python's launches of the forward pass count, which costs do not include. On another machine with a slower host, and with older code, the errors were -23, -3, -19 and -16 %.
- A GPT-2 block on the host is 25 % slower than predicted (a second per step; its times vary).
- The greedy fill computes on the host what does not fit, as `device_map="auto"` does for inference."""
_TRAIN = """A step is compared with two limits.

- *At the rates of all at once*: copies in both directions, the optimizer on the host and a layer were measured at the same time, just before the step. This is the aim. The model with 1.64 billion parameters reaches it on all four machines (by more than 100 %, because in a real step not everything runs all the time).
- The plain `limit` cannot be beaten: each direction of the bus, and the optimizer, at its rate without the others. 90 % of it is a stricter aim of our own. It is missed here and on two of three other machines. Other H200 machines gave, on the same day, 0.309 s (0.92 of that limit; 1.14 at the rates of all at once, measured there with a spread of 44 %), 0.329 s (0.89; 1.01) and 0.335 s (0.86; 1.03), each the median of ten steps in one run (`benchmarks/results/2026-11-16-train-*-machine.json`).

The bottleneck is the bus to the device in the backward pass. It carries weights and optimizer state at 30 to 35 GB/s while everything else runs.

Four trials in turn reach their limit here and on the one other machine that was tried (0.95). On both they are 3 % slower than one after another, so the aim of 1.1x is not reached, but the limit is. Adapter trials are replayed as CUDA graphs (`replay=True`). One after another, they have more slots for the backbone, and are limited by the bus."""


def running(result: Figures) -> str:
    """Plans that were run on real devices."""
    return _listed(result, "running", "Plans as they run", _RUNNING)


def train(result: Figures) -> str:
    """Many models, too few devices."""
    return _listed(result, "train", "Trials on too few devices", _TRAIN)


def _listed(result: Figures, suite: str, title: str, text: str) -> str:
    rows = result.of(suite)
    if not rows:
        return f"## {title}\n\n{NOT_RUN}\n"
    where = "; ".join(
        f"{machine['gpu'] or machine['processor']}, {machine['cores']} cores, torch"
        f" {machine['versions'].get('torch', '')}, {machine['date']}"
        for machine in result.machines_of[suite]
    )
    lines = [(_name(row), _value(row), f"{row['aim']}: {mark(row)}" if row["aim"] else "") for row in rows]
    return f"""## {title}

{where}.

{text}

{table(("what", "measured", "aim"), lines)}
"""


def _name(row: dict[str, Any]) -> str:
    """With its day, where that is another than the file's."""
    return f"{row['name']} ({row['taken']})" if "taken" in row else str(row["name"])


def _value(row: dict[str, Any]) -> str:
    if row["unit"] == "bool":
        return "yes" if row["value"] else "no"
    unit = {"ratio": ""}.get(row["unit"], row["unit"])
    value = row["value"]
    return f"{value:.3g} {unit}".strip() if abs(value) < 1 else f"{digits(value, 3)} {unit}".strip()
