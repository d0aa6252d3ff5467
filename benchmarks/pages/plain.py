"""Sections that list their figures as they were taken: plans that were run, and trials that were trained."""

# ruff: noqa: E501

from typing import Any

from benchmarks.pages.figures import NOT_RUN, Figures, digits, mark, table

_RUNNING = """The 1.5 billion weights are GPT-2-XL's, batch 1 x 1024 in float32; the cap is `set_per_process_memory_fraction`, gaps of the allocator and all, and the plan was
made with 1.25 GiB in reserve. PyTorch's default AdamW goes over spilled weights a dozen times on the host, a fused one once: with it the aim is met, without
it is not. The prediction is of the default AdamW: 27 % too slow in this run, in which 37 of 90 host ops were measured (20 s were given to measure), and 6 % in
the run before it with 89 of 90. Two of ten random plans went over caps just above their predicted peaks; gradients over GPU and host have not been measured by norms. The greedy fill computes on the host what does not fit, as `device_map="auto"` does for inference."""
_TRAIN = """Rates were measured with copies both ways and the host's optimizer at once; the peer ran in the same call. The placed trial is of an earlier run that day, by
hand-given placement, the best of six settings. The planner's own placement ran out of memory under the cap (it did not count the temporaries of the loss), and the run of four
trials at once was killed, it seems for want of host memory: neither figure is there yet, nor is that of adapter trials on one backbone."""


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
    lines = [(row["name"], _value(row), f"{row['aim']}: {mark(row)}" if row["aim"] else "") for row in rows]
    return f"""## {title}

{where}. {text}

{table(("what", "measured", "aim"), lines)}
"""


def _value(row: dict[str, Any]) -> str:
    if row["unit"] == "bool":
        return "yes" if row["value"] else "no"
    unit = {"ratio": ""}.get(row["unit"], row["unit"])
    value = row["value"]
    return f"{value:.3g} {unit}".strip() if abs(value) < 1 else f"{digits(value, 3)} {unit}".strip()
