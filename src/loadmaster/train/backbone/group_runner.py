"""A member of a group as a study sees it: a runner of its own, though the others step when it does.

When one member is given a turn, the others of the group ride along while the backbone passes, and their steps
wait for their own turns. Nobody notices: what a study has not seen yet is undone before the state is looked
at, by going back to where the ride began and doing the steps it has seen again.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from loadmaster.modules import randomness
from loadmaster.shards.device.streams import Device
from loadmaster.shards.spec.trial import compute_metrics
from loadmaster.train.backbone.group import Group, GroupStepResult
from loadmaster.train.execute.runner import StepResult
from loadmaster.train.execute.snapshots import collect_facts, collect_tensors, restore_state
from loadmaster.train.execute.trial_state import TrialState, frozen_names

_MOST_AHEAD = 16  # steps: as many as a turn of the scheduler has


class MemberRunner:
    """One trial of a group."""

    is_of_device = True  # its group stands on one device: to another it goes as a state, not as it is

    def __init__(self, state: TrialState, group: Group, members: list["MemberRunner"]) -> None:
        self.state, self._group = state, group
        self._members = members
        members.append(self)
        self._ahead: deque[GroupStepResult] = deque()  # steps done that nobody has asked for yet
        self._seen = 0  # of the ride
        self._start: tuple[dict[str, torch.Tensor], dict[str, Any]] | None = None  # where the ride began
        self._step_s = 0.0

    @property
    def trial(self) -> Any:
        """What is trained."""
        return self.state.trial

    @property
    def step(self) -> int:
        """Optimizer steps done, as far as anybody has been told."""
        return self.state.step - self._num_ahead

    @property
    def frozen(self) -> frozenset[str]:
        """The backbone: a copy of the state need not hold it."""
        return frozen_names(self.state)

    @property
    def verified(self) -> str:
        """What the comparison of the first step with the plain model said; '' = there was none."""
        return self.state.verified

    def steps(self, device: Device, num_steps: int, *, after: Any = None) -> Iterator[StepResult]:
        """Up to `num_steps` optimizer steps; the others of the group ride along."""
        for _ in range(num_steps):
            told = self._ahead.popleft() if self._ahead else self._step_together()
            if told.error is not None:
                raise told.error
            if told.over:
                return
            self._seen += 1
            if not self._ahead:
                self._start = None
            self._step_s = told.seconds if not self._step_s else 0.7 * self._step_s + 0.3 * told.seconds
            yield StepResult(
                self.step,
                told.epoch,
                told.loss,
                told.num_tokens,
                told.seconds,
                told.bytes_up,
                told.bytes_down,
                told.loads,
                told.spans,
            )

    def evaluate(self, device: Device) -> dict[str, float]:
        """The trial's own metrics of the model as it is, in eval mode."""
        if self.trial.evaluate is None:
            return {}
        self._undo_unseen_steps()
        model, group = self.state.chain.model, self._group
        model.eval()
        try:
            with (
                randomness.preserve_generators(device.torch_device),
                device.computing(),
                group.bind_buffers(self.state),
            ):
                return compute_metrics(self.trial, lambda inputs: group.predict(self.state, inputs))
        finally:
            model.train()

    def snapshot(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Tensors by name and facts, at a step boundary."""
        self._undo_unseen_steps()
        self._group.settle(self.state)
        return collect_tensors(self.state), collect_facts(self.state)

    def restore(self, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
        """Go on from a snapshot; the backbone is what it was."""
        self._forget()
        self._group.leave()
        restore_state(self.state, tensors, facts)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The weights and buffers; they load into the plain model."""
        self._undo_unseen_steps()
        self._group.settle(self.state)
        return {name: tensor.detach() for name, tensor in self.state.chain.model.state_dict().items()}

    def remaining_s(self) -> float:
        """Seconds left at the pace so far."""
        left = self.state.steps_left
        return float("inf") if left is None else (left + self._num_ahead) * self._step_s

    @property
    def _num_ahead(self) -> int:
        return sum(not each.over and each.error is None for each in self._ahead)

    def leave(self) -> None:
        """Give the device's memory back; the state stays in host memory."""
        self._group.leave()

    def close(self) -> None:
        """Leave the group."""
        self._forget()
        self._members[:] = [each for each in self._members if each is not self]
        self._group.remove_member(self.state)
        self.state.iterator = None

    def _step_together(self) -> GroupStepResult:
        """One step of this member and of all that may go ahead."""
        riders = [each for each in self._members if each is not self and each._can_step_ahead()]
        for each in riders:
            each._remember_start()
        told = self._group.step([self.state, *(each.state for each in riders)])
        for each, part in zip(riders, told[1:], strict=True):
            each._ahead.append(part)
        return told[0]

    def _can_step_ahead(self) -> bool:
        ended = bool(self._ahead) and (self._ahead[-1].over or self._ahead[-1].error is not None)
        left = self.state.steps_left
        return not ended and left != 0 and len(self._ahead) < _MOST_AHEAD and self._group.has(self.state)

    def _remember_start(self) -> None:
        """Remember where a ride begins."""
        if self._start is None:
            self._group.settle(self.state)
            own = {name: tensor.clone() for name, tensor in self._tensors(frozen=False).items()}
            self._start, self._seen = (own, collect_facts(self.state)), 0

    def _tensors(self, *, frozen: bool) -> dict[str, torch.Tensor]:
        chain = self.state.chain
        names = {
            f"model/{name}"
            for name, parameter in zip(chain.parameter_name, chain.parameters, strict=True)
            if not parameter.requires_grad
        }
        return {
            name: tensor for name, tensor in collect_tensors(self.state).items() if (name in names) == frozen
        }

    def _undo_unseen_steps(self) -> None:
        """Stand where everybody thinks this trial stands."""
        if not self._ahead:
            return
        assert self._start is not None, "a ride has a beginning"
        (own, facts), seen = self._start, self._seen
        self._forget()
        self._group.rejoin(self.state)
        self._group.leave()
        restore_state(self.state, {**self._tensors(frozen=True), **own}, facts)
        for _ in range(seen):
            told = self._group.step([self.state])[0]
            if told.error is not None:
                raise told.error

    def _forget(self) -> None:
        self._ahead.clear()
        self._start, self._seen = None, 0


class GroupRegistry:
    """The groups of one process, by device; a trial joins the first whose backbone is its own."""

    def __init__(self) -> None:
        self._groups: list[tuple[Group, list[MemberRunner]]] = []

    def runner(self, built: Any, device: Device) -> MemberRunner:
        """A runner in a group that has the backbone, else in a new one."""
        self._groups = [(group, members) for group, members in self._groups if members]
        for group, members in self._groups:
            if group.device is device:
                state = group.join(built)
                if state is not None:
                    return MemberRunner(state, group, members)
        group = Group(device)
        fresh: list[MemberRunner] = []
        state = group.join(built)
        assert state is not None, "the first of a group is always taken or refused with an error"
        runner = MemberRunner(state, group, fresh)
        self._groups.append((group, fresh))
        return runner
