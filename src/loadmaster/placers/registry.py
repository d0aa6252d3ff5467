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
from loadmaster.core.problem import Objective, Problem
from loadmaster.core.run import Run
from loadmaster.placers.traits import Traits, read_traits, traits_of

FAMILIES = ("heuristic", "exact", "search", "pipelined", "learned")
_HERE = Path(__file__).parent


class Placer(Protocol):
    """An algorithm: a frozen dataclass whose fields are its parameters.

    It may say as class attributes which problems it serves and what it needs (`traits.py`).
    """

    def __call__(self, problem: Problem, run: Run) -> Placement:
        """Answer a problem within the run's budget."""
        ...


@dataclass(frozen=True, slots=True)
class PlacerEntry:
    """One registered algorithm."""

    name: str
    family: str
    module: str  # or 'package:attribute' of a third party's entry point

    @property
    def summary(self) -> str:
        """First paragraph of its file's docstring, read without importing it."""
        if self.family not in FAMILIES:
            return self.module
        text = (_HERE / self.family / f"{self.name}.py").read_text(encoding="utf-8")
        return (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0].replace("\n", " ")

    @property
    def traits(self) -> Traits:
        """What an algorithm of this package says about itself, read without importing it."""
        return read_traits(_HERE / self.family / f"{self.name}.py")


def own_algorithms() -> dict[str, PlacerEntry]:
    """The algorithms of this package by name, by their file names alone."""
    return {
        module.name: PlacerEntry(module.name, family, f"loadmaster.placers.{family}.{module.name}")
        for family in FAMILIES
        for module in pkgutil.iter_modules([str(_HERE / family)])
        if not module.ispkg and not module.name.startswith("_")
    }


def list_algorithms() -> dict[str, PlacerEntry]:
    """Every algorithm by name, third parties' too, without importing any."""
    found = own_algorithms()
    for point in entry_points(group="loadmaster.placers"):
        found.setdefault(point.name, PlacerEntry(point.name, "third party", point.value))
    return dict(sorted(found.items()))


def placer(name: str, **parameters: Any) -> Placer:
    """Create an algorithm by name, with parameters of your choice."""
    entries = own_algorithms()  # looking for entry points reads the whole environment: only where need be
    entries = entries if name in entries else list_algorithms()
    if name not in entries:
        raise UnknownNameError("algorithm", name, entries, see="loadmaster algorithms lists them")
    made = _class_of(entries[name])
    try:
        return cast(Placer, made(**parameters))
    except TypeError as problem:
        raise InputError(f"algorithm {name!r}: {problem}") from None


def _class_of(entry: PlacerEntry) -> Any:
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


def objectives_of(algorithm: Placer) -> tuple[Objective, ...]:
    """The objectives an algorithm serves."""
    return tuple(traits_of(algorithm).objectives)


def serves_steps_alone(algorithm: Placer | Traits) -> bool:
    """Whether an algorithm is for steps of micro-batches and nothing else."""
    known = _as_traits(algorithm)
    return known.stepped and not known.pipelines


def why_not(algorithm: Placer | Traits, problem: Problem) -> str:
    """Why an algorithm does not support a problem, or cannot run here, '' if it does."""
    return why_unsuited(algorithm, problem) or why_missing_package(algorithm)


def why_unsuited(algorithm: Placer | Traits, problem: Problem) -> str:
    """Why an algorithm does not support a problem, '' if it does; imports nothing."""
    known = _as_traits(algorithm)
    if problem.objective not in known.objectives:
        return f"{known.name} supports {' and '.join(known.objectives)}, not {problem.objective}"
    if known.max_ops is not None and problem.graph.num_ops > known.max_ops:
        return f"{known.name} supports at most {known.max_ops} ops, not {problem.graph.num_ops}"
    if problem.is_stepped and not known.stepped:
        return f"{known.name} makes no steps of micro-batches, and {problem.pipeline} is asked for"
    if serves_steps_alone(known) and not problem.is_stepped:
        return f"{known.name} makes steps of micro-batches only"
    if problem.pipeline and not (known.pipelines or known.stepped):
        return f"{known.name} makes no pipelines, and {problem.pipeline} is asked for"
    if problem.objective == Objective.THROUGHPUT and problem.split not in known.splits:
        return f"{known.name} makes {' or '.join(known.splits)} splits, not {problem.split}"
    return ""


def why_missing_package(algorithm: Placer | Traits) -> str:
    """What an algorithm needs and cannot be imported, and why not, '' if nothing. It is imported."""
    known = _as_traits(algorithm)
    module, extra = known.needs
    package = module.partition(".")[0]
    if not package:
        return ""
    if not is_installed(package):
        missing = f"{known.name} needs {package}, which is not installed"
        return f"{missing}: pip install 'loadmaster[{extra}]'"
    cause = why_not_importable(module)
    if not cause:
        return ""
    return (
        f"{known.name} needs {package}, which is installed but cannot be imported ({cause});"
        f" repair it: pip install --force-reinstall 'loadmaster[{extra}]'"
    )


def _as_traits(algorithm: Placer | Traits) -> Traits:
    return algorithm if isinstance(algorithm, Traits) else traits_of(algorithm)


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
    known = traits_of(algorithm)
    if problem.objective not in known.objectives:
        return f"ask for --objective {known.objectives[0]}, or choose another algorithm"
    if serves_steps_alone(known) and not problem.is_stepped:
        return "ask for some, e.g. --pipeline 1f1b:8 --objective step, or choose another algorithm"
    if problem.is_stepped and not known.stepped:
        able = [name for name, entry in own_algorithms().items() if entry.traits.stepped]
        return f"choose one that does ({', '.join(sorted(able))}), or leave the pipeline out"
    if problem.pipeline and not known.pipelines:
        able = [name for name, entry in own_algorithms().items() if entry.traits.pipelines]
        return f"choose one that does ({', '.join(sorted(able))}), or leave the pipeline out"
    if problem.objective == Objective.THROUGHPUT and problem.split not in known.splits:
        return f"ask for --split {known.splits[0]}, or choose another algorithm"
    return "choose another algorithm"
