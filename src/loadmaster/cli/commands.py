"""The verbs of the command line, one file each, and the options before them."""

from typing import Annotated

import typer

from loadmaster import __version__
from loadmaster.cli.verbs import (
    advise,
    algorithms,
    compare,
    costs,
    demo,
    diff,
    doctor,
    explain,
    export,
    fit,
    import_,
    learn,
    plan,
    probe,
    report,
    run,
    show,
    simulate,
    train,
    ways,
    whatif,
)

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Where every operator of a neural network goes: plans that fit unequal devices, with a proven gap.",
)
for verb in (
    plan,
    fit,
    ways,
    run,
    train,
    report,
    explain,
    diff,
    whatif,
    export,
    import_,
    simulate,
    compare,
    show,
    probe,
    algorithms,
    demo,
    doctor,
):
    app.command(name=verb.__name__.rpartition(".")[2].rstrip("_"), short_help=verb.SUMMARY)(verb.command)
app.add_typer(advise.app, name="advise", short_help=advise.SUMMARY)
app.add_typer(learn.app, name="learn", short_help=learn.SUMMARY)
app.add_typer(costs.app, name="costs", short_help=costs.SUMMARY)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"loadmaster {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before the verb."""
