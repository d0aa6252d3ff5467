"""python -m benchmarks.run [--add] [SUITE ...]: run the suites, print the figures, write a dated result file.

With --add the figures of that file which this run did not take again are kept; a file that another machine
has written is left alone, and a second one is written beside it, named after this machine's cores. A run that
is interrupted writes the figures it has.
"""

import importlib
import json
import pkgutil
import sys
from pathlib import Path
from typing import Any

from benchmarks import suites
from benchmarks.measure import Report, machine

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Run the named suites, or all."""
    known = [module.name for module in pkgutil.iter_modules(suites.__path__)]
    words = sys.argv[1:]
    wanted = [word for word in words if word != "--add"] or known
    for name in wanted:
        if name not in known:
            sys.exit(f"unknown suite {name!r}; known: {', '.join(known)}")
    report, about = Report(), machine()
    print(f"{about['processor']}, {about['cores']} cores, Python {about['python']}, {about['date']}")
    try:
        for name in wanted:
            importlib.import_module(f"benchmarks.suites.{name}").run(report)
    finally:
        _write(report, about, f"{about['date']}-{'-'.join(wanted) if len(wanted) < len(known) else 'all'}")


def _write(report: Report, about: dict[str, Any], stem: str) -> None:
    """All figures that there are, also where the run was interrupted."""
    RESULTS.mkdir(exist_ok=True)
    target, figures = RESULTS / f"{stem}.json", report.figures
    if "--add" in sys.argv and target.exists() and not _same(_read(target)["machine"], about):
        target = target.with_name(f"{target.stem}-{about['cores']}-cores.json")
    if "--add" in sys.argv and target.exists():
        figures = _added(_read(target)["figures"], figures)
    target.write_text(json.dumps({"machine": about, "figures": figures}, indent=1) + "\n", encoding="utf-8")
    missed = [figure["name"] for figure in report.figures if figure["reached"] is False]
    print(f"written to {target.relative_to(Path.cwd()) if target.is_relative_to(Path.cwd()) else target}")
    print(f"missed: {', '.join(missed)}" if missed else "every aim reached")


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two descriptions are of one machine."""
    return all(one.get(word) == other.get(word) for word in ("processor", "cores", "gpu"))


def _added(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The figures of an earlier run that were not taken again, and those of this one."""
    again = {(figure["suite"], figure["name"]) for figure in now}
    return [figure for figure in before if (figure["suite"], figure["name"]) not in again] + now


if __name__ == "__main__":
    main()
