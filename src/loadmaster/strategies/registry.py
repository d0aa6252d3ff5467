"""The registry: every file in `search/` is a search of that name; listing them imports none."""

import ast
import importlib
import pkgutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from loadmaster.core.errors import InputError, UnknownNameError
from loadmaster.strategies.scoring.evaluator import Evaluated, Evaluator
from loadmaster.strategies.search_run import SearchRun

_SEARCHES = Path(__file__).parent / "search"


class Search(Protocol):
    """An algorithm: a frozen dataclass whose fields are its parameters."""

    def __call__(self, evaluator: Evaluator, run: SearchRun) -> list[Evaluated]:
        """States within the run's budget, the best first; at least one."""
        ...


@dataclass(frozen=True, slots=True)
class SearchEntry:
    """One registered search."""

    name: str
    module: str

    @property
    def summary(self) -> str:
        """First line of its file's docstring, read without importing it."""
        text = (_SEARCHES / f"{self.name}.py").read_text(encoding="utf-8")
        return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]


def list_searches() -> dict[str, SearchEntry]:
    """Every search by name."""
    found = (m.name for m in pkgutil.iter_modules([str(_SEARCHES)]) if not m.name.startswith("_"))
    return {name: SearchEntry(name, f"loadmaster.strategies.search.{name}") for name in sorted(found)}


def make_search(name: str, **parameters: Any) -> Search:
    """Make a search by name."""
    known = list_searches()
    if name not in known:
        raise UnknownNameError("strategy search", name, known)
    made = importlib.import_module(known[name].module).SEARCH
    try:
        return cast(Search, made(**parameters))
    except TypeError as problem:
        raise InputError(f"search {name!r}: {problem}") from None
