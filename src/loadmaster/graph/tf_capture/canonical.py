"""Canonical names: names of nodes that do not depend on what else the process has built.

Keras counts its layers over the whole process ('dense_7'), and TensorFlow counts scopes: the same model has
other names in the next process. Here every part of a name is counted again within its scope, in the order of
the graph:

    sequential_3_1/dense_7_1/MatMul                  sequential/dense/MatMul
    sequential_3_1/dense_8_1/MatMul                  sequential/dense_1/MatMul
    gradient_tape/sequential_3_1/dense_8_1/MatMul    gradient_tape/sequential/dense_1/MatMul
"""

import re
from collections.abc import Mapping, Sequence

from loadmaster.graph.tf_capture.phases import GRADIENTS

_COUNT = re.compile(r"(_[0-9]+)+$")


class _Names:
    def __init__(self) -> None:
        self._known: dict[tuple[str, str], str] = {}
        self._count: dict[tuple[str, str], int] = {}

    def part(self, scope: str, part: str) -> str:
        """The canonical form of a part within a canonical scope."""
        found = self._known.get((scope, part))
        if found is None:
            plain = _COUNT.sub("", part) or part
            number = self._count.get((scope, plain), 0)
            self._count[scope, plain] = number + 1
            found = self._known[scope, part] = f"{plain}_{number}" if number else plain
        return found


def canonical_names(names: Sequence[str]) -> dict[str, str]:
    """The canonical name of each name; those of the forward pass are counted first."""
    scopes, leaves = _Names(), _Names()
    found: dict[str, str] = {}
    taken: set[str] = set()
    ordered = sorted(names, key=lambda name: not GRADIENTS.isdisjoint(name.split("/")))
    for name in ordered:
        *parents, leaf = name.split("/")
        gradient = [part for part in parents if part in GRADIENTS]
        scope = ""
        for part in (part for part in parents if part not in GRADIENTS):
            scope += scopes.part(scope, part) + "/"
        whole = "".join(f"{part}/" for part in gradient) + scope
        last = leaves.part(whole, leaf) if gradient else scopes.part(scope, leaf)
        found[name] = _take(whole + last, taken)
    return found


def name_additions(names: Sequence[str], known: Mapping[str, str]) -> dict[str, str]:
    """Canonical names of nodes that were made of others later, and carry their names or scopes.

    sequential_3/dense_7/MatMul-folded                   sequential/dense/MatMul-folded
    ConstantFolding/sequential_3/dense_7/add-folded-1    ConstantFolding/sequential/dense/add-folded-1
    """
    scopes = {name.rpartition("/")[0]: made.rpartition("/")[0] for name, made in known.items()} | dict(known)
    taken = set(known.values())
    return {name: _take(_replace_run(name.split("/"), scopes), taken) for name in sorted(names)}


def _replace_run(parts: list[str], known: Mapping[str, str]) -> str:
    """The longest run of parts that is a known name or scope gets its canonical name."""
    for length in range(len(parts), 0, -1):
        for start in range(len(parts) - length + 1):
            run = known.get("/".join(parts[start : start + length]))
            if run:
                return "/".join([*parts[:start], run, *parts[start + length :]])
    return "/".join(parts)


def _take(candidate: str, taken: set[str]) -> str:
    """A name that is free: two may be alike without their counts."""
    found, number = candidate, 0
    while found in taken:
        number += 1
        found = f"{candidate}__{number}"
    taken.add(found)
    return found
