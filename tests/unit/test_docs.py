"""What the pages claim is what the code does."""

import re
from pathlib import Path

import pytest

from loadmaster.cli import docs
from loadmaster.core.errors import FormatError

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def test_the_readme_lists_every_algorithm() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert docs.with_table(text) == text, "run: python -m loadmaster.cli.docs README.md"


def test_a_page_without_the_marks_is_refused() -> None:
    with pytest.raises(FormatError, match="add the two lines"):
        docs.with_table("# nothing here")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_table_is_torn_by_an_empty_line(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    for before, empty, row, below in zip(lines, lines[1:], lines[2:], [*lines[3:], ""], strict=False):
        torn = before.startswith("|") and not empty and row.startswith("|")
        assert not torn or below.replace(" ", "").startswith("|-"), (
            row
        )  # a new table has its line below the head


def test_every_file_the_architecture_names_exists() -> None:
    tree = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    for name in re.findall(r"`((?:core|graph|cluster|cost|simulator|placers|report|cli)/[\w/]+\.py)`", tree):
        assert (ROOT / "src" / "loadmaster" / name).exists(), name
