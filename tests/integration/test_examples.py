"""Every example and the README's Python run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doc_examples import normalise, read_blocks, run_page

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    page
    for page in sorted(ROOT.glob("docs/**/*.md"))
    if "reference" not in page.parts
    if any(each.language in ("python", "console") for each in read_blocks(page.read_text(encoding="utf-8")))
]


@pytest.mark.slow
@pytest.mark.parametrize("example", sorted(ROOT.glob("examples/*.py")), ids=lambda path: path.stem)
def test_the_example_runs(example: Path, tmp_path: Path) -> None:
    result = subprocess.run([sys.executable, str(example)], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout


@pytest.mark.slow
def test_the_readme_prints_what_it_says(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert normalise(run_page(text, tmp_path)) == normalise(text), (
        "run: python -m tests.doc_examples README.md"
    )


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_page_prints_what_it_says(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert normalise(run_page(text, tmp_path)) == normalise(text), f"run: python -m tests.doc_examples {page}"


def test_the_algorithm_of_the_contributing_page_places(tmp_path: Path) -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "last_device.py").write_text(code, encoding="utf-8")
    ask = (
        "import loadmaster as lm, last_device\n"
        "placement = lm.plan('gen:chain:20', '2xref-1TB', algorithm=last_device.PLACER())\n"
        "print(placement.status, set(placement.plan.device.tolist()))\n"
    )
    result = subprocess.run([sys.executable, "-c", ask], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["optimal", "{1}"]  # a chain: the critical path is reached
