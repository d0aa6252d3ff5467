"""Optimizer steps of a piece: on the host, streamed through the device, or where it is pinned.

An entry is one parameter with everything a step needs, wherever it stands. `apply_step` runs the user's
optimizer on some entries; `HostUpdate` takes the one-pass kernel for Adam and AdamW where it gives the
same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.optim.adam import adam

from loadmaster.shards.device.host_kernels import AdamLaunch, compile_kernels, current_worker_cores, table_of
from loadmaster.shards.model.optimizer_state import (
    Hyper,
    StepMember,
    adapt_hyper_to_host,
    copy_hyper,
    make_initial_state,
    starts_at_zero,
    step_members,
)
from loadmaster.shards.plan.host_store import HostPiece

_WHOLE_VECTORS = 16  # elements: the end of a tensor of another size is rounded otherwise by the framework
_MOST_FACTORS = 2
_ADAMS = (torch.optim.Adam, torch.optim.AdamW)
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "grad_scale", "found_inf")


@dataclass(slots=True, eq=False)
class UpdateEntry:
    """One parameter in a step."""

    host: HostPiece
    position: int
    group: int
    param: torch.Tensor
    grad: torch.Tensor
    views: dict[str, torch.Tensor]  # where large state belongs


def apply_step(template: torch.optim.Optimizer, entries: Sequence[UpdateEntry], hyper: Hyper) -> None:
    """One step; large state ends in the entries' views, small state beside the piece."""
    if _is_plain_fused_adam(template, entries, hyper):
        for group in sorted({entry.group for entry in entries}):
            _run_fused_adam([entry for entry in entries if entry.group == group], hyper[group])
        return
    members = []
    for entry in entries:
        options = hyper[entry.group]
        on_device = options.get("fused") or options.get("capturable")
        small_device = entry.param.device if on_device else torch.device("cpu")
        state = {
            key: value.to(small_device) if isinstance(value, torch.Tensor) else value
            for key, value in entry.host.small[entry.position].items()
        }
        if entry.host.started[entry.position]:
            state |= entry.views
        elif starts_at_zero(template) and {"exp_avg", "exp_avg_sq"} <= entry.views.keys():
            state = make_initial_state(
                options, entry.views, small_device
            )  # made elsewhere, it would stand there twice
        members.append(StepMember(entry.group, entry.param, entry.grad, state))
    step_members(template, members, hyper)
    for entry, member in zip(entries, members, strict=True):
        small = entry.host.small[entry.position]
        for key, value in member.state.items():
            if key not in entry.views:
                small[key] = value
            elif value is not entry.views[key]:
                entry.views[key].copy_(value)
        entry.host.started[entry.position] = True


def _is_plain_fused_adam(
    template: torch.optim.Optimizer, entries: Sequence[UpdateEntry], hyper: Hyper
) -> bool:
    """Whether a step is the framework's fused Adam and nothing besides: what surrounds it takes longer."""
    return (
        type(template) in _ADAMS
        and not any(vars(template).get(name) for name in _HOOKS)
        and all(entry.host.started[entry.position] for entry in entries)
        and all("exp_avg" in entry.views for entry in entries)  # a scalar keeps its state elsewhere
        and all(
            bool(options.get("fused"))
            and "decoupled_weight_decay" in options  # before torch 2.7 AdamW had a function of its own
            and not (options.get("amsgrad") or options.get("differentiable") or options.get("capturable"))
            and not any(isinstance(value, torch.Tensor) for value in (options["lr"], *options["betas"]))
            for options in (hyper[group] for group in {entry.group for entry in entries})
        )
    )


def _run_fused_adam(entries: Sequence[UpdateEntry], options: dict[str, Any]) -> None:
    """Of one group, by the function its optimizer calls."""
    small = [entry.host.small[entry.position] for entry in entries]
    for entry, each in zip(entries, small, strict=True):
        each["step"] = each["step"].to(entry.param.device)
    adam(
        [entry.param for entry in entries],
        [entry.grad for entry in entries],
        [entry.views["exp_avg"] for entry in entries],
        [entry.views["exp_avg_sq"] for entry in entries],
        [],
        [each["step"] for each in small],
        fused=True,
        amsgrad=False,
        beta1=options["betas"][0],
        beta2=options["betas"][1],
        decoupled_weight_decay=options["decoupled_weight_decay"],
        **{name: options[name] for name in ("lr", "weight_decay", "eps", "maximize")},
    )


def scale_grad(grad: torch.Tensor, dtype: torch.dtype, factors: Sequence[float]) -> torch.Tensor:
    """The gradient in the parameter's dtype, times each factor in turn."""
    wide = grad.to(dtype)
    for factor in factors:
        wide = wide * factor
    return wide


@dataclass(slots=True, eq=False)
class _PreparedStep:
    """Parameters that the kernel steps together, and what their next step is."""

    groups: list[int]
    launch: AdamLaunch
    ages: list[int]  # [group] steps done
    steps: np.ndarray[Any, Any]  # [parameter] the same, which its state's tensor looks at


