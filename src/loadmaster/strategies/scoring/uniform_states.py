"""Uniform states: one action for all groups, and for those that may not take it the nearest that they may."""

import numpy as np

from loadmaster.strategies.scoring.evaluator import Evaluator


def uniform_state(evaluator: Evaluator, action: int) -> tuple[int, ...]:
    """`action` for every group; one that may not take it is placed on a device of the set, else anywhere."""
    choice = []
    wanted = evaluator.actions[action]
    single = {a.devices[0]: i for i, a in enumerate(evaluator.actions) if len(a.devices) == 1}
    for g in range(evaluator.facts.num_groups):
        if evaluator.allowed[g, action]:
            choice.append(action)
            continue
        inside = [single[d] for d in wanted.devices if d in single and evaluator.allowed[g, single[d]]]
        allowed = np.flatnonzero(evaluator.allowed[g])
        choice.append(inside[0] if inside else int(allowed[0]))
    return tuple(choice)


def every_device(evaluator: Evaluator, mode: str, sync: str) -> int:
    """The action that takes all devices."""
    most = max(len(a.devices) for a in evaluator.actions)
    for i, a in enumerate(evaluator.actions):
        if len(a.devices) == most and (most == 1 or (a.mode == mode and a.sync == sync)):
            return i
    return next(i for i, a in enumerate(evaluator.actions) if len(a.devices) == most)
