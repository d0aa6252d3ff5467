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
_TRAIN = """Rates were measured with copies both ways, the host's optimizer and an issued layer at once, just before their use. The model of 1.64 billion parameters misses its aim of 90 % of
the limit, and how far depends on the machine: 0.406 s on this one, 0.347 s on another H200 the same day (`benchmarks/results/2026-11-16-train-another-machine.json`: 0.83 of the
limit; 0.93 of the one at the rates of all at once), and 0.315 s in a trial on a third that no file holds, the median of 16 steps of a placement by hand (0.92 of the limit here). Bus, host memory
and the thread that issues units are all busy by then: where the host is slower, updates and issuing wait for each other. Since then an update needs a quarter of the time under
Python's lock; that has not been measured. Four trials at once reached 0.98 of their limit on a quieter machine the same day, and miss it here. Adapter trials are replayed as
CUDA graphs (`replay=True`); one after another has more places for the backbone and is bound by the bus."""


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
