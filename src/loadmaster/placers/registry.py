"""The registry: every file in a family folder is an algorithm of that name.

`available()` looks at file names only. A third party adds an algorithm with an entry point in the
group `loadmaster.placers` that names a class which is a `Placer`.
"""

import ast
import importlib
import pkgutil
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol, cast

from loadmaster.core.errors import InputError, ProblemError, UnknownNameError
from loadmaster.core.placement import Placement
from loadmaster.core.problem import Objective, Problem, Split
from loadmaster.core.run import Run

FAMILIES = ("heuristic", "exact", "search", "learned")
_HERE = Path(__file__).parent


class Placer(Protocol):
    """An algorithm: a frozen dataclass whose fields are its parameters.

    It may say which `objectives`, `splits` and how many ops (`max_ops`) it serves, as class
    attributes; all by default.
    """

    def __call__(self, problem: Problem, run: Run) -> Placement:
        """Answer a problem within the run's budget."""
        ...


@dataclass(frozen=True, slots=True)
class Entry:
    """One registered algorithm."""

    name: str
    family: str
    summary: str
    module: str  # or 'package:attribute' of a third party's entry point


def available() -> dict[str, Entry]:
    """Every algorithm by name, without importing any."""
    found: dict[str, Entry] = {}
    for family in FAMILIES:
        for module in pkgutil.iter_modules([str(_HERE / family)]):
            if not module.name.startswith("_"):
                path = f"loadmaster.placers.{family}.{module.name}"
                summary = _summary(_HERE / family / f"{module.name}.py")
                found[module.name] = Entry(module.name, family, summary, path)
    for point in entry_points(group="loadmaster.placers"):
        found.setdefault(point.name, Entry(point.name, "third party", point.value, point.value))
    return dict(sorted(found.items()))


def placer(name: str, **parameters: Any) -> Placer:
    """Make an algorithm by name."""
    entries = available()
    if name not in entries:
        raise UnknownNameError("algorithm", name, entries, see="loadmaster algorithms lists them")
    module, _, attribute = entries[name].module.partition(":")
    made = getattr(importlib.import_module(module), attribute or "PLACER")
    try:
        return cast(Placer, made(**parameters))
    except TypeError as problem:
        raise InputError(f"algorithm {name!r}: {problem}") from None


def name_of(algorithm: Placer) -> str:
    """The registered name of an algorithm: its file's."""
    return type(algorithm).__module__.rpartition(".")[2]


def objectives_of(algorithm: Placer) -> tuple[Objective, ...]:
    """The objectives an algorithm serves."""
    return tuple(getattr(algorithm, "objectives", tuple(Objective)))


def why_not(algorithm: Placer, problem: Problem) -> str:
    """Why an algorithm does not serve a problem, '' if it does."""
    served = objectives_of(algorithm)
    if problem.objective not in served:
        return f"{name_of(algorithm)} serves {' and '.join(served)}, not {problem.objective}"
    most = getattr(algorithm, "max_ops", problem.graph.num_ops)
    if problem.graph.num_ops > most:
        return f"{name_of(algorithm)} serves at most {most} ops, not {problem.graph.num_ops}"
    splits: tuple[Split, ...] = getattr(algorithm, "splits", tuple(Split))
    if problem.objective == Objective.THROUGHPUT and problem.split not in splits:
        return f"{name_of(algorithm)} makes {' or '.join(splits)} splits, not {problem.split}"
    return ""


def require_served(algorithm: Placer, problem: Problem) -> None:
    """Refuse a problem that an algorithm does not serve."""
    reason = why_not(algorithm, problem)
    if reason:
        raise ProblemError(f"{reason}; choose another algorithm or another question")


def _summary(path: Path) -> str:
    """First line of a module's docstring, read without importing it."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]
