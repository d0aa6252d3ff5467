"""Canonical names: names of nodes that do not depend on what else the process has built.

Keras counts its layers over the whole process ('dense_7'), and TensorFlow counts scopes: the same model has
other names in the next process. Here every part of a name is counted again within its scope, in the order of
the graph:

    sequential_3_1/dense_7_1/MatMul                  sequential/dense/MatMul
    sequential_3_1/dense_8_1/MatMul                  sequential/dense_1/MatMul
    gradient_tape/sequential_3_1/dense_8_1/MatMul    gradient_tape/sequential/dense_1/MatMul
"""

import re
from collections.abc import Sequence

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
        candidate, number = whole + last, 0
        while candidate in taken:  # two names may be alike without their counts
            number += 1
            candidate = f"{whole}{last}__{number}"
        taken.add(candidate)
        found[name] = candidate
    return found
