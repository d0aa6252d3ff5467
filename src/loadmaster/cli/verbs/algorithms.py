"""loadmaster algorithms: list the placement algorithms."""

from loadmaster.cli import options as o

SUMMARY = "List the placement algorithms."


def command(json: o.Json = False) -> None:
    """List the placement algorithms."""
    from loadmaster.cli.console import print_json, stdout
    from loadmaster.placers.registry import list_algorithms

    entries = list_algorithms().values()
    if json:
        rows = [{"name": e.name, "family": e.family, "summary": e.summary} for e in entries]
        print_json({"algorithms": rows})
        return
    from loadmaster.report.text_columns import columns, one_line

    table = columns("algorithm", "family", "what it does", whole=("algorithm", "family"))
    for e in entries:
        table.add_row(one_line(e.name), one_line(e.family), one_line(e.summary, 200))
    stdout().print(table)
