"""Formulas: what one node of autograd runs are several ops in a row; it lets go of what it saved at the end.

    linear.backward     reads the weight          ┐
    linear.backward.2   reads the activation      ├ one node: it holds both until its last op is done
    linear.backward.3   reads neither             ┘

On one device that matters for activations alone, and the ledger sees when they go. A weight never goes; but
where its reader is on another device it is a copy, and this copy does.
"""

from collections.abc import Iterable, Sequence

from loadmaster.core.graph import NO_MIRROR, Phase

Use = tuple[int, int]  # tensor, op


def find_weight_uses(
    phase: Sequence[Phase], mirror: Sequence[int], maker: Sequence[int], uses: Iterable[Use]
) -> dict[Use, None]:
    """Uses to add, so that a weight which a formula reads is held to its end; `maker` is each tensor's op."""
    end = list(range(len(phase)))
    for op in range(len(phase) - 2, -1, -1):
        same = mirror[op] == mirror[op + 1] != NO_MIRROR
        if same and phase[op] == phase[op + 1] == Phase.BACKWARD:
            end[op] = end[op + 1]
    return {
        (tensor, end[user]): None
        for tensor, user in uses
        if end[user] != user and phase[maker[tensor]] == Phase.PARAM
    }
