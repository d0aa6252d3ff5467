"""The registry: every file in a family folder is an algorithm of that name.

`list_algorithms()` looks at file names only. A third party adds an algorithm with an entry point in the
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
    attributes; all by default. And which package or module of one it `needs`, with the extra that brings
    it, and whether it makes `pipelines`.
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


def own_algorithms() -> dict[str, Entry]:
    """The algorithms of this package by name, by their file names alone."""
    return {
        module.name: Entry(module.name, family, f"loadmaster.placers.{family}.{module.name}")
        for family in FAMILIES
        for module in pkgutil.iter_modules([str(_HERE / family)])
        if not module.name.startswith("_")
    }


def list_algorithms() -> dict[str, Entry]:
    """Every algorithm by name, third parties' too, without importing any."""
    found = own_algorithms()
    for point in entry_points(group="loadmaster.placers"):
        found.setdefault(point.name, Entry(point.name, "third party", point.value))
    return dict(sorted(found.items()))


def placer(name: str, **parameters: Any) -> Placer:
    """Make an algorithm by name."""
    entries = own_algorithms()  # looking for entry points reads the whole environment: only where need be
    entries = entries if name in entries else list_algorithms()
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
    """Why an algorithm does not serve a problem, or cannot run here, '' if it does."""
    return why_unsuited(algorithm, problem) or why_missing_package(algorithm)


def why_unsuited(algorithm: Placer, problem: Problem) -> str:
    """Why an algorithm does not serve a problem, '' if it does; imports nothing."""
    served = objectives_of(algorithm)
    if problem.objective not in served:
        return f"{name_of(algorithm)} serves {' and '.join(served)}, not {problem.objective}"
    most = getattr(algorithm, "max_ops", problem.graph.num_ops)
    if problem.graph.num_ops > most:
        return f"{name_of(algorithm)} serves at most {most} ops, not {problem.graph.num_ops}"
    if problem.pipeline and not getattr(algorithm, "pipelines", False):
        return f"{name_of(algorithm)} makes no pipelines, and {problem.pipeline} is asked for"
    if problem.objective == Objective.THROUGHPUT and problem.split not in splits_of(algorithm):
        return f"{name_of(algorithm)} makes {' or '.join(splits_of(algorithm))} splits, not {problem.split}"
    return ""


def splits_of(algorithm: Placer) -> tuple[Split, ...]:
    """The splits an algorithm makes."""
    return tuple(getattr(algorithm, "splits", tuple(Split)))


def why_missing_package(algorithm: Placer) -> str:
    """What an algorithm needs and cannot be imported, and why not, '' if nothing. It is imported."""
    module, extra = getattr(algorithm, "needs", ("", ""))
    package = module.partition(".")[0]
    if not package:
        return ""
    if not is_installed(package):
        missing = f"{name_of(algorithm)} needs {package}, which is not installed"
        return f"{missing}: pip install 'loadmaster[{extra}]'"
    cause = why_not_importable(module)
    if not cause:
        return ""
    return (
        f"{name_of(algorithm)} needs {package}, which is installed but cannot be imported ({cause});"
        f" repair it: pip install --force-reinstall 'loadmaster[{extra}]'"
    )


def is_installed(package: str) -> bool:
    """Whether a package is there, without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # something that was imported under its name, or keeps it out
        return False


def why_not_importable(module: str) -> str:
    """What importing a module raises, '' if nothing."""
    try:
        importlib.import_module(module)
    except Exception as trouble:  # a broken package may raise anything
        told = str(trouble).strip().partition("\n")[0]
        return f"{type(trouble).__name__}: {told}" if told else type(trouble).__name__
    return ""


def require_served(algorithm: Placer, problem: Problem) -> None:
    """Refuse a problem that an algorithm does not serve, and say what would be served."""
    reason = why_unsuited(algorithm, problem)
    if reason:
        raise ProblemError(f"{reason}; {_suggest_remedy(algorithm, problem)}")
    reason = why_missing_package(algorithm)
    if reason:
        raise ProblemError(f"{reason}; or choose another algorithm")


def _suggest_remedy(algorithm: Placer, problem: Problem) -> str:
    """What to ask instead."""
    served, splits = objectives_of(algorithm), splits_of(algorithm)
    if problem.objective not in served:
        return f"ask for --objective {served[0]}, or choose another algorithm"
    if problem.pipeline and not getattr(algorithm, "pipelines", False):
        able = [name for name in own_algorithms() if getattr(placer(name), "pipelines", False)]
        return f"choose one that does ({', '.join(sorted(able))}), or leave the pipeline out"
    if problem.objective == Objective.THROUGHPUT and problem.split not in splits:
        return f"ask for --split {splits[0]}, or choose another algorithm"
    return "choose another algorithm"
