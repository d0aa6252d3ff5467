"""python -m benchmarks.run [SUITE ...]: run the suites, print the figures, write a dated result file."""

import importlib
import json
import pkgutil
import sys
from pathlib import Path

from benchmarks import suites
from benchmarks.measure import Report, machine

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Run the named suites, or all."""
    known = [module.name for module in pkgutil.iter_modules(suites.__path__)]
    wanted = sys.argv[1:] or known
    for name in wanted:
        if name not in known:
            sys.exit(f"unknown suite {name!r}; known: {', '.join(known)}")
    report, about = Report(), machine()
    print(f"{about['processor']}, {about['cores']} cores, Python {about['python']}, {about['date']}")
    for name in wanted:
        importlib.import_module(f"benchmarks.suites.{name}").run(report)
    RESULTS.mkdir(exist_ok=True)
    target = RESULTS / f"{about['date']}-{'-'.join(wanted) if len(wanted) < len(known) else 'all'}.json"
    target.write_text(
        json.dumps({"machine": about, "figures": report.figures}, indent=1) + "\n", encoding="utf-8"
    )
    missed = [figure["name"] for figure in report.figures if figure["reached"] is False]
    print(f"written to {target.relative_to(Path.cwd()) if target.is_relative_to(Path.cwd()) else target}")
    print(f"missed: {', '.join(missed)}" if missed else "every aim reached")


if __name__ == "__main__":
    main()
