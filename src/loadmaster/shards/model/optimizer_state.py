"""What an optimizer keeps for a parameter, found by one step of a tiny copy; and one step of any part of it.

A state tensor whose shape follows the parameter's goes into the slab; numbers and single-element tensors
(step counts) stay beside it. How an optimizer starts its state is its own business: the first step of a
parameter runs with none, and what it made is then moved into the slab.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from loadmaster.core.errors import InputError, LoadmasterError
from loadmaster.modules import randomness
from loadmaster.modules.optimizer_copies import copy_optimizer

_ODD_SIZES = (2, 3, 5, 7, 11, 13)
_WHOLE_MODEL = ("LBFGS", "SAM")
_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


@dataclass(frozen=True, slots=True, eq=False)
class StateLayout:
    """Keys whose tensors follow the parameter's shape: which of its axes they keep, and their dtype."""

    large: dict[str, tuple[tuple[int, ...], torch.dtype]]

    def shape(self, key: str, parameter: Sequence[int]) -> tuple[int, ...]:
        """The shape of one state tensor of a parameter."""
        return tuple(parameter[axis] for axis in self.large[key][0])


@dataclass(slots=True, eq=False)
class StepMember:
    """One parameter in a step: tensors wherever they stand, and its state, which the step changes."""

    group: int
    param: torch.Tensor
    grad: torch.Tensor
    state: dict[str, Any] = field(default_factory=dict)


Hyper = list[dict[str, Any]]  # the options of each param group at one step


def copy_hyper(optimizer: torch.optim.Optimizer) -> Hyper:
    """The options of each group now: a step that runs later must not see a later learning rate."""
    return [
        {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        for group in optimizer.param_groups
    ]


def adapt_hyper_to_host(hyper: Hyper) -> Hyper:
    """The same options for a step on the CPU: its fused kernel, where the user left the choice open."""
    return [
        {**group, "fused": True}
        if group.get("fused", 0) is None
        and group.get("foreach", 0) is None
        and not group.get("differentiable")
        and not isinstance(group.get("lr"), torch.Tensor)
        else group
        for group in hyper
    ]


def step_members(
    template: torch.optim.Optimizer, members: Sequence[StepMember], hyper: Hyper
) -> torch.optim.Optimizer:
    """One optimizer step of these parameters alone, in place; gives the part of it that stepped."""
    part = copy_optimizer(template, [])
    for group in sorted({member.group for member in members}):
        params = []
        for member in members:
            if member.group == group:
                leaf = torch.nn.Parameter(member.param)
                leaf.grad = member.grad
                if not member.state and template.state:
                    member.state.update(_construct_state(template, leaf, hyper[group]))
                part.state[leaf] = member.state
                params.append(leaf)
        part.param_groups.append({**hyper[group], "params": params})
    part.step()
    return part


def _construct_state(template: torch.optim.Optimizer, leaf: torch.Tensor, options: dict[str, Any]) -> Any:
    """State that is made where the optimizer is (Adagrad's): one that is stepped in part never was."""
    try:
        own = {key: options[key] for key in template.defaults}  # a constructor may look at either
        made = type(template)([{**own, "params": [leaf]}], **template.defaults)
    except TypeError:  # it is made of something else; perhaps it makes state in its first step, too
        return {}
    return made.state[leaf]


def _find_own_state(part: Any, template: Any, given: dict[str, Any]) -> str:
    """What a step has changed beside the state of its parameters, '' = nothing."""
    plain = (int, float, bool, str, type(None))
    before, after = vars(template), vars(part)
    names = [n for n, v in after.items() if isinstance(v, plain) and n[0] != "_" and before.get(n) != v]
    options = [
        key
        for key, value in part.param_groups[0].items()
        if isinstance(value, plain) and key in given and given[key] != value
    ]
    return next(iter([*names, *options]), "")


def starts_at_zero(optimizer: torch.optim.Optimizer) -> bool:
    """Whether all state it keeps begins as zeros: then it can begin where it stays."""
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)