class HostUpdate:
    """Steps of one piece on the host from its landed gradients; what can be prepared is, once.

    Python's lock is what an update and the thread that issues units both want: little is done under it.
    """

    def __init__(
        self, template: torch.optim.Optimizer, host: HostPiece, groups: Sequence[int], *, num_threads: int
    ) -> None:
        self._template, self._host, self._groups = template, host, groups
        self._num_threads = num_threads
        self._cores = current_worker_cores()  # of the thread that makes it, which steps nothing
        self._grads = host.grads
        self._known: tuple[Any, ...] = ()  # positions and options of the last step
        self._ready: _PreparedStep | None = None  # those of these that the kernel steps, None: none
        self._plain: list[int] = []  # those that the framework steps
        hyper = adapt_hyper_to_host(copy_hyper(template))
        trained = [p for p, grad in enumerate(host.grads) if grad is not None]
        if any(self._fits_kernel(p, hyper[groups[p]], ()) for p in trained):
            compile_kernels()

    def step(self, positions: Sequence[int], hyper: Hyper, factors: Sequence[float]) -> None:
        """One step of these parameters; writes their compute copies."""
        asked = (*positions, len(factors), *(self._options_key(options) for options in hyper))
        hyper = adapt_hyper_to_host(hyper)
        if self._ready is None or asked != self._known:
            self._known, self._ready = asked, None
            self._ready, self._plain = self._divide_positions(positions, hyper, factors)
        if self._ready is not None:
            self._run_kernel(self._ready, hyper, factors)
        if self._plain:
            self._run_framework_step(self._plain, hyper, factors)

    def _divide_positions(
        self, positions: Sequence[int], hyper: Hyper, factors: Sequence[float]
    ) -> tuple[_PreparedStep | None, list[int]]:
        """What the kernel steps, and what the framework does."""
        quick = [p for p in positions if self._fits_kernel(p, hyper[self._groups[p]], factors)]
        ages = {
            group: {self._age(p) for p in quick if self._groups[p] == group} for group in range(len(hyper))
        }
        if any(len(age) > 1 for age in ages.values()):  # a parameter that sometimes has no gradient
            quick = []
        plain = [p for p in positions if p not in set(quick)]
        return self._prepare_kernel(quick) if quick else None, plain

    def _run_framework_step(self, positions: Sequence[int], hyper: Hyper, factors: Sequence[float]) -> None:
        host = self._host
        entries = [
            UpdateEntry(
                host,
                p,
                self._groups[p],
                host.master[p],
                scale_grad(self._grad(p), host.master[p].dtype, factors),
                host.state[p],
            )
            for p in positions
        ]
        apply_step(self._template, entries, hyper)
        for position in positions:
            if host.separate[position]:
                host.compute[position].copy_(host.master[position])

    def _prepare_kernel(self, positions: list[int]) -> _PreparedStep:
        """For parameters of equal age in each group."""
        host = self._host
        groups = sorted({self._groups[p] for p in positions})
        table = table_of(
            host.slab,
            [
                (
                    groups.index(self._groups[p]),
                    host.master[p],
                    host.state[p]["exp_avg"],
                    host.state[p]["exp_avg_sq"],
                    self._grad(p),
                    host.compute[p] if host.separate[p] else None,
                )
                for p in positions
            ],
        )
        ages = [next(self._age(p) for p in positions if self._groups[p] == group) for group in groups]
        steps = np.array([self._age(position) for position in positions], dtype=np.float32)
        for at, position in enumerate(positions):
            host.small[position]["step"] = torch.from_numpy(steps[at : at + 1]).reshape(())
            host.started[position] = True
        launch = AdamLaunch(host.slab, table, num_threads=self._num_threads, cores=self._cores)
        return _PreparedStep(groups, launch, ages, steps)

    def _run_kernel(self, ready: _PreparedStep, hyper: Hyper, factors: Sequence[float]) -> None:
        options = [hyper[group] for group in ready.groups]
        ready.ages = [age + 1 for age in ready.ages]
        ready.launch.step(
            steps=ready.ages,
            options=options,
            decoupled=[self._is_decoupled(each) for each in options],
            factors=factors,
        )
        ready.steps += 1

    @staticmethod
    def _options_key(options: dict[str, Any]) -> tuple[Any, ...]:
        """What decides who steps a group."""
        words = (options.get(name, False) for name in ("fused", "foreach", "amsgrad", "differentiable"))
        return (*words, isinstance(options.get("lr"), torch.Tensor), options.get("betas"))

    def _fits_kernel(self, position: int, options: dict[str, Any], factors: Sequence[float]) -> bool:
        """Whether the one-pass kernel gives what the framework's fused step would."""
        master, grad = self._host.master[position], self._grad(position)
        return (
            type(self._template) in _ADAMS
            and bool(options.get("fused"))
            and not options.get("amsgrad")
            and not isinstance(options["lr"], torch.Tensor)
            and 1 - options["betas"][0] < 0.5  # above, the framework's interpolation takes another form
            and master.dtype == torch.float32
            and grad.dtype in (torch.float32, torch.bfloat16)
            and self._host.compute[position].dtype in (torch.float32, torch.bfloat16)
            and master.numel() % _WHOLE_VECTORS == 0
            and len(factors) <= _MOST_FACTORS
        )

    def _grad(self, position: int) -> torch.Tensor:
        grad = self._grads[position]
        assert grad is not None, "a parameter that is stepped has a gradient"
        return grad

    def _age(self, position: int) -> int:
        return int(self._host.small[position].get("step", 0))

    def _is_decoupled(self, options: dict[str, Any]) -> bool:
        return bool(options.get("decoupled_weight_decay", isinstance(self._template, torch.optim.AdamW)))
