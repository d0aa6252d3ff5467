"""What an optimizer keeps for each parameter of a model, seen on one that is made for this alone.

Planning and the host store both need it, in whatever process they run; so it is found once and is plain data.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from loadmaster.core.errors import InputError
from loadmaster.shards.model.blocks import Chain
from loadmaster.shards.model.optimizer_state import (
    StateLayout,
    check_optimizer,
    check_steps_apart,
    discover_state_layouts,
    starts_at_zero,
)
from loadmaster.shards.model.refusals import describe_options
from loadmaster.shards.spec.trial import Trial


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerProbe:
    """State, groups and options of a trial's optimizer."""

    states: tuple[StateLayout | None, ...]  # [parameter], None = not trained
    group_of: tuple[int, ...]  # [parameter], -1 = not trained
    starts_at_zero: bool  # all state begins as zeros
    options: Mapping[str, Any]  # of the optimizer and its schedule; they may not change later


def probe_optimizer(trial: Trial, chain: Chain) -> tuple[OptimizerProbe, torch.optim.Optimizer]:
    """Make the optimizer and its schedule once and look at them; refuses what cannot be used."""
    optimizer = trial.optim([parameter for parameter in chain.parameters if parameter.requires_grad])
    check_optimizer(optimizer, name=trial.name)
    states, group_of = _find_state_layouts(optimizer, chain)
    stepped = [
        (parameter.ndim, group)
        for parameter, group in zip(chain.parameters, group_of, strict=True)
        if group >= 0
    ]
    if stepped:
        check_steps_apart(optimizer, *max(stepped), name=trial.name)
    options = describe_options(trial, optimizer)
    return OptimizerProbe(tuple(states), tuple(group_of), starts_at_zero(optimizer), options), optimizer


def _find_state_layouts(
    optimizer: torch.optim.Optimizer, chain: Chain
) -> tuple[list[StateLayout | None], list[int]]:
    """State layout and group of each parameter."""
    group_of_id = {
        id(parameter): group
        for group, options in enumerate(optimizer.param_groups)
        for parameter in options["params"]
    }
    foreign = group_of_id.keys() - {id(parameter) for parameter in chain.parameters}
    if foreign:
        raise InputError(
            f"optim was given the model's parameters, but steps {len(foreign)} that are not among them (of"
            " the loss?); make them parameters of the model"
        )
    known: dict[tuple[int, torch.dtype, int], StateLayout] = {}
    states: list[StateLayout | None] = []
    groups = []
    for parameter in chain.parameters:
        group = group_of_id.get(id(parameter), -1) if parameter.requires_grad else -1
        groups.append(group)
        if group < 0:
            states.append(None)
            continue
        key = (group, parameter.dtype, parameter.ndim)
        if key not in known:
            found = discover_state_layouts(
                optimizer, [parameter.ndim], group, dtype=parameter.dtype, device="cpu"
            )
            known[key] = found[parameter.ndim]
        states.append(known[key])
    return states, groups
