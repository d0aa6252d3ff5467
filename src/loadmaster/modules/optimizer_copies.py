"""An optimizer of the user's on other parameters: to step a part of it, or to see what its step takes."""

from collections import defaultdict
from typing import Any

import torch


def copy_optimizer(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The same optimizer with other groups and no state yet; whatever else it keeps is shared.

    It is not made by its constructor, which may want arguments that only its owner knows.
    """
    made = object.__new__(type(optimizer))
    made.__dict__.update(optimizer.__dict__)
    made.__dict__.pop("step", None)  # a schedule puts a wrapper there that would step the original
    made.state = defaultdict(dict)
    made.param_groups = groups
    return made
