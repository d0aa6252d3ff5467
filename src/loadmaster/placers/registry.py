"""The registry: every file in a family folder is an algorithm of that name.

`available()` looks at file names only. A third party adds an algorithm with an entry point in the
group `loadmaster.placers` that names a class which is a `Placer`.
"""

import ast
import importlib
import importlib.util
import pkgutil
from dataclasses import dataclass
from importlib.metadata import entry_points
from operator import attrgetter
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
    attributes; all by default. And which package it `needs`, with the extra that brings it.
    """

    def __call__(self, problem: Problem, run: Run) -> Placement:
        """Answer a problem within the run's budget."""
        ...


@dataclass(frozen=True, slots=True)
class Entry:
    """One registered algorithm."""

    name: str
    family: str
    module: str  # or 'package:attribute' of a third party's entry point

    @property
    def summary(self) -> str:
        """First line of its file's docstring, read without importing it."""
        if self.family not in FAMILIES:
            return self.module
        text = (_HERE / self.family / f"{self.name}.py").read_text(encoding="utf-8")
        return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]


def own() -> dict[str, Entry]:
    """The algorithms of this package by name, by their file names alone."""
    return {
        module.name: Entry(module.name, family, f"loadmaster.placers.{family}.{module.name}")
        for family in FAMILIES
        for module in pkgutil.iter_modules([str(_HERE / family)])
        if not module.name.startswith("_")
    }


def available() -> dict[str, Entry]:
    """Every algorithm by name, third parties' too, without importing any."""
    found = own()
    for point in entry_points(group="loadmaster.placers"):
        found.setdefault(point.name, Entry(point.name, "third party", point.value))
    return dict(sorted(found.items()))


def placer(name: str, **parameters: Any) -> Placer:
    """Make an algorithm by name."""
    entries = own()  # looking for entry points reads the whole environment: only where need be
    entries = entries if name in entries else available()
    if name not in entries:
        raise UnknownNameError("algorithm", name, entries, see="loadmaster algorithms lists them")
    made = _class_of(entries[name])
    try:
        return cast(Placer, made(**parameters))
    except TypeError as problem:
        raise InputError(f"algorithm {name!r}: {problem}") from None


def _class_of(entry: Entry) -> Any:
    module, _, attribute = entry.module.partition(":")
    if entry.family in FAMILIES:
        return importlib.import_module(module).PLACER
    try:
        return attrgetter(attribute or "PLACER")(importlib.import_module(module))
    except (ImportError, AttributeError) as problem:
        raise InputError(
            f"algorithm {entry.name!r} of a third party cannot be loaded from {entry.module!r}: {problem};"
            " repair or remove its package"
        ) from None


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
    if problem.pipeline and not getattr(algorithm, "pipelines", False):
        return f"{name_of(algorithm)} makes no pipelines, and {problem.pipeline} is asked for"
    return lacking(algorithm)


def lacking(algorithm: Placer) -> str:
    """The package that an algorithm needs and that is not installed, '' if none."""
    package, extra = getattr(algorithm, "needs", ("", ""))
    if not package or is_installed(package):
        return ""
    return f"{name_of(algorithm)} needs {package}, which is not installed: pip install 'loadmaster[{extra}]'"


def is_installed(package: str) -> bool:
    """Whether a package can be imported, without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # something that was imported under its name, or keeps it out
        return False


def require_served(algorithm: Placer, problem: Problem) -> None:
    """Refuse a problem that an algorithm does not serve."""
    reason = why_not(algorithm, problem)
    if reason:
        raise ProblemError(f"{reason}; choose another algorithm or another question")
