"""The command `loadmaster`: the one place where errors become messages and exit codes.

Exit codes: 0 done, 1 no feasible plan, 2 bad input, 130 interrupted, 141 the reader of stdout went away.
The verbs are imported inside `main`, so that Ctrl-C is answered in one line from the beginning.
"""

import sys

from loadmaster.cli.interrupts import watch


def main() -> None:
    """Run the command line; bad input is one line on stderr, never a traceback."""
    interrupts = watch()
    try:
        code = _run(sys.argv[1:] or ["--help"])
        if sys.stdout is not None:
            sys.stdout.flush()
    except KeyboardInterrupt:
        code = _exit_with_message("interrupted", 130)
    except BrokenPipeError:  # as in `loadmaster show ... | head -1`: nobody is left to tell
        code = _handle_lost_stdout(141)
    except OSError as trouble:  # files of ours raise FileError; what is left is stdout itself
        _exit_with_message(f"error: cannot write the answer: {trouble.strerror or trouble}", 2)
        code = _handle_lost_stdout(2)
    except MemoryError:
        code = _exit_with_message("error: out of memory; use a smaller graph or fewer devices", 2)
    except Exception:  # a compiler that is interrupted may raise anything
        if not interrupts.count:
            raise
        code = _exit_with_message("interrupted", 130)
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    """The exit code of a command line."""
    import typer

    from loadmaster.cli.commands import app
    from loadmaster.core.errors import LoadmasterError
    from loadmaster.report.plain_text import escape_unencodable_output

    escape_unencodable_output()
    command = typer.main.get_command(app)
    try:
        with command.make_context("loadmaster", complete_arguments(arguments)) as context:
            command.invoke(context)
    except LoadmasterError as problem:
        return _exit_with_message(f"error: {problem}", 2)
    except typer.Exit as end:
        return int(end.exit_code)
    except typer.Abort:
        return _exit_with_message("interrupted", 130)
    except Exception as trouble:
        if not hasattr(trouble, "format_message"):  # how a wrong option is told, whatever typer it is
            raise
        return _exit_with_message(f"error: {_usage_message(trouble)}", 2)
    return 0


def complete_arguments(arguments: list[str]) -> list[str]:
    """The words of a command line, with the usual time where `--measure` stands alone."""
    import re

    from loadmaster.cli.options import MEASURE

    words = list(arguments)
    for at in range(len(words) - 1, -1, -1):
        follows = words[at + 1] if at + 1 < len(words) else ""
        if words[at] == "--measure" and not re.fullmatch(r"[0-9.]+\s*[a-zµ]*", follows):
            words.insert(at + 1, MEASURE)
    return words


def _usage_message(trouble: Exception) -> str:
    """What is wrong with the words of a command line, and where the right ones are listed."""
    message = str(trouble.format_message()).strip().rstrip(".")  # type: ignore[attr-defined]
    context = getattr(trouble, "ctx", None)
    path = context.command_path if context is not None else "loadmaster"
    if "unexpected extra argument" in message:
        message += "; devices are named with --devices"
    return f"{message} (see: {path} --help)"


def _exit_with_message(message: str, code: int) -> int:
    """Say one line on stderr, whatever names from files it quotes."""
    from contextlib import suppress

    from loadmaster.report.plain_text import escape_control_characters, shorten_text

    with suppress(OSError):  # stderr may be full or closed; the exit code still tells
        print(escape_control_characters(shorten_text(message)), file=sys.stderr, flush=True)
    return code


def _handle_lost_stdout(code: int) -> int:
    from loadmaster.report.plain_text import discard_stream

    discard_stream(sys.stdout)
    return code


if __name__ == "__main__":
    main()
