"""python -m loadmaster.cli.docs README.md: rewrite the table of algorithms from the registry."""

import sys
from pathlib import Path

from loadmaster.core.errors import FormatError
from loadmaster.core.io import write_bytes
from loadmaster.placers.registry import list_algorithms

BEGIN = "<!-- algorithms: written by `python -m loadmaster.cli.docs` -->"
END = "<!-- end of algorithms -->"


def with_table(text: str) -> str:
    """A page with the table between its two marks renewed."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise FormatError(f"the page has no {BEGIN!r} ... {END!r}; add the two lines")
    rows = [f"| `{e.name}` | {e.family} | {e.summary} |" for e in list_algorithms().values()]
    table = "\n".join(["| algorithm | family | what it does |", "|---|---|---|", *rows])
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def main() -> None:
    """Renew the pages named on the command line."""
    for name in sys.argv[1:]:
        page = Path(name)
        write_bytes(with_table(page.read_text(encoding="utf-8")).encode(), page)


if __name__ == "__main__":
    main()
