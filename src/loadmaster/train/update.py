"""Optimizer steps of a piece: on the host, streamed through the device, or where it is pinned.

An entry is one parameter with everything a step needs, wherever it stands. `apply` runs the user's optimizer on
some entries; `host_update` takes the one-pass kernel for Adam and AdamW where it gives the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from loadmaster.train.host_kernels import adam_step
from loadmaster.train.states import Hyper, Member, on_host, step_members
from loadmaster.train.store import HostPiece

_WHOLE_VECTORS = 16  # elements: the end of a tensor of another size is rounded otherwise by the framework


@dataclass(slots=True, eq=False)
class Entry:
    """One parameter in a step."""

    host: HostPiece
    position: int
    group: int
    param: torch.Tensor
    grad: torch.Tensor
    views: dict[str, torch.Tensor]  # where large state belongs


def apply(template: torch.optim.Optimizer, entries: Sequence[Entry], hyper: Hyper) -> None:
    """One step; large state ends in the entries' views, small state beside the piece."""
    members = []
    for entry in entries:
        state = dict(entry.host.small[entry.position])
        if entry.host.started[entry.position]:
            state |= entry.views
        members.append(Member(entry.group, entry.param, entry.grad, state))
    step_members(template, members, hyper)
    for entry, member in zip(entries, members, strict=True):
        small = entry.host.small[entry.position]
        for key, value in member.state.items():
            if key not in entry.views:
                small[key] = value
            elif value is not entry.views[key]:
                entry.views[key].copy_(value)
        entry.host.started[entry.position] = True


def scaled(grad: torch.Tensor, dtype: torch.dtype, factors: Sequence[float]) -> torch.Tensor:
    """The gradient in the parameter's dtype, times each factor in turn."""
    wide = grad.to(dtype)
    for factor in factors:
        wide = wide * factor
    return wide


def host_update(
    template: torch.optim.Optimizer,
    host: HostPiece,
    positions: Sequence[int],
    groups: Sequence[int],
    hyper: Hyper,
    *,
    factors: Sequence[float],
    num_threads: int,
) -> None:
    """Step these parameters of a piece on the host from its landed gradients; writes the compute copies."""
    hyper = on_host(hyper)
    grads = host.grads
    plain = []
    for run in _runs(template, host, positions, groups, hyper, factors):
        if len(run) == 1 and not _by_kernel(template, host, run[0], hyper[groups[run[0]]], factors):
            plain.append(run[0])
        else:
            _kernel_step(template, host, run, hyper[groups[run[0]]], num_threads)
    if not plain:
        return
    entries = [
        Entry(host, p, groups[p], host.master[p], scaled(_given(grads[p]), host.master[p].dtype, factors), host.state[p])
        for p in plain
    ]
    apply(template, entries, hyper)
    for position in plain:
        if host.separate[position]:
            host.compute[position].copy_(host.master[position])


def _given(grad: torch.Tensor | None) -> torch.Tensor:
    assert grad is not None, "a parameter that is stepped has a gradient"
    return grad


def _by_kernel(
    template: torch.optim.Optimizer, host: HostPiece, position: int, options: dict[str, Any], factors: Sequence[float]
) -> bool:
    """Whether the one-pass kernel gives what the framework's fused step would."""
    master, grad = host.master[position], host.grads[position]
    return (
        type(template) in (torch.optim.Adam, torch.optim.AdamW)
        and bool(options.get("fused"))
        and not options.get("amsgrad")
        and not isinstance(options["lr"], torch.Tensor)
        and master.dtype == torch.float32
        and grad is not None
        and grad.dtype in (torch.float32, torch.bfloat16)
        and host.compute[position].dtype in (torch.float32, torch.bfloat16)
        and master.numel() > 0
        and master.numel() % _WHOLE_VECTORS == 0
        and 1 - options["betas"][0] < 0.5  # above, the framework's interpolation takes another form
        and not factors
    )


def _runs(
    template: torch.optim.Optimizer,
    host: HostPiece,
    positions: Sequence[int],
    groups: Sequence[int],
    hyper: Hyper,
    factors: Sequence[float],
) -> list[list[int]]:
    """Neighbours of one group and one age that the kernel can take at once."""
    runs: list[list[int]] = []
    for position in positions:
        fits = _by_kernel(template, host, position, hyper[groups[position]], factors)
        last = runs[-1][-1] if runs else None
        joins = (
            last is not None
            and last == position - 1
            and fits
            and _by_kernel(template, host, last, hyper[groups[last]], factors)
            and groups[last] == groups[position]
            and host.separate[last] == host.separate[position]
            and _age(host, last) == _age(host, position)
            and _adjacent(host, last, position)
        )
        if joins:
            runs[-1].append(position)
        else:
            runs.append([position])
    return runs


def _adjacent(host: HostPiece, last: int, position: int) -> bool:
    """Whether two parameters touch in every region the kernel reads or writes."""
    pairs = [(host.master[last], host.master[position]), (host.grads[last], host.grads[position])]
    pairs.append((host.compute[last], host.compute[position]))
    pairs.extend((host.state[last][key], host.state[position][key]) for key in host.state[last])
    return all(
        one is not None
        and other is not None
        and one.data_ptr() + one.numel() * one.element_size() == other.data_ptr()
        for one, other in pairs
    )


def _age(host: HostPiece, position: int) -> int:
    return int(host.small[position].get("step", 0))


def _kernel_step(
    template: torch.optim.Optimizer, host: HostPiece, run: Sequence[int], options: dict[str, Any], num_threads: int
) -> None:
    step = _age(host, run[0]) + 1
    states = [host.state[position] for position in run]
    adam_step(
        _joined([host.master[p] for p in run]),
        _joined([_given(host.grads[p]) for p in run]),
        _joined([state["exp_avg"] for state in states]),
        _joined([state["exp_avg_sq"] for state in states]),
        _joined([host.compute[p] for p in run]) if host.separate[run[0]] else None,
        step=step,
        options=options,
        decoupled=_decoupled(template, options),
        num_threads=num_threads,
    )
    for position in run:
        host.small[position]["step"] = torch.tensor(float(step), dtype=torch.float32)
        host.started[position] = True


def _decoupled(template: torch.optim.Optimizer, options: dict[str, Any]) -> bool:
    return bool(options.get("decoupled_weight_decay", isinstance(template, torch.optim.AdamW)))


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Neighbours in memory as one flat tensor."""
    first = tensors[0]
    size = sum(tensor.numel() for tensor in tensors)
    assert tensors[-1].data_ptr() - first.data_ptr() == (size - tensors[-1].numel()) * first.element_size()
    return first.as_strided((size,), (1,), first.storage_offset())
