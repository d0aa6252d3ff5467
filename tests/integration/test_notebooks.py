"""The notebooks run as they stand, print what they say they print, and show pictures."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from tests.doc_examples import normalise
from tests.notebooks import run_cells, run_notebook

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted(ROOT.glob("examples/notebooks/*.ipynb"))


def texts(cells: list[dict[str, Any]]) -> list[str]:
    """What the cells print."""
    found = [each for cell in cells for each in cell.get("outputs", []) if each["output_type"] == "stream"]
    return [normalise("".join(each["text"])) for each in found]


def pictures(cells: list[dict[str, Any]]) -> list[str]:
    """The drawings that the cells show, alone or within a page of HTML."""
    shown = [
        data for cell in cells for each in cell.get("outputs", []) for data in each.get("data", {}).values()
    ]
    return [svg for data in shown for svg in re.findall(r"<svg .*?</svg>", "".join(data), re.S)]


def test_there_are_two_notebooks_each_with_pictures() -> None:
    assert len(NOTEBOOKS) >= 2
    for path in NOTEBOOKS:
        drawn = pictures(json.loads(path.read_text(encoding="utf-8"))["cells"])
        assert len(drawn) >= 2, path.name
        for svg in drawn:
            bars = [path for path in ElementTree.fromstring(svg).iter() if path.tag.endswith("path")]
            assert len(bars) > 3, path.name


def test_a_cell_shows_what_it_prints_and_the_value_of_its_last_line() -> None:
    first, second, third = run_cells(["x = 2\nprint('two')", "print(x)\nx + 1", "x = 3"])
    assert first[0]["text"] == ["two\n"]
    assert second[0]["text"] == ["2\n"]
    assert second[1]["data"] == {"text/plain": ["3"]}
    assert third == []


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_prints_what_it_says(path: Path, tmp_path: Path) -> None:
    before = json.loads(path.read_text(encoding="utf-8"))["cells"]
    after = run_notebook(path, tmp_path)["cells"]
    assert texts(after) == texts(before), f"run: python -m tests.notebooks {path.relative_to(ROOT)}"
    assert len(pictures(after)) == len(pictures(before))
