"""Whether a trial's step fits, tried on the device before the first one changes anything.

A plan counts every tensor. What libraries take for themselves and what an allocator scatters it can only
guess; a rehearsal sees it. Two sweeps of all units: the second shows what every later step will find. Where
one runs out of memory, or fits only because memory is given back and taken again all the time, more is kept
free and the trial is planned again; its weights, its draws and its data are as they were.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from loadmaster.core.errors import DeviceMemoryError
from loadmaster.core.units import format_bytes
from loadmaster.modules import randomness
from loadmaster.shards.device.streams import Device
from loadmaster.shards.model.built_model import take_first_batch
from loadmaster.shards.plan.shard_plan import ShardPlan
from loadmaster.shards.spec.trial import Trial
from loadmaster.train.execute.execution_config import ExecutionConfig
from loadmaster.train.execute.shard_executor import ShardExecutor

_NUM_SWEEPS = 2
_MOST_PLANS = 5
_MORE = 0.04  # of the cap, kept free beside what was; twice as much each time


@dataclass
class Rehearsal:
    """What is known of one trial on one device."""

    trial: Trial
    planned: (
        Callable[[int], tuple[ShardPlan, ExecutionConfig]] | None
    )  # by bytes kept free beside; None: by hand
    done_on: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    more_bytes: int = 0
    num_plans: int = 1

    def problem(self, executor: ShardExecutor, device: Device) -> str:
        """Why a step does not fit as it is planned; '' = it does."""
        if not device.rehearses or device.name in self.done_on:
            return ""
        found = self._try_fit(executor, device)
        if not found:
            self.done_on.add(device.name)
        return found

    def replan(self, device: Device, why: str) -> tuple[ShardPlan, ExecutionConfig] | None:
        """Another plan, with more kept free; None where there is none."""
        if self.planned is None or self.num_plans >= _MOST_PLANS:
            return None
        self.num_plans += 1
        self.more_bytes = max(2 * self.more_bytes, int(_MORE * device.arena.cap_bytes))
        try:
            found = self.planned(self.more_bytes)
        except DeviceMemoryError:
            return None
        note = (
            f"trial {self.trial.name!r}: its first step was rehearsed on {device.name} and {why};"
            f" planned again with {format_bytes(self.more_bytes)} more kept free"
        )
        self.notes.append(note)
        warnings.warn(note, RuntimeWarning, stacklevel=2)
        return found

    def _try_fit(self, executor: ShardExecutor, device: Device) -> str:
        with randomness.preserve_generators(device.torch_device):
            batch, _ = take_first_batch(self.trial, self.trial.data())
            batches = [batch] * self.trial.accumulate
        retries = 0
        for _ in range(_NUM_SWEEPS):
            before = device.num_retries()
            why = _rehearse_once(executor, batches)
            if why:
                device.release()  # only now: the error held what the step had made
                return why
            retries = device.num_retries() - before
        if retries and self.planned is not None and self.num_plans < _MOST_PLANS:
            device.release()
            return f"fitted only by giving memory back {retries} times"
        return ""


def _rehearse_once(executor: ShardExecutor, batches: list[Any]) -> str:
    """What became of one sweep; the error and all it holds is gone when this returns."""
    try:
        executor.rehearse(batches)
    except (torch.OutOfMemoryError, DeviceMemoryError) as error:
        return f"ran out of memory ({str(error).splitlines()[0][:160]})"
    return ""
