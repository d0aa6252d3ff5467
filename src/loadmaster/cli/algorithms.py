"""loadmaster algorithms: what there is to choose from."""

from loadmaster.cli import options as o


def command(json: o.Json = False) -> None:
    """List the placement algorithms."""
    from rich.table import Table

    from loadmaster.cli.console import print_json, stdout
    from loadmaster.placers.registry import available

    entries = available().values()
    if json:
        rows = [{"name": e.name, "family": e.family, "summary": e.summary} for e in entries]
        print_json({"algorithms": rows})
        return
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for title in ("algorithm", "family", "what it does"):
        table.add_column(title)
    for e in entries:
        table.add_row(e.name, e.family, e.summary)
    stdout().print(table)
