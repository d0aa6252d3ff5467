"""Trials on one frozen backbone: each shard is streamed once a step, and every trial's batch visits it.

    for each frozen shard, up then down:   load it once;   for each trial: run its batch through it

No two trials share a kernel, so each ends with the bits it would have alone. Adapters and their optimizer
state stay on the device; boundaries stay there too where they fit, else in pinned host memory. A trial that
fails or is stopped leaves; the others do not notice.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch

from loadmaster.core.errors import DeviceMemoryError, InputError
from loadmaster.modules import randomness
from loadmaster.shards.device.streams import Device
from loadmaster.shards.model.built_model import BuiltModel, build_trial
from loadmaster.shards.model.shared_storage import ParameterOwners
from loadmaster.shards.plan.host_store import HostPiece
from loadmaster.shards.plan.layout import Layout, lay_out
from loadmaster.shards.plan.unit_order import count_forwards
from loadmaster.shards.spec.trial import COMPUTE_DTYPE, Trial
from loadmaster.train.backbone.frozen_weights import (
    frozen_share,
    is_frozen,
    match_frozen_pieces,
    split_frozen,
)
from loadmaster.train.backbone.group_member_executor import GroupMemberExecutor
from loadmaster.train.backbone.group_plan import GroupPlan, group_cuts, plan_group
from loadmaster.train.backbone.weight_stream import WeightStream
from loadmaster.train.execute import first_step
from loadmaster.train.execute.trial_state import TrialState, store_on_host


@dataclass(frozen=True, slots=True)
class GroupStepResult:
    """One trial's part of a group step: its numbers, or what went wrong, or the end of its data."""

    state: TrialState
    epoch: int = 0
    loss: float = 0.0
    num_tokens: int = 0
    seconds: float = 0.0  # its share
    bytes_up: int = 0  # its share
    bytes_down: int = 0
    loads: int = 0  # of the whole group
    over: bool = False
    error: Exception | None = None
    spans: tuple[Any, ...] = ()


