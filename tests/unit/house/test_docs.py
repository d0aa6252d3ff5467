"""What the pages claim is what the code does."""

import re
from pathlib import Path

import pytest

from loadmaster.cli import docs
from loadmaster.core.errors import FormatError

ROOT = Path(__file__).resolve().parents[3]
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


_PACKAGES = "|".join(sorted(each.name for each in (ROOT / "src" / "loadmaster").iterdir() if each.is_dir()))
_NAMED = re.compile(rf"`((?:{_PACKAGES})(?:/\w+)+(?:\.py)?/?)`")


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_every_module_a_page_names_exists(page: Path) -> None:
    for name in _NAMED.findall(page.read_text(encoding="utf-8")):
        place = ROOT / "src" / "loadmaster" / name
        assert place.exists() or place.with_suffix(".py").exists(), f"{page.name} names {name}"


def test_every_room_is_in_the_architecture() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rooms = {each.parent for each in (ROOT / "src" / "loadmaster").glob("*/**/__init__.py")}
    for room in rooms:
        name = str(room.relative_to(ROOT / "src" / "loadmaster"))
        inside = f"`{name.split('/')[0]}" in text and f"{room.name}/" in text
        assert f"`{name}`" in text or f"{name}/" in text or inside or room.name.startswith("_"), name
