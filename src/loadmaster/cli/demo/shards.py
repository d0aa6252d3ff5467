"""The last part of the demo: a model larger than its cap, trained unchanged by three lines."""

from loadmaster.core.errors import InputError


def show() -> None:
    """Train, and print what it took."""
    from importlib.util import find_spec

    from loadmaster.cli.console import progress, stdout
    from loadmaster.core.units import format_bytes
    from loadmaster.report.plain_text import escape_control_characters

    console = stdout()
    console.print()
    try:
        if find_spec("torch") is None:
            raise InputError("it needs PyTorch: pip install 'loadmaster[hf,train]'")
        from loadmaster.train.demo import CAP_BYTES, LINES, train_demo

        with progress("training a GPT-2 shard by shard") as say:
            say("as it is", 0.1)
            found = train_demo()
    except InputError as problem:
        console.print(escape_control_characters(f"nothing was trained: {problem}"), soft_wrap=True)
        return
    console.print("a model larger than its cap, trained by three lines:")
    for line in LINES:
        console.print(f"    {line}", markup=False, highlight=False)
    need, cap = format_bytes(found["need_bytes"]), format_bytes(CAP_BYTES)
    console.print(f"it needs {need} and activations; the cap was {cap}")
    console.print(f"loss {found['loss']:.4f} after {found['step']} steps")
    console.print(escape_control_characters(found["verified"]), soft_wrap=True)
