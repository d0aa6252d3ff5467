"""One trial's whole training state in host memory, and its steps on whatever device is free."""

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from loadmaster.core.errors import DeviceMemoryError, InputError
from loadmaster.core.units import format_bytes
from loadmaster.modules import randomness
from loadmaster.shards.device.streams import Device
from loadmaster.shards.device.update_thread import HostUpdater
from loadmaster.shards.model.built_model import BuiltModel, build_trial
from loadmaster.shards.plan.layout import Placement
from loadmaster.shards.plan.partition import make_plan
from loadmaster.shards.plan.rates import Rates, default_rates
from loadmaster.shards.plan.shard_plan import ShardPlan
from loadmaster.shards.spec.engine import make_nan_error
from loadmaster.shards.spec.trial import Trial, compute_metrics
from loadmaster.train.execute import first_step
from loadmaster.train.execute.call_executor import CallExecutor
from loadmaster.train.execute.execution_config import ExecutionConfig
from loadmaster.train.execute.rehearsal import Rehearsal
from loadmaster.train.execute.shard_executor import ShardExecutor
from loadmaster.train.execute.trial_state import TrialState, frozen_names, store_on_host

_SWITCH_S = 2e-4


@dataclass(frozen=True, slots=True)
class StepResult:
    """A step boundary."""

    step: int
    epoch: int
    loss: float
    num_tokens: int
    seconds: float
    bytes_up: int
    bytes_down: int
    loads: int
    spans: tuple[tuple[str, str, float, float], ...] = ()


