"""One trial's whole training state in host memory, and its steps on whatever device is free."""

import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from loadmaster.core.errors import InputError, RunError
from loadmaster.train import randomness
from loadmaster.train.data import moved
from loadmaster.train.layout import Layout, Placement
from loadmaster.train.quantum import Session, Setting
from loadmaster.train.state import TrialState, build, hold
from loadmaster.train.streams import Device
from loadmaster.train.trial import Trial
from loadmaster.train.updater import HostUpdater

_SWITCH_S = 2e-4


@dataclass(frozen=True, slots=True)
class StepDone:
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

    def __init__(self, state: TrialState, setting: Setting, *, updater: HostUpdater, sequence: Iterator[int]) -> None:
        self.state, self.setting = state, setting
        self._updater, self._sequence = updater, sequence
        self._session: Session | None = None
        self._step_s = 0.0

    @property
    def trial(self) -> Trial:
        """What is trained."""
        return self.state.trial

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.state.step

    def steps(self, device: Device, num_steps: int, *, after: Any = None) -> Iterator[StepDone]:
        """Up to `num_steps` optimizer steps; each yield is a step boundary."""
        session = self._on(device)
        for _ in range(num_steps):
            began = time.perf_counter()
            with _quick_switches():
                facts = session.step()
            if facts is None:
                return
            taken = time.perf_counter() - began
            self._step_s = taken if not self._step_s else 0.7 * self._step_s + 0.3 * taken
            if facts.loss != facts.loss and self.trial.on_nan == "fail":
                raise RunError(f"trial {self.trial.name!r}: the loss of step {self.step} is not a number")
            yield StepDone(
                self.step,
                self.state.epoch,
                facts.loss,
                facts.num_tokens,
                taken,
                facts.ledger.up_bytes,
                facts.ledger.down_bytes,
                facts.ledger.loads,
                tuple(device.spans()) if device.tracing else (),
            )

    def evaluate(self, device: Device) -> dict[str, float]:
        """The trial's own metrics of the model as it is, in eval mode."""
        if self.trial.evaluate is None:
            return {}
        session = self._on(device)
        model = self.state.chain.model
        model.eval()
        try:
            with randomness.kept(device.torch_device), device.computing(), session.units.buffers_bound():
                return {name: float(value) for name, value in self.trial.evaluate(session.predict).items()}
        finally:
            model.train()

    def snapshot(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Tensors by name (views of the host store) and facts (JSON), at a step boundary."""
        self.settle()
        from loadmaster.train.snapshots import facts_of, tensors_of

        return tensors_of(self.state), facts_of(self.state)

    def restore(self, tensors: dict[str, torch.Tensor], facts: dict[str, Any]) -> None:
        """Go on from a snapshot."""
        from loadmaster.train.snapshots import put_back

        self.leave()
        put_back(self.state, tensors, facts)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The weights and buffers; they load into the plain model."""
        self.settle()
        return {name: tensor.detach() for name, tensor in self.state.chain.model.state_dict().items()}

    def remaining_s(self) -> float:
        """Seconds left at the pace so far."""
        left = self.state.steps_left
        return float("inf") if left is None else left * self._step_s

    def settle(self) -> None:
        """Wait until host memory is the whole truth."""
        if self._session is not None:
            self._session.settle()

    def leave(self) -> None:
        """Give the device's memory back; the state stays in host memory."""
        if self._session is not None:
            session, self._session = self._session, None
            session.close()

    def close(self) -> None:
        """Memory back to where it was."""
        self.leave()
        self.state.iterator = None
        self.state.pieces.clear()

    def _on(self, device: Device) -> Session:
        if self._session is not None and self._session.device is not device:
            self.leave()
        if self._session is None:
            self._session = Session(self.state, device, self.setting, self._updater, self._sequence)
        return self._session


@contextmanager
def _quick_switches() -> Iterator[None]:
    """Python's lock changes hands sooner: the host's updates must not wait for the thread that issues units."""
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
    cuts: Sequence[int] | None = None,
    optimizer_placement: Literal["device", "host"] | Sequence[Placement] = "device",
    num_slots: int = 3,
    depth: int = 2,
    ring_bytes: int | None = None,
    num_threads: int | None = None,
    updater: HostUpdater | None = None,
    sequence: Iterator[int] | None = None,
) -> ShardRunner:
    """Build a trial in host memory, ready to run on a device."""
    built = build(trial, device=device.torch_device)
    starts = list(range(len(built.chain.blocks))) if cuts is None else list(cuts)
    state = hold(built, starts, landing=True)
    setting = make_setting(
        state,
        optimizer_placement,
        num_slots=num_slots,
        depth=depth,
        ring_bytes=ring_bytes,
        num_threads=num_threads or torch.get_num_threads(),
    )
    return ShardRunner(
        state, setting, updater=updater or HostUpdater(), sequence=sequence or itertools.count()
    )


def make_setting(
    state: TrialState,
    placement: str | Sequence[Placement],
    *,
    num_slots: int,
    depth: int,
    ring_bytes: int | None,
    num_threads: int,
) -> Setting:
    """Placement of each piece, and a ring as large as the largest parameter that needs it."""
    from loadmaster.train.placing import chunk_places
    from loadmaster.train.slots import least_slots

    count = len(state.layout.pieces)
    chosen: tuple[Placement, ...] = (placement,) * count if isinstance(placement, str) else tuple(placement)  # type: ignore[assignment]
    if len(chosen) != count:
        raise InputError(f"{len(chosen)} placements for {count} pieces")
    streamed = frozenset(index for index, where in enumerate(chosen) if where != "pinned")
    needed = [
        chunk_places(host, [position])[1]
        for host in state.pieces
        if chosen[host.piece.index] == "device"
        for position, wanted in enumerate(host.trainable)
        if wanted
    ]
    ring = max([ring_bytes or 0, *needed]) if needed else 0
    slots = max(num_slots, least_slots(state.layout, streamed))
    return Setting(chosen, slots, depth, ring, num_threads=num_threads)


def planned(trial: Trial, **_: Any) -> Layout:
    """The layout of a trial."""
    raise NotImplementedError
