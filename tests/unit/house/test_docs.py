"""What the pages claim is what the code does."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from loadmaster.cli import docs
from loadmaster.core.errors import FormatError

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def test_the_algorithms_page_lists_every_algorithm() -> None:
    text = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    assert docs.with_table(text) == text, "run: make docs"


@pytest.mark.parametrize("name", ["docs/reference/commands.md", "docs/reference/python.md"])
def test_the_reference_says_what_the_code_says(name: str) -> None:
    assert docs.write_pages()[name] == (ROOT / name).read_text(encoding="utf-8"), "run: make docs"


def test_the_readme_takes_a_minute() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900


def test_every_page_can_be_reached_from_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in ROOT.glob("docs/**/*.md"):
        assert f": {page.relative_to(ROOT / 'docs')}\n" in menu, page.name


def test_the_pages_can_be_built_with_every_link_checked(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "guides" / "does-not-fit.html").exists()


def _read_texts_of_the_program() -> set[str]:
    """Constant pieces of at least two words out of which messages are made."""
    found = set()
    for module in (ROOT / "src").rglob("*.py"):
        source = module.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 600:
                text = re.sub(r"\s+", " ", node.value)
                found |= {piece.strip(" ;:,.'()") for piece in re.split("{}|;", text)}
    return {text for text in found if len(text.split()) >= 2 and len(text) >= 10}


def test_every_message_on_the_page_of_errors_is_one_that_the_program_can_say() -> None:
    texts = _read_texts_of_the_program()
    rows = re.findall(r"^\| (`.*?)(?= \| )", (ROOT / "docs/reference/errors.md").read_text("utf-8"), re.M)
    assert len(rows) > 20
    for message in (each for row in rows for each in re.findall(r"`([^`]+)`", row)):
        said = sum(len(text) for text in _longest_apart([text for text in texts if text in message]))
        assert said >= 0.25 * len(message), message


def _longest_apart(found: list[str]) -> list[str]:
    """Those that are no part of another."""
    return [text for text in found if not any(text != other and text in other for other in found)]


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


_RUN = ("python", "console")
_SHOWN = {"text", "sh", "toml", "json"}  # outputs and drawings, commands that a test parses, and files


def _find_fences(page: Path) -> list[tuple[str, str, bool]]:
    """(language, body, whether it is left out with a reason) of every block of a page."""
    found = re.findall(
        r"^(<!-- not run: [^>]+-->\s*\n)?^```([^\n]*)\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S
    )
    return [(info.partition(" ")[0], body, bool(skip)) for skip, info, body in found]


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.name != "ARCHITECTURE.md"], ids=lambda page: page.name
)
def test_every_block_of_a_page_is_run_or_says_what_it_is(page: Path) -> None:
    for language, body, _ in _find_fences(page):
        assert language in (*_RUN, *_SHOWN), f"{page.name}: a block without a language: {body[:60]!r}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_that_a_page_shows_is_one_that_the_command_line_accepts(page: Path) -> None:
    import shlex

    import typer

    from loadmaster.cli.commands import app

    for language, body, _ in _find_fences(page):
        for line in body.replace("\\\n", " ").splitlines() if language in ("sh", "console") else ():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            words = words[: words.index("|")] if "|" in words else words
            if "loadmaster" not in words or (language == "console" and not line.startswith("$ ")):
                continue
            command = typer.main.get_command(app)
            words = words[words.index("loadmaster") + 1 :]
            while words and words[0] in getattr(command, "commands", {}):
                command = command.commands[words.pop(0)]  # type: ignore[attr-defined]
            command.make_context("loadmaster", words)  # raises where an option or argument is not known
