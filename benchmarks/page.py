"""python -m benchmarks.page RESULT.json ...: write docs/benchmarks.md from result files, later ones winning."""

# ruff: noqa: E501

import json
import sys
from pathlib import Path

from benchmarks.pages import exact, feasibility, placement, plain, quality, spine, steps
from benchmarks.pages.figures import Figures, wrapped

ROOT = Path(__file__).resolve().parents[1]


def page(result: Figures, sources: str) -> str:
    """The whole page."""
    m = result.machine
    head = f"""# Benchmarks

This page has every measured figure, with the hardware and the date. A figure with an *aim* is marked "reached" or "**missed**". `make bench` runs the suites of `benchmarks/suites/` and writes a dated file into `benchmarks/results/`. `python -m benchmarks.run SUITE ...` runs some of them, `python -m benchmarks.page FILE ...` writes this page, and `python -m benchmarks.compare OLD NEW` compares two files. Speed is measured here, never in a test.

Unless a section says otherwise, the figures are from {m["date"]}, {m["processor"]}, {m["cores"]} cores, one thread, Python {m["python"]}, numpy {m["versions"]["numpy"]}, numba
{m["versions"]["numba"]}, scipy {m["versions"]["scipy"]} ({sources}). The machine was shared, and its speed changed by a factor of two within minutes. So ratios compare measurements that follow each other within a second.
"""
    sections = (
        spine.simulator(result),
        spine.command_line(result),
        placement.section(result),
        quality.section(result),
        feasibility.section(result),
        exact.section(result),
        spine.transformers(result),
        steps.capture(result),
        steps.cpu(result),
        steps.gpu(result),
        plain.running(result),
        plain.train(result),
    )
    return wrapped("\n".join((head, *sections)))


def main() -> None:
    """Write the page."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m benchmarks.page benchmarks/results/DATE-all.json ...")
    files = [Path(name) for name in sys.argv[1:]]
    result = Figures([json.loads(file.read_text(encoding="utf-8")) for file in files])
    sources = ", ".join(f"`{file.as_posix()}`" for file in files)
    (ROOT / "docs" / "benchmarks.md").write_text(page(result, sources), encoding="utf-8")


if __name__ == "__main__":
    main()
