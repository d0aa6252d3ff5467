"""Gradients of a trial of a group: they wait for the end of the step, where the optimizer takes them all."""

from collections.abc import Mapping

import torch

from loadmaster.shards.device.arena import BookingStack
from loadmaster.shards.device.streams import Device, Event
from loadmaster.shards.model.optimizer_state import Hyper
from loadmaster.shards.model.profile import tree_bytes
from loadmaster.train.backbone.adapter import Adapter
from loadmaster.train.execute.gradients import Gradients
from loadmaster.train.execute.optimizer_step import apply_step
from loadmaster.train.execute.trial_state import TrialState


class AdapterUpdates:
    """Gradients of one step, which wait on the device for its end."""

    def __init__(self, state: TrialState, device: Device, adapters: Mapping[int, Adapter]) -> None:
        self._state, self._adapters = state, adapters
        self._booked = BookingStack(device.arena, f"{state.trial.name} batch")
        self.waiting: dict[int, dict[int, torch.Tensor]] = {}  # [piece]
        self._sent: list[torch.Tensor] = []

    def wants(self, piece: int) -> bool:
        """Whether a piece has adapters."""
        return piece in self._adapters

    def take(self, piece: int, grads: dict[int, torch.Tensor], hyper: Hyper) -> None:
        """Keep the gradients of a piece until the end of the step."""
        self.waiting[piece] = grads
        self._booked.push(max(1, tree_bytes(grads)))

    def finish(self, gradients: Gradients, hyper: Hyper, scale: float) -> None:
        """One step of the optimizer takes them all."""
        state, overflow = self._state, False
        factors: tuple[float, ...] = ()
        if state.trial.deferred:
            factors, overflow = gradients.factors(scale)
            gradients.forget()
        if state.trial.precision == "fp16":
            state.scaler.update(overflow=overflow)
        waiting, self.waiting = self.waiting, {}
        if overflow:
            return
        entries = []
        for index, grads in waiting.items():
            adapter = self._adapters[index]
            masters = adapter.host.master
            wide = {p: gradients.widen_grad(grad, masters[p].dtype, factors) for p, grad in grads.items()}
            entries.extend(adapter.entries(state.groups(index), wide))
        if entries:
            apply_step(state.optimizer, entries, hyper)
        for index in waiting:
            self._adapters[index].refresh()

    def hold_until(self, event: Event, tensors: list[torch.Tensor]) -> None:
        """Losses: they are so small that they stay until the next ones."""
        self._sent = tensors

    def clear(self) -> None:
        """Forget the gradients of a step."""
        self.waiting = {}
        self._booked.clear()
