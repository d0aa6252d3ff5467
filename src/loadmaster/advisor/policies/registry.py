"""The registry of policies: every file of this folder is a policy of that name."""

import ast
import importlib
import pkgutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from loadmaster.advisor.jobs.job import Job
from loadmaster.advisor.jobs.state import ClusterState, Decision
from loadmaster.core.errors import InputError, UnknownNameError

_HERE = Path(__file__).parent
_NO_POLICY = ("registry",)


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One call of a policy: its random numbers, and the jobs that may come, for policies that look ahead."""

    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    future: tuple[Job, ...] = ()
    mean_gap_s: float = 0.0


class Policy(Protocol):
    """A frozen dataclass whose fields are its parameters."""

    def __call__(self, job: Job, state: ClusterState, run: Run) -> Decision:
        """Admit or reject, and where."""
        ...


def list_policies() -> dict[str, str]:
    """Every policy and the first paragraph of its file, without importing any."""
    return {name: _summary(name) for name in policy_names()}


def policy_names() -> list[str]:
    """Every policy, by the file names alone."""
    names = (module.name for module in pkgutil.iter_modules([str(_HERE)]))
    return sorted(name for name in names if name not in _NO_POLICY and not name.startswith("_"))


def _summary(name: str) -> str:
    text = (_HERE / f"{name}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0].replace("\n", " ")


def policy(name: str, **parameters: Any) -> Policy:
    """Make a policy by name; 'constant:4' sets the first parameter."""
    bare, _, first = name.partition(":")
    known = policy_names()
    if bare not in known:
        raise UnknownNameError("policy", bare, known, see="loadmaster advise policies lists them")
    made = importlib.import_module(f"loadmaster.advisor.policies.{bare}").POLICY
    if first:
        try:
            parameters = {next(iter(made.__dataclass_fields__)): int(first), **parameters}
        except (ValueError, StopIteration):
            raise InputError(f"policy {name!r}: {first!r} is not a whole number") from None
    try:
        return cast(Policy, made(**parameters))
    except TypeError as problem:
        raise InputError(f"policy {name!r}: {problem}") from None
