"""Traits: what an algorithm says about itself, so that an unsuitable one is never imported.

They are class attributes of an algorithm, each on one line:

    objectives: ClassVar[tuple[Objective, ...]] = (Objective.STEP,)

`read_traits` reads them from the file of an algorithm of this package, `traits_of` from an algorithm that is
there already. A value is a literal, a member of an enumeration, or one of the names below.
"""

import ast
import re
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from loadmaster.core.problem import Objective, Split

MOST_OPS = 200_000  # of list schedulers: beyond, passes over single ops take gigabytes; m_etf places groups
NEEDS_ORTOOLS = ("ortools.sat.python.cp_model", "exact")  # the module, and the extra that brings it
_NAMES = {"Objective": Objective, "Split": Split, "MOST_OPS": MOST_OPS, "NEEDS_ORTOOLS": NEEDS_ORTOOLS}
_LINE = re.compile(r"^    (\w+): ClassVar\[.+?\] = (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Traits:
    """Which problems an algorithm supports, and what it needs. Default: all, and nothing."""

    name: str
    objectives: tuple[Objective, ...] = tuple(Objective)
    splits: tuple[Split, ...] = tuple(Split)
    max_ops: int | None = None
    pipelines: bool = False  # for throughput
    stepped: bool = False  # pipelines for the time of a whole step of micro-batches
    needs: tuple[str, str] = ("", "")  # a package or a module of one, and the extra that brings it


_FIELDS = tuple(field.name for field in fields(Traits) if field.name != "name")


def traits_of(algorithm: object) -> Traits:
    """What an algorithm says about itself; its name is that of its file."""
    said = {name: getattr(algorithm, name) for name in _FIELDS if hasattr(algorithm, name)}
    return Traits(type(algorithm).__module__.rpartition(".")[2], **said)


@cache
def read_traits(path: Path) -> Traits:
    """What the algorithm in a file says about itself, without importing it."""
    said = {
        name: _evaluate(ast.parse(value, mode="eval").body)
        for name, value in _LINE.findall(path.read_text(encoding="utf-8"))
        if name in _FIELDS
    }
    return Traits(path.stem, **said)


def _evaluate(node: ast.expr) -> Any:
    """The value of a trait as it is written."""
    match node:
        case ast.Constant():
            return node.value
        case ast.Tuple():
            return tuple(_evaluate(part) for part in node.elts)
        case ast.Name():
            return _NAMES[node.id]
        case ast.Attribute():
            return getattr(_evaluate(node.value), node.attr)
    raise ValueError(f"a trait is a literal or a known name, not {ast.unparse(node)}")