def make_initial_state(
    options: dict[str, Any], views: dict[str, torch.Tensor], device: torch.device
) -> dict[str, Any]:
    """The state Adam and AdamW begin with, in these views."""
    for view in views.values():
        view.zero_()
    dtype = torch.get_default_dtype() if not options.get("fused") else torch.float32
    dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return {"step": torch.zeros((), dtype=dtype, device=device), **views}


def check_optimizer(optimizer: Any, *, name: str) -> None:
    """Refuse by name what cannot be stepped a part at a time."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(
            f"trial {name!r}: optim gave {type(optimizer).__name__}, not a torch.optim.Optimizer"
        )
    kind = type(optimizer).__name__
    if any(word in kind for word in _WHOLE_MODEL):
        raise InputError(
            f"trial {name!r}: {kind} looks at the whole model in each step and cannot go shard by shard;"
            " use an element-wise or per-tensor optimizer (SGD, AdamW, Adafactor, Muon, ...)"
        )
    if any(vars(optimizer).get(hooks) for hooks in _STEP_HOOKS):
        raise InputError(
            f"trial {name!r}: its {kind} has step hooks, which would run once for each shard, not once a"
            " step; give a callback to the study instead"
        )


def check_steps_apart(optimizer: torch.optim.Optimizer, rank: int, group: int, *, name: str) -> None:
    """Refuse what steps a parameter otherwise beside another one than by itself, or draws random numbers.

    Shards are stepped one after another, in an order and in threads of the trainer's.
    """
    size, kind, hyper = _ODD_SIZES[:rank], type(optimizer).__name__, copy_hyper(optimizer)

    def step(*numbers: int) -> list[torch.Tensor]:
        members = [
            StepMember(group, torch.full(size, 0.5 * number), torch.full(size, 0.3 * number**2))
            for number in numbers
        ]
        step_members(optimizer, members, hyper)
        return [member.param for member in members]

    before = randomness.fingerprint_generators(torch.device("cpu"))
    with randomness.preserve_rng():
        together = step(1, 2)
        drew = randomness.fingerprint_generators(torch.device("cpu")) != before
        apart = [*step(1), *step(2)]
    if drew:
        raise InputError(
            f"trial {name!r}: {kind} draws random numbers in its step, which shards would draw in another"
            " order; add the noise in the model, or in its data"
        )
    if not all(torch.allclose(one, other) for one, other in zip(together, apart, strict=True)):
        raise InputError(
            f"trial {name!r}: {kind} steps a parameter otherwise beside others than by itself, so it looks"
            " at all of them at once and cannot go shard by shard; use clip_norm for a norm over all"
            " gradients, or an optimizer that keeps to each parameter"
        )


def discover_state_layouts(
    optimizer: torch.optim.Optimizer, ranks: Sequence[int], group: int, *, dtype: torch.dtype, device: Any
) -> dict[int, StateLayout]:
    """The state of parameters of each rank in one group, from a step of tiny ones."""
    found = {}
    for rank in sorted(set(ranks)):
        size = _ODD_SIZES[:rank]
        param = torch.zeros(size, dtype=dtype, device=device)
        member = StepMember(group, param, torch.ones_like(param))
        try:
            hyper = copy_hyper(optimizer)
            own = _find_own_state(step_members(optimizer, [member], hyper), optimizer, hyper[group])
        except LoadmasterError:
            raise
        except Exception as error:
            raise InputError(
                f"{type(optimizer).__name__} cannot step a parameter of {rank} axes: {error}"
            ) from error
        if own:
            raise InputError(
                f"{type(optimizer).__name__} keeps {own!r} for all parameters together and changes it in a"
                " step, so it cannot go shard by shard; use one that keeps its state beside each parameter"
            )
        found[rank] = StateLayout(
            {
                key: (tuple(size.index(length) for length in value.shape), value.dtype)
                for key, value in member.state.items()
                if isinstance(value, torch.Tensor) and value.ndim and all(n in size for n in value.shape)
            }
        )
    return found
