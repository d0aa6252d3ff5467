"""The command `loadmaster`: verbs, exit codes, and the one place where errors become messages.

Exit codes: 0 done, 1 no feasible plan, 2 bad input, 130 interrupted.
"""

import os
import sys
from typing import Annotated

import typer

from loadmaster import __version__
from loadmaster.cli import algorithms, compare, demo, doctor, plan, show, simulate

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Where every operator of a neural network goes: plans that fit unequal devices, with a proven gap.",
)
for verb in (plan, simulate, compare, show, algorithms, demo, doctor):
    app.command(name=verb.__name__.rpartition(".")[2])(verb.command)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"loadmaster {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before the verb."""


def main() -> None:
    """Run the command line; bad input is one message and exit code 2, never a traceback."""
    from loadmaster.core.errors import LoadmasterError

    try:
        app()
    except LoadmasterError as problem:
        _complain(str(problem))
        sys.exit(2)
    except KeyboardInterrupt:
        _complain("interrupted")
        sys.exit(130)
    except BrokenPipeError:  # the reader went away; keep the interpreter from complaining at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except MemoryError:
        _complain("out of memory; use a smaller graph or fewer devices")
        sys.exit(2)


def _complain(message: str) -> None:
    """One line on stderr, whatever names from files it quotes."""
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in message)
    print(f"error: {line}", file=sys.stderr)


if __name__ == "__main__":
    main()