class Group:
    """Members of one backbone on one device; the device's memory is taken at the first step."""

    def __init__(self, device: Device, *, num_places: int | None = None) -> None:
        self.device = device
        self.states: list[TrialState] = []
        self.frozen: list[HostPiece] = []
        self.cuts: list[int] = []
        self._num_places = num_places
        self._members: dict[int, GroupMemberExecutor] = {}  # by id of the state
        self._stream: WeightStream | None = None
        self.plan: GroupPlan | None = None

    def join(self, built: BuiltModel, *, cuts: Sequence[int] | None = None) -> TrialState | None:
        """Take a trial in; None: its backbone is another, or there is no room for one more."""
        if not self.states:
            self.cuts = list(cuts) if cuts is not None else group_cuts(built, self.device.arena.cap_bytes)
        elif len(built.chain.blocks) <= self.cuts[-1]:
            return None
        layout = build_split_layout(built, self.cuts)
        shared = match_frozen_pieces(self.frozen, built, layout) if self.states else {}
        if shared is None:
            return None
        state = store_on_host(built, self.cuts, landing=False, layout=layout, shared=shared)
        try:
            self._make_plan([*self.states, state])
        except DeviceMemoryError:
            if not self.states:
                raise
            return None
        if not self.states:
            self.frozen = [host for host in state.pieces if is_frozen(host.piece, state.chain)]
        self.leave()
        self.states.append(state)
        return state

    def remove_member(self, state: TrialState) -> None:
        """A member goes; what it trained stays in its own host memory."""
        if any(each is state for each in self.states):
            self.leave()
            self.states = [each for each in self.states if each is not state]

    def step(self, riders: Sequence[TrialState]) -> list[GroupStepResult]:
        """One optimizer step of each of these members."""
        self._enter()
        assert self._stream is not None
        ride = _GroupStep([self._members[id(state)] for state in riders])
        began = time.perf_counter()
        with randomness.preserve_generators(self.device.torch_device), self.device.computing():
            if any(first_step.is_due(state) for state in riders):
                ride.verify(self.device, self._rehearse)
                began = time.perf_counter()
            before = self._stream.up_bytes, self._stream.loads
            ride.begin()
            if ride.alive:
                self._sweep(ride, self._stream)
            ride.end()
        count = max(1, len(ride.losses))
        taken = (time.perf_counter() - began) / count
        spans = tuple(self.device.spans()) if self.device.tracing else ()
        shares = (self._stream.up_bytes - before[0]) // count, self._stream.loads - before[1]
        found = [ride.make_result(member, taken, *shares, spans) for member in ride.members]
        for told in found:
            if told.error is not None:
                self._drop_failed(told.state)
        return found

    def predict(self, state: TrialState, inputs: Any) -> Any:
        """Outputs of one member, in eval mode, shard by shard."""
        self._enter()
        assert self._stream is not None
        member = self._members[id(state)]
        return member.predict(inputs)

    def has(self, state: TrialState) -> bool:
        """Whether a trial is a member."""
        return any(each is state for each in self.states)

    def rejoin(self, state: TrialState) -> None:
        """Take a member back that failed in a step which is to be undone."""
        if not self.has(state):
            self.leave()
            self.states.append(state)

    def bind_buffers(self, state: TrialState) -> AbstractContextManager[None]:
        """A member's blocks see the device's buffers."""
        self._enter()
        return self._members[id(state)].units.bind_buffers()

    def settle(self, state: TrialState) -> None:
        """Bring a member's adapters home: then its host memory is the whole truth."""
        member = self._members.get(id(state))
        if member is not None:
            member.settle()

    def leave(self) -> None:
        """Give the device's memory back; everything stays in host memory."""
        members, self._members = self._members, {}
        stream, self._stream = self._stream, None
        for member in members.values():
            member.settle()
            member.close()
        if stream is not None:
            stream.close()
            for host in self.frozen:
                self.device.unpin(host.slab)
        self.device.tenants[:] = [each for each in self.device.tenants if each is not self]

    def _enter(self) -> None:
        """Take the device's memory; who stands there longest leaves until there is room for a whole step."""
        device = self.device
        if self._stream is None:
            needed = self._make_plan(self.states).peak_bytes
            while device.tenants and device.arena.used_bytes + needed > device.arena.cap_bytes:
                device.tenants[0].leave()
        while self._stream is None:
            try:
                self._take_memory()
            except DeviceMemoryError:
                self._abandon()
                if not self.device.tenants:
                    raise
                self.device.tenants[0].leave()

    def _make_plan(self, states: Sequence[TrialState]) -> GroupPlan:
        device = self.device
        return plan_group(
            states,
            cap_bytes=device.arena.cap_bytes,
            on_gpu=device.torch_device.type == "cuda",
            num_places=self._num_places,
        )

    def _take_memory(self) -> None:
        self.plan = self._make_plan(self.states)
        recorded = self.plan.on_device and self.device.torch_device.type == "cuda"
        pool = torch.cuda.graph_pool_handle() if recorded else None
        for state in self.states:
            trial = state.trial
            self._members[id(state)] = GroupMemberExecutor(
                state,
                self.device,
                shared=self.frozen,
                on_device=self.plan.on_device,
                pool=pool if trial.replay and trial.accumulate == 1 else None,
            )
        for host in self.frozen:
            self.device.pin(host.slab)
        hosts = {host.piece.index: host for host in self.frozen}
        order = [self.states[0].layout.pieces_of[shard] for _, shard in self.plan.order]
        names = "+".join(state.trial.name for state in self.states[:3])
        self._stream = WeightStream(self.device, hosts, order, num_places=self.plan.num_places, name=names)
        for member in self._members.values():
            member.weights.stream = self._stream
        self.device.tenants.append(self)

    def _abandon(self) -> None:
        for member in self._members.values():
            member.close()
        self._members.clear()
        for host in self.frozen:
            self.device.unpin(host.slab)

    def _rehearse(self, member: GroupMemberExecutor, batches: list[Any], then: Any) -> float:
        """The visits of a step of one member, and nothing done; `then` gets all gradients."""
        stream = self._stream
        assert stream is not None

        def run() -> None:
            ride = _GroupStep([member])
            ride.begin()
            self._sweep(ride, stream)
            for problem in ride.errors.values():
                raise problem

        return member.rehearse(batches, run, then)

    def _sweep(self, ride: "_GroupStep", stream: WeightStream) -> None:
        assert self.plan is not None
        for position, (kind, shard) in enumerate(self.plan.order):
            frozen = stream.take(position)
            ride.lend(frozen)
            ride.run_unit(kind, shard)
            ride.lend({})  # nobody holds on to memory that may be given back
            stream.finish_unit(position)

    def _drop_failed(self, state: TrialState) -> None:
        """A member that failed in the middle of a step: its memory back, nothing of it is brought home."""
        self._members.pop(id(state)).close()
        self.states = [each for each in self.states if each is not state]
        if not self.states:  # nobody is left to give the stream back
            self.leave()


