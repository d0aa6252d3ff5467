"""The sections on captured models: capture itself, and steps as predicted and as they are."""

# ruff: noqa: E501

import re
from typing import Any

from benchmarks.pages.figures import NOT_RUN, Figures, digits, mark, table


def capture(result: Figures) -> str:
    """What it takes to capture named models."""
    rows = result.of("capture")
    if not rows:
        return f"## Capture\n\n{NOT_RUN}\n"
    lines = []
    for row in rows:
        match = re.fullmatch(r"(\S+) by (\w+), (\d+) ops", row["name"])
        if match is None:
            continue
        source, path, num_ops = match.groups()
        gib = result.value("capture", f"{source}: peak memory of the process")
        share = result.value("capture", f"{source}: attributed")
        aim = f"{row['aim']} s: {mark(row)}" if row["aim"] else ""
        cells = (
            f"`{source}`",
            path,
            num_ops,
            f"{row['value']:.1f}",
            aim,
            f"{gib:.2f}",
            f"{100 * share:.1f} %",
        )
        lines.append(cells)
    head = ("model", "path", "ops", "CPU s", "aim", "GiB in all", "backward attributed")
    return f"""## Capture

The whole training step of named models, batch 8 x 512, with AdamW. No weight is allocated. The table has processor seconds of `capture`, and memory of the whole process.

{table(head, lines)}
"""


def cpu(result: Figures) -> str:
    """Predicted and real steps on the CPU."""
    if not result.of("costs"):
        return f"## Steps on the CPU\n\n{NOT_RUN}\n"
    cases = [
        row["name"].removesuffix(": error") for row in result.of("costs") if row["name"].endswith(": error")
    ]
    lines = []
    for case in cases:
        real, said = (
            1e3 * result.value("costs", f"{case}: {what} CPU step") for what in ("real", "predicted")
        )
        warm = result.value("costs", f"{case}: problem from a warm database")
        share = result.value("costs", f"{case}: share measured")
        cells = (case, digits(said, 3), digits(real, 3), _error(result, "costs", f"{case}: error"))
        lines.append((*cells, f"{100 * share:.0f} %", f"{warm:.2f} s"))
    head = (
        "model",
        "predicted ms",
        "measured ms",
        "error (aim: 25 %)",
        "time from measured ops",
        "from a warm database",
    )
    return f"""## Steps on the CPU

A plain training loop on one thread, in processor time. The prediction uses ops that were measured one by one (`--measure`).

{table(head, lines)}
"""


def gpu(result: Figures) -> str:
    """Predicted and real steps on a GPU."""
    rows = result.of("gpu")
    if not rows:
        return f"## Steps on a GPU\n\n{NOT_RUN}\n"
    cases = [row["name"].removesuffix(": step error") for row in rows if row["name"].endswith(": step error")]
    lines = [_gpu_row(result, case) for case in cases]
    head = (
        "model",
        "peak GiB predicted",
        "measured",
        "error (aim: 10 %)",
        "step ms predicted",
        "measured",
        "error (aim: 15 %)",
        "GPU busy ms",
        "host issues ms",
    )
    return f"""## Steps on a GPU

{_where(result.machines_of["gpu"][-1])}. The plain eager loop under AdamW (foreach, PyTorch's default), TF32 as PyTorch has it; `max_memory_allocated`, and the
median of 20 steps before and 20 after the ops were measured. The models were captured without the GPU, and every op was measured on it. If the host needs longer to launch ops than the GPU to compute, the step waits for launches; the prediction includes this.

{table(head, lines)}

{_ops(result)} The host of that machine is virtual, and its speed changes by a third within minutes. In four earlier runs, errors of steps that wait for launches (bf16-mixed of GPT-2 and BERT, batch 1) were between -35 % and +31 %. Since then launch times are lower quartiles. This is one run on that machine. Steps limited by the GPU stayed within 7 %, peaks within 3 %.
"""


def _gpu_row(result: Figures, case: str) -> tuple[str, ...]:
    def number(what: str, places: int = 1) -> str:
        return f"{result.value('gpu', f'{case}: {what}'):.{places}f}"

    return (
        case,
        number("peak predicted", 2),
        number("peak measured", 2),
        _error(result, "gpu", f"{case}: peak error"),
        number("step predicted"),
        number("step measured"),
        _error(result, "gpu", f"{case}: step error"),
        number("device busy"),
        number("host issues"),
    )


def _ops(result: Figures) -> str:
    shares = [row["value"] for row in result.of("gpu") if row["name"].endswith("ops of a real step captured")]
    if not shares:
        return ""
    return (
        f"Of the ops that a real step runs below autograd, views left out, {100 * min(shares):.1f} % or more are captured, kind for"
        " kind (cuDNN's attention counts as flash); the graph is the same to the digest from a process that sees no GPU."
    )


def _error(result: Figures, suite: str, name: str) -> str:
    row = result.by_name[(suite, name)]
    return f"{100 * row['value']:+.1f} %{'' if row['reached'] else ' **missed**'}"


def _where(machine: dict[str, Any]) -> str:
    versions = machine["versions"]
    return (
        f"{machine['gpu']}, host {machine['processor']} with {machine['cores']} cores, torch {versions['torch']}, transformers"
        f" {versions['transformers']}, {machine['date']}"
    )
