"""Sections that list their figures as they were taken: plans that were run, and trials that were trained."""

# ruff: noqa: E501

from typing import Any

from benchmarks.pages.figures import NOT_RUN, Figures, digits, mark, table

_RUNNING = """The 1.5 billion weights are GPT-2-XL's, batch 1 x 1024 in float32; the cap is `set_per_process_memory_fraction`, gaps of the allocator and all, and the plan was
made with 1.25 GiB in reserve. PyTorch's default AdamW goes over spilled weights a dozen times on the host, a fused one once: with it the aim is met, without
it is not; each runs on a plan of its own, and the default one's figures are of the day before, on the fused one's plan. A step's prediction begins when its inputs lie where
the plan has them. ResNet-50's steps on the GPU are 11 and 12 % longer than predicted: its ops are so short that Python's issuing of the forward pass shows, which no
cost knows of. That is one run on one machine; on another with a slower host, and before a call cost less, the errors were -23, -3, -19 and -16 %. A GPT-2 block on the host is 25 % slower than predicted (a second a step; its times differ from run to run).
The greedy fill computes on the host what does not fit, as `device_map="auto"` does for inference."""
_TRAIN = """Rates were measured with copies both ways, the host's optimizer and an issued layer at once, just before their use. The limit comes in two ways. At the rates of
all at once, as the aim has it, the model of 1.64 billion parameters reaches it on all four machines it was run on (more than all of it, for in a real step not everything runs at once all
the time). The plain `limit` is one that no step can beat: each way of the bus, and the optimizer, as fast as it is without the others. 90 % of that is a stricter aim of our
own, and is missed here and on two of three other machines: other H200 machines gave, the same day, 0.309 s (0.92 of that limit; 1.14 at the rates of all at once, measured there with a
spread of 44 %), 0.329 s (0.89; 1.01) and 0.335 s (0.86; 1.03), each the median of ten steps in one run (`benchmarks/results/2026-11-16-train-*-machine.json`). What holds it
up is the bus upwards in the backward pass, which carries weights and optimizer state and has 30 to 35 GB/s beside the rest; fewer bytes of state would help (the upper half of a master
weight is on the device already). Four trials in turn reach their limit here and on the one other machine where they were run (0.95); in both they are 3 % slower than one after another, so it is the limit that is reached, not 1.1x. Adapter trials are replayed as CUDA graphs
(`replay=True`); one after another has more places for the backbone and is bound by the bus."""


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

{where}. {text}

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
