"""Semantics: how the numbers of a strategy differ from those of one device."""

from loadmaster.core.strategy import Mode, Strategy
from loadmaster.strategies.splitting.forms import Splits


def find_semantics(strategy: Strategy, splits: Splits) -> tuple[str, ...]:
    """How the numbers of a strategy differ from those of one device, one sentence each."""
    apart = [g.ops for g in strategy.groups if len(g.devices) > 1 and g.mode == Mode.REPLICATE]
    apart += [g.ops for g in strategy.groups if g.mode == Mode.PIPELINE and g.microbatches > 1]
    ops = {int(op) for group in apart for op in group}
    return tuple(sorted({text for op, text in splits.deviations.items() if op in ops}))
