"""Forms: what each replica of a group holds of a tensor. Recorded for every tensor, never inferred later.

FULL      the same on every replica
PART      the rows of that replica
SUM       a partial sum: added over replicas it is the tensor
WEIGHTED  a mean over the replica's rows: weighted by rows / batch and added it is the tensor
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from loadmaster.core.arrays import Bools, Bytes8, Ints, require_range, set_column
from loadmaster.core.errors import GraphError


class Form(IntEnum):
    """What a replica holds of a tensor."""

    FULL = 0
    PART = 1
    SUM = 2
    WEIGHTED = 3


@dataclass(frozen=True, slots=True, eq=False)
class Splits:
    """Which ops of a graph may run on some of the rows, and what becomes of each tensor then."""

    batch: int
    form: Bytes8  # [T] Form inside of a replicated group
    outer: (
        Ints  # [T] how often the rows repeat in memory: 1 = rows are outermost; 0 where the form is not PART
    )
    splits: Bools  # [N] may stand in a group whose devices have rows of their own
    scales: Bools  # [N] its work shrinks with the rows
    reason: dict[int, str]  # op -> why it does not split
    deviations: dict[int, str]  # op -> how its numbers differ when it is split

    def __post_init__(self) -> None:
        """Check the columns once."""
        num_tensors, num_ops = len(self.form), len(self.splits)
        set_column(self, "form", np.int8, (num_tensors,), GraphError)
        set_column(self, "outer", np.int32, (num_tensors,), GraphError)
        set_column(self, "splits", np.bool_, (num_ops,), GraphError)
        set_column(self, "scales", np.bool_, (num_ops,), GraphError)
        require_range(self.form, 0, len(Form), "Splits.form", GraphError)
        if ((self.outer > 0) != (self.form == Form.PART)).any():
            raise GraphError(
                "Splits.outer: rows repeat in memory for tensors of form PART, and only for them"
            )
        if set(self.reason) != set(np.flatnonzero(~self.splits).tolist()):
            raise GraphError("Splits.reason: every op that does not split needs a reason, and no other")