class _GroupStep:
    """One step of some members: who is still in it, and what became of them."""

    def __init__(self, members: list[GroupMemberExecutor]) -> None:
        self.members, self.alive = members, list(members)
        self.losses: dict[int, float] = {}
        self.errors: dict[int, Exception] = {}
        self._num_tokens: dict[int, int] = {}

    def verify(
        self, device: Device, rehearse: Callable[[GroupMemberExecutor, list[Any], Any], float]
    ) -> None:
        """Members before their first step: is it that of the plain model?"""

        def act(member: GroupMemberExecutor) -> None:
            state = member.state
            if first_step.is_due(state):
                by_shards = partial(rehearse, member)
                first_step.compare(state, device, member.units, by_shards)

        for member in list(self.alive):
            self._run_guarded(member, act)

    def begin(self) -> None:
        begun: list[GroupMemberExecutor] = []
        for member in self.members:
            self._run_guarded(member, lambda each: begun.append(each) if each.begin() else None)
        self.alive = begun

    def lend(self, frozen: Mapping[int, list[torch.Tensor]]) -> None:
        """Frozen weights that stand on the device now, for all members."""
        for member in self.members:
            member.weights.frozen = frozen

    def run_unit(self, kind: str, shard: int) -> None:
        """A unit of every member; before a backward the next one's input is sent for while one computes."""
        waiting = list(self.alive)
        for member, following in zip_longest(waiting, waiting[1:]):
            if following is not None and kind == "B":
                self._run_guarded(following, lambda each: each.boundaries.prefetch(shard))
            self._run_guarded(member, lambda each: each.run_unit(kind, shard))

    def end(self) -> None:
        def act(member: GroupMemberExecutor) -> None:
            self._num_tokens[id(member)] = member.num_tokens
            self.losses[id(member)] = member.end()

        for member in list(self.alive):
            self._run_guarded(member, act)

    def _run_guarded(self, member: GroupMemberExecutor, act: Callable[[GroupMemberExecutor], Any]) -> None:
        """Let a member act; one that raises is out of the step."""
        if member not in self.alive:
            return
        try:
            act(member)
        except Exception as problem:
            self.errors[id(member)] = problem
            self.alive.remove(member)

    def _owner(self, label: str) -> str:
        """Whose span it is, '' = of all; a name may begin with another one."""
        names = (f"{each.state.trial.name} " for each in self.members)
        return max((name for name in names if label.startswith(name)), key=len, default="")

    def make_result(
        self, member: GroupMemberExecutor, seconds: float, up: int, loads: int, spans: Any
    ) -> GroupStepResult:
        key, name = id(member), member.state.trial.name
        if key in self.errors:
            return GroupStepResult(member.state, error=self.errors[key])
        if key not in self.losses:
            return GroupStepResult(member.state, over=True)
        first = member is self.members[0]  # what was done for all is told once
        mine = (f"{name} ", "") if first else (f"{name} ",)
        own = tuple(span for span in spans if self._owner(span[1]) in mine)
        moved_up, moved_down = member.moved_bytes()
        return GroupStepResult(
            member.state,
            member.state.epoch,
            self.losses[key],
            self._num_tokens[key],
            seconds,
            up + moved_up,
            moved_down,
            loads,
            spans=own,
        )


def build_split_layout(built: BuiltModel, cuts: Sequence[int]) -> Layout:
    """Shards of a trial with frozen and trained pieces apart."""
    dtype = COMPUTE_DTYPE[built.trial.precision]
    layout = lay_out(built.chain, cuts, compute_dtype=dtype, castable=built.facts.castable)
    return split_frozen(layout, built.chain)


def open_group(
    trials: Sequence[Trial],
    *,
    device: Device,
    cuts: Sequence[int] | None = None,
    num_places: int | None = None,
) -> Group:
    """Open trials that share a frozen backbone, to step them together. A different backbone is an error."""
    group = Group(device, num_places=num_places)
    owners = ParameterOwners()
    for trial in trials:
        built = build_trial(trial, device=device.torch_device)
        owners.claim(trial.name, built.chain)
        if not frozen_share(built.chain):
            raise InputError(f"trial {trial.name!r} has no frozen parameter; there is nothing to share")
        if count_forwards(trial, built.facts) > 1:
            raise InputError(
                f"trial {trial.name!r} accumulates and draws random numbers, and a group, which takes all"
                " micro-batches through a block at once, cannot draw them in the order of a plain loop; train"
                " it alone (a study does, lt.open_runner too), or give it rng='counter'"
            )
        if group.join(built, cuts=cuts) is None:
            raise InputError(
                f"trial {trial.name!r} cannot join the group of {group.states[0].trial.name!r}: its frozen"
                " parameters differ in shape, dtype, place or value, or the device has no room for one more"
            )
    return group


def steps(group: Group, num_steps: int) -> Iterator[list[GroupStepResult]]:
    """Step a group until every trial has ended. A trial that fails or ends is left out from then on."""
    riders = list(group.states)
    for _ in range(num_steps):
        if not riders:
            return
        told = group.step(riders)
        gone = {id(each.state) for each in told if each.over or each.error is not None}
        riders = [state for state in riders if id(state) not in gone and state in group.states]
        yield told
