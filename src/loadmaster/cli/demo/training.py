"""The second half of the demo: GPT-2-small trained over two unequal parts of this machine's first device.

Each part has a limit under which the model does not fit on it alone; the losses are those of plain training.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadmaster.core.errors import InputError

if TYPE_CHECKING:
    from loadmaster.core.answers.run_report import Outcome

SOURCE, BATCH, SEQ = "hf:gpt2", 1, 64
_SHARES = (0.72, 0.5)  # of what the model needs on one device
_MEASURE = "15s"  # the first time; the database knows it from then on
_PLAN = "4s"


def show(out_dir: str, steps: int) -> None:
    """Train, and print what was predicted and what was measured."""
    from loadmaster.cli.console import stdout
    from loadmaster.cli.verbs.run import comparison_table
    from loadmaster.report.plain_text import escape_control_characters

    console = stdout()
    console.print()
    try:
        devices, outcome, plain = train_demo(out_dir, steps)
    except InputError as problem:  # without torch there is nothing to train with
        console.print(escape_control_characters(f"nothing was trained: {problem}"), soft_wrap=True)
        return
    console.print(f"trained here: GPT-2-small, batch {BATCH} x {SEQ}, AdamW, {steps} steps on {devices}")
    console.print("(neither part holds it alone)")
    console.print()
    console.print(comparison_table(outcome.ran))
    for note in outcome.ran.notes:
        console.print(escape_control_characters(f"note: {note}"), style="dim", soft_wrap=True)
    console.print(escape_control_characters(_compare_losses(outcome, plain)), soft_wrap=True)


def training_document(out_dir: str, steps: int) -> dict[str, Any]:
    """The same for `--json`."""
    import msgspec

    try:
        devices, outcome, plain = train_demo(out_dir, steps)
    except InputError as problem:
        return {"reason": str(problem)}
    run = msgspec.to_builtins(outcome.ran)
    return {"devices": devices, "run": run, "plain_losses": plain, "equal": plain == list(outcome.ran.losses)}


def train_demo(out_dir: str, steps: int) -> "tuple[str, Outcome, list[float]]":
    """The devices, what came of the run, and the losses of plain training."""
    from loadmaster import api
    from loadmaster.cli.console import progress

    with progress("training GPT-2-small") as say:
        say("capturing it", 0.0)
        whole = api.problem(SOURCE, f"{_first_device()}#0-1TB", batch=BATCH, seq=SEQ)
        alone = api.plan(whole, algorithm="single_device", progress=say)
        needs = int(alone.peak_bytes.max())
        caps = [int(share * needs) for share in _SHARES]
        devices = ", ".join(f"{_first_device()}#{at}-{cap // 2**20}MiB" for at, cap in enumerate(caps))
        problem = api.problem(whole.graph, devices, costs="measured", measure_budget=_MEASURE, progress=say)
        placement = api.plan(problem, budget=_PLAN, order="captured", progress=say)  # as torch trains
        api.save(placement, str(Path(out_dir) / "demo-training.json"))
        say("training it plainly", 0.0)
        from loadmaster.runtime.run.launch import compute_plain_losses

        plain = compute_plain_losses(placement, steps=steps)
        say("training it on its plan", 0.0)
        outcome = api.run(placement, steps=steps, calibrate=_keeps_costs(), progress=say)
    return devices, outcome, plain


def _keeps_costs() -> bool:
    """Whether there is a database to keep measured costs in."""
    from loadmaster.cost.database import open_database

    with open_database(tell=lambda _: None) as known:
        return known.saves


def _first_device() -> str:
    """This machine's first GPU, else its CPU."""
    from loadmaster.cluster.probe import local_devices

    return local_devices()[:2][-1].torch_name


def _compare_losses(outcome: "Outcome", plain: list[float]) -> str:
    ran = list(outcome.ran.losses)
    shown = f"{plain[0]:.6f} at first, {plain[-1]:.6f} at last"
    if ran == plain:
        return f"the loss of every step equals plain training's, to the bit: {shown}"
    far = max(abs((one or 0.0) - other) for one, other in zip(ran, plain, strict=True))
    return f"the loss differs from plain training's by at most {far:.3g}: {shown}"
