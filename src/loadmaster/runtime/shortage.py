"""Shortage: what is known after a device was full, and the nearest plan that leaves room.

A logical device says itself that it is full (`byte_accounts.py`), a whole GPU by torch's error. What stood on
it beyond its prediction is taken off its room, and the plan is repaired from where its ops are: as few as it
takes move.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from loadmaster.core.errors import DeviceMemoryError, RunError
from loadmaster.core.placement import Placement, Status
from loadmaster.core.plan import Plan
from loadmaster.core.problem import Problem
from loadmaster.core.reasons import why_none_fits_in_short
from loadmaster.core.units import format_bytes, parse_bytes
from loadmaster.runtime.transport.devices import RunDevice

Replan = Callable[[Problem, Plan], Placement]
_GPU = re.compile(r"GPU (\d+)")
_TRIED = re.compile(r"[Tt]ried to allocate ([\d.]+ ?[KMGT]?i?B)")


def find_full_device(problem: BaseException, devices: Sequence[RunDevice]) -> tuple[int, int]:
    """The device that an error of torch is about, and the bytes that were asked for there."""
    gpu, tried = _GPU.search(str(problem)), _TRIED.search(str(problem))
    index = int(gpu[1]) if gpu else 0
    on_gpus = [at for at, device in enumerate(devices) if device.where.type == "cuda"]
    at = next((at for at in on_gpus if devices[at].where.index == index), on_gpus[0] if on_gpus else 0)
    return at, parse_bytes(tried[1]) if tried else 0


def make_memory_error(
    device: RunDevice, *, held_bytes: int, tried_bytes: int, predicted_bytes: int | None
) -> DeviceMemoryError:
    """Torch's error in our words."""
    predicted = "" if predicted_bytes is None else f" (predicted peak {format_bytes(predicted_bytes)})"
    return DeviceMemoryError(
        f"{device.name} is full: {format_bytes(held_bytes)} were in use{predicted}, and"
        f" {format_bytes(tried_bytes)} more were asked for; the weights are unchanged. Give it more memory,"
        " add a device, or use a smaller batch (placed.plan_that_fits() is the nearest plan that leaves room)"
    )


def peak_allocated_bytes(device: RunDevice) -> int:
    """The most bytes that tensors took on a whole device."""
    return int(torch.cuda.max_memory_allocated(device.where)) if device.where.type == "cuda" else 0


def find_plan_that_fits(
    placement: Placement, most_needed_bytes: Sequence[int] | None, replan: Replan | None
) -> Placement:
    """A placement of the same problem that fits as far as is known now."""
    if most_needed_bytes is None:
        raise RunError("no device of this model was full, so there is no need to plan again")
    if replan is None or placement.plan is None:
        raise RunError("this model was placed without a planner; place it with lm.place")
    cluster = placement.problem.cluster
    beyond = np.array(most_needed_bytes) - np.minimum(placement.peak_bytes, cluster.usable_bytes)
    reserve = cluster.reserve_bytes + np.clip(beyond, 0, cluster.usable_bytes - 1)
    tight = replace(placement.problem, cluster=replace(cluster, reserve_bytes=reserve))
    found = replan(tight, placement.plan)
    if found.plan is None:
        raise RunError(
            f"no plan on these devices leaves enough room: {why_none_fits_in_short(found)}; lm.fit says more"
        )
    # what is proven of less memory is not proven of all of it
    unproven = replace(found, status=Status.FEASIBLE, bound_s=0.0, bound_name="none", proof="")
    return replace(unproven, problem=placement.problem)
