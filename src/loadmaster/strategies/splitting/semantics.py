"""Semantics: how the numbers of a strategy differ from those of one device, and which ops cannot be split."""

from loadmaster.core.graph import Graph
from loadmaster.core.strategy import Mode, Strategy
from loadmaster.strategies.splitting.forms import Splits

_SHOWN = 3  # names in a sentence


def find_semantics(strategy: Strategy, splits: Splits) -> tuple[str, ...]:
    """How the numbers of a strategy differ from those of one device, one sentence each."""
    apart = [g.ops for g in strategy.groups if len(g.devices) > 1 and g.mode == Mode.REPLICATE]
    apart += [g.ops for g in strategy.groups if g.mode == Mode.PIPELINE and g.microbatches > 1]
    ops = {int(op) for group in apart for op in group}
    return tuple(sorted({text for op, text in splits.deviations.items() if op in ops}))


def find_obstacles(graph: Graph, splits: Splits) -> tuple[str, ...]:
    """Which ops have to be placed or duplicated and why, one sentence for each reason."""
    names: dict[str, list[str]] = {}
    for op, why in sorted(splits.reason.items()):
        names.setdefault(why, []).append(graph.op_name[op])
    return tuple(
        f"{_list_names(ops)} cannot run on some of the rows, because {why}; the group is placed or duplicated"
        for why, ops in names.items()
    )


def _list_names(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