class ShardRunner:
    """A trial that moves between host and device shard by shard."""

    def __init__(
        self,
        state: TrialState,
        config: ExecutionConfig,
        *,
        updater: HostUpdater,
        sequence: Iterator[int],
        plan: ShardPlan | None = None,
        plan_again: Callable[[int], tuple[ShardPlan, ExecutionConfig]] | None = None,
    ) -> None:
        self.plan = plan  # None: placed by hand
        self._rehearsal = Rehearsal(state.trial, plan_again)
        self.state, self.config = state, config
        self._updater, self._sequence = updater, sequence
        updater.join(self)
        self._executor: ShardExecutor | None = None
        self._pinned_on: Device | None = None
        self._step_s = 0.0

    @property
    def trial(self) -> Trial:
        """What is trained."""
        return self.state.trial

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.state.step

    @property
    def frozen(self) -> frozenset[str]:
        """Parameters that are never trained: a copy of the state need not hold them."""
        return frozen_names(self.state)

    @property
    def verified(self) -> str:
        """What the comparison of the first step with the plain model said; '' = there was none."""
        return self.state.verified

    def steps(self, device: Device, num_steps: int, *, after: Any = None) -> Iterator[StepResult]:
        """Up to `num_steps` optimizer steps; each yield is a step boundary."""
        for number in range(num_steps):
            executor = self._ensure_executor(device)  # others may have had it leave between two steps
            last = number == num_steps - 1
            follower = (
                after._executor if last and isinstance(after, ShardRunner) and after is not self else None
            )
            if follower is not None and follower.device is not device:
                follower = None
            if first_step.is_due(self.state):
                first_step.compare(self.state, device, executor.units, executor.rehearse)
            began = time.perf_counter()
            with _shorten_switch_interval():
                facts = executor.step(follower)
            if facts is None:
                return
            taken = time.perf_counter() - began
            self._step_s = taken if not self._step_s else 0.7 * self._step_s + 0.3 * taken
            if facts.loss != facts.loss and self.trial.on_nan == "fail":
                raise make_nan_error(self.trial.name, facts.loss, self.step)
            over = last or not self.state.steps_left  # or the data does not say: then it may be over
            yield StepResult(
                self.step,
                self.state.epoch,
                facts.loss,
                facts.num_tokens,
                taken,
                facts.ledger.up_bytes,
                facts.ledger.down_bytes,
                facts.ledger.loads,
                (*device.spans(gathered=not over), *self._updater.spans()) if device.tracing else (),
            )

    def evaluate(self, device: Device) -> dict[str, float]:
        """The trial's own metrics of the model as it is, in eval mode."""
        if self.trial.evaluate is None:
            return {}
        executor = self._ensure_executor(device)
        model = self.state.chain.model
        model.eval()
        try:
            with (
                randomness.preserve_generators(device.torch_device),
                device.computing(),
                executor.units.bind_buffers(),
            ):
                return compute_metrics(self.trial, executor.predict)
        finally:
            model.train()

    def snapshot(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Tensors by name (views of the host store) and facts (JSON), at a step boundary."""
        self.settle()
        from loadmaster.train.execute.snapshots import collect_facts, collect_tensors

        return collect_tensors(self.state), collect_facts(self.state)

    def restore(self, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
        """Go on from a snapshot."""
        from loadmaster.train.execute.snapshots import restore_state

        self.leave()
        restore_state(self.state, tensors, facts)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The weights and buffers; they load into the plain model."""
        self.settle()
        return {name: tensor.detach() for name, tensor in self.state.chain.model.state_dict().items()}

    @property
    def need_bytes(self) -> int | None:
        """Device memory of a turn beside the slots trials share, where it was planned."""
        return self.config.own_bytes

    def remaining_s(self) -> float:
        """Seconds left at the pace so far."""
        left = self.state.steps_left
        return float("inf") if left is None else left * self._step_s

    def settle(self) -> None:
        """Wait until host memory is the whole truth."""
        if self._executor is not None:
            self._executor.settle()

    def leave(self) -> None:
        """Give the device's memory back; the state stays in host memory."""
        if self._executor is not None:
            executor, self._executor = self._executor, None
            executor.device.tenants[:] = [each for each in executor.device.tenants if each is not self]
            executor.close()

    def close(self) -> None:
        """Memory back to where it was."""
        try:
            self.leave()
        finally:
            self._updater.leave(self)
            self._unpin()
            self.state.iterator = None
            self.state.pieces.clear()

    def _unpin(self) -> None:
        """Slabs stay pinned from turn to turn: registering them takes seconds."""
        if self._pinned_on is not None:
            for host in self.state.pieces:
                self._pinned_on.unpin(host.slab)
        self._pinned_on = None

    def _ensure_executor(self, device: Device) -> ShardExecutor:
        if self._executor is not None and self._executor.device is not device:
            self.leave()
        if self._pinned_on is not device:
            self._unpin()
            self._pinned_on = device
        if self._executor is None:
            self._executor = self._open_executor(device)
        return self._executor

    @property
    def notes(self) -> list[str]:
        """What was planned again, and why."""
        return self._rehearsal.notes

    def _open_executor(self, device: Device) -> ShardExecutor:
        """Onto a device; planned again until a step fits, else who stands there longest leaves."""
        while True:
            executor, why = self._try_fit(device)
            if executor is not None:
                device.tenants.append(self)
                return executor
            again = self._rehearsal.replan(device, why) if why else None
            if again is not None:
                self.plan, self.config = again
            elif device.tenants:
                device.tenants[0].leave()
            else:
                raise DeviceMemoryError(
                    f"trial {self.trial.name!r} {why} on {device.name} under a cap of"
                    f" {format_bytes(device.arena.cap_bytes)}; raise memory_cap, cut into smaller blocks or"
                    " take a smaller batch"
                )

    def _try_fit(self, device: Device) -> tuple[ShardExecutor | None, str]:
        """An executor in which a step fits; or None, and why a rehearsal failed."""
        try:
            kind = CallExecutor if self.state.chain.by_call else ShardExecutor
            executor = kind(self.state, device, self.config, self._updater, self._sequence)
        except DeviceMemoryError:
            if not device.tenants:
                raise
            return None, ""
        free_bytes = device.arena.cap_bytes - device.arena.used_bytes
        if device.tenants and free_bytes < self.config.moving_bytes:  # slots grew with this one
            executor.close()
            return None, ""
        why = self._rehearsal.problem(executor, device)
        if not why:
            return executor, ""
        executor.close()
        device.release()
        return None, why


@contextmanager
def _shorten_switch_interval() -> Iterator[None]:
    """Python's lock changes hands sooner: updates must not wait for the thread that issues units."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _SWITCH_S))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def open_runner(
    trial: Trial,
    *,
    device: Device,
    optimizer_placement: str = "auto",
    rates: Rates | None = None,
    cuts: Sequence[int] | None = None,
    placement: Sequence[Placement] | None = None,
    num_slots: int = 4,
    depth: int | None = None,
    share: int = 1,
    num_threads: int | None = None,
    updater: HostUpdater | None = None,
    sequence: Iterator[int] | None = None,
) -> "ShardRunner":
    """Build a trial in host memory and plan it for a device. `cuts` and `placement` override the plan."""
    built = build_trial(trial, device=device.torch_device)
    about: dict[str, Any] = {"num_threads": num_threads, "updater": updater, "sequence": sequence}
    if placement is not None:
        starts = cuts if cuts is not None else range(len(built.chain.blocks))
        ahead = depth if depth is not None else num_slots - 1
        return _place_by_hand(built, starts, placement, num_slots=num_slots, depth=ahead, **about)
    return open_built_runner(
        built,
        device=device,
        optimizer_placement=optimizer_placement,
        rates=rates,
        cuts=cuts,
        num_slots=num_slots,
        share=share,
        **about,
    )


def _place_by_hand(
    built: BuiltModel,
    starts: Sequence[int],
    placement: Sequence[Placement],
    *,
    num_slots: int,
    depth: int,
    num_threads: int | None,
    updater: HostUpdater | None,
    sequence: Iterator[int] | None,
) -> ShardRunner:
    state = store_on_host(built, starts, landing=True)
    threads = num_threads or default_threads()
    config = make_execution_config(
        state, placement, num_slots=num_slots, depth=depth, ring_bytes=None, num_threads=threads
    )
    return ShardRunner(
        state, config, updater=updater or HostUpdater(), sequence=sequence or itertools.count()
    )


def open_built_runner(
    built: BuiltModel,
    *,
    device: Device,
    plan: ShardPlan | None = None,
    optimizer_placement: str = "auto",
    rates: Rates | None = None,
    cuts: Sequence[int] | None = None,
    num_slots: int = 4,
    share: int = 1,
    num_threads: int | None = None,
    updater: HostUpdater | None = None,
    sequence: Iterator[int] | None = None,
) -> ShardRunner:
    """Hold a built trial and execute its plan on a device; without a plan, it is made for this device."""
    threads = num_threads or default_threads()
    given: dict[str, Any] = {
        "cap_bytes": device.arena.cap_bytes,
        "rates": rates or default_rates(device.torch_device, built.trial.precision),
        "optimizer_placement": optimizer_placement,
        "num_slots": num_slots,
        "share": share,
    }
    if plan is None:
        plan = make_plan(built, cuts=cuts, **given)
    starts = [first for first, _ in plan.layout.cuts]

    def plan_again(more_bytes: int) -> tuple[ShardPlan, ExecutionConfig]:
        """The same cuts, for what is held lies in them, with more kept free."""
        found = make_plan(built, cuts=starts, more_reserve_bytes=more_bytes, **given)
        return found, to_execution_config(found, num_threads=threads)

    state = store_on_host(built, starts, landing=True)
    config = to_execution_config(plan, num_threads=threads)
    return ShardRunner(
        state,
        config,
        plan=plan,
        plan_again=plan_again,
        updater=updater or HostUpdater(),
        sequence=sequence or itertools.count(),
    )


def to_execution_config(plan: ShardPlan, *, num_threads: int) -> ExecutionConfig:
    """How a plan is run."""
    return ExecutionConfig(
        plan.placement,
        plan.num_slots,
        plan.depth,
        plan.ring_bytes,
        num_rings=plan.num_rings,
        num_threads=num_threads,
        num_in_flight=plan.num_in_flight,
        own_bytes=plan.own_bytes,
        moving_bytes=plan.moving_bytes,
        recompute=plan.layout.recompute,
    )


def interleave(
    runners: Sequence[ShardRunner], device: Device, num_steps: int
) -> Iterator[tuple[ShardRunner, StepResult]]:
    """Step several trials in turn, so that the copies and updates of one hide behind the next one's compute.

    The first weights of the next trial are loaded while the trial before it ends.
    """
    waiting = list(runners)
    for _ in range(num_steps):
        for runner in list(waiting):
            following = waiting[(waiting.index(runner) + 1) % len(waiting)]
            done = next(runner.steps(device, 1, after=following), None)
            if done is None:
                waiting.remove(runner)
            else:
                yield runner, done


def default_threads() -> int:
    """Threads of the host's updates: a quarter of the cores, two or more, are left to those that issue units.

    They are memory-bound long before they have all cores, but a step stands still where issuing does.
    """
    count = os.cpu_count() or 1
    return max(1, count - max(2, count // 4))


def make_execution_config(
    state: TrialState,
    placement: str | Sequence[Placement],
    *,
    num_slots: int,
    depth: int,
    ring_bytes: int | None,
    num_threads: int,
) -> ExecutionConfig:
    """Placement of each piece, and a ring as large as the largest parameter that needs it."""
    from loadmaster.shards.plan.ring_chunks import chunk_places, ring_size
    from loadmaster.shards.plan.unit_order import least_slots

    count = len(state.layout.pieces)
    chosen: tuple[Placement, ...] = (placement,) * count if isinstance(placement, str) else tuple(placement)  # type: ignore[assignment]
    if len(chosen) != count:
        raise InputError(f"{len(chosen)} placements for {count} pieces")
    streamed = frozenset(index for index, where in enumerate(chosen) if where != "pinned")
    needed = [
        ring_size(chunk_places(host, [at])[1] for at, wanted in enumerate(host.trainable) if wanted)
        for host in state.pieces
        if chosen[host.piece.index] == "device"
    ]
    ring = max([ring_bytes or 0, *needed]) if needed else 0
    slots = max(num_slots, least_slots(state.layout, streamed))
    return ExecutionConfig(chosen, slots, depth, ring, num_threads=num_threads)
