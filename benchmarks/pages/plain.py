"""Sections that list their figures as they were taken: plans that were run, and trials that were trained."""

# ruff: noqa: E501

from typing import Any

from benchmarks.pages.figures import NOT_RUN, Figures, digits, mark, table

_RUNNING = """The 1.5 billion weights are GPT-2-XL's, batch 1 x 1024 in float32; the cap is `set_per_process_memory_fraction`, gaps of the allocator and all, and the plan was
made with 1.25 GiB in reserve. PyTorch's default AdamW goes over spilled weights a dozen times on the host, a fused one once: with it the aim is met, without
it is not; each runs on a plan of its own, and the default one's figures are of the day before, on the fused one's plan. A step's prediction begins when its inputs lie where
the plan has them. ResNet-50 has not been measured so: with its images (39 MB) still in pageable host memory the errors of three plans were -22, -7 and -31 %, where PyTorch
also stepped the weights one by one (mended since). A GPT-2 block on the host is 25 % slower than predicted (a second a step; its times differ from run to run).
The greedy fill computes on the host what does not fit, as `device_map="auto"` does for inference."""
_TRAIN = """Rates were measured with copies both ways, the host's optimizer and an issued layer at once. The model of 1.64 billion parameters misses its aim of 90 % of the limit: in the first
run that day, beside the peer, the host's updates and Python's issuing of units got in each other's way (0.375 s; 0.347 s with a placement by hand); in the last one, with a faster
host kernel on cores of its own, weights waited up to 30 ms behind optimizer state on the bus (0.384 s). That has been mended since and not been measured. Four trials
at once fill those gaps, 0.98 of their limit (of the first run's rates). Adapter trials are replayed as CUDA graphs (`replay=True`); one after another has more places for the backbone and is bound by the bus."""


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
