"""What a study needs of whatever trains: devices, runners, plans. The default trains shard by shard.

The protocols say what is relied on; tests bring a plain resident engine of their own.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from loadmaster.core.errors import RunError


class NotANumberError(RunError):
    """The loss of a trial is not finite."""


def make_nan_error(trial: str, loss: float, step: int) -> NotANumberError:
    """What to say of a loss that is not finite."""
    return NotANumberError(
        f"the loss of trial {trial!r} is {loss} at step {step};"
        " lower the learning rate, or set on_nan='ignore'"
    )


def mean_loss(losses: Sequence[float]) -> float:
    """Of micro-batches, added as a loop adds them: `sum` rounds otherwise since Python 3.12."""
    total = 0.0
    for loss in losses:
        total += loss / len(losses)
    return total


class StepDone(Protocol):
    """One optimizer step, as runners tell it."""

    @property
    def step(self) -> int:
        """Steps done."""

    @property
    def epoch(self) -> int:
        """Epoch it belongs to."""

    @property
    def loss(self) -> float:
        """Unscaled."""

    @property
    def num_tokens(self) -> int:
        """Samples or tokens."""

    @property
    def seconds(self) -> float:
        """By the device's own clock."""

    @property
    def bytes_up(self) -> int:
        """Host to device."""

    @property
    def bytes_down(self) -> int:
        """Device to host."""

    @property
    def spans(self) -> Sequence[Any]:
        """What the device did."""


class Runner(Protocol):
    """One trial's whole training state, in host memory."""

    @property
    def step(self) -> int:
        """Optimizer steps done."""

    def steps(self, device: Any, num_steps: int, *, after: "Runner | None" = None) -> Iterator[StepDone]:
        """Run up to so many optimizer steps, yielding at each step boundary."""

    def evaluate(self, device: Any) -> dict[str, float]:
        """The metrics of the trial's evaluation."""

    def snapshot(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Everything needed to go on: tensors (views of the store), and facts that are JSON."""

    def restore(self, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
        """Stand where a snapshot was taken."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What the plain model loads."""

    def remaining_s(self) -> float:
        """Seconds of work left."""

    def close(self) -> None:
        """Give all memory back."""


class Engine(Protocol):
    """Opens devices and runners."""

    def device_names(self, devices: str | Sequence[str]) -> list[str]:
        """The devices that a phrase names."""

    def open_device(self, name: str) -> Any:
        """A device, in the process that uses it."""

    def open_runner(self, trial: Any, device: Any, plan: "TrialPlan | None" = None) -> Runner:
        """A trial at its beginning, to be run by the plan that `plan_trial` made."""

    def plan_trial(self, trial: Any, device_names: Sequence[str]) -> "TrialPlan":
        """What a trial will need; trains nothing, and refuses data that could not be resumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPlan:
    """What is known about a trial before it starts."""

    trial: str
    num_steps: int
    step_s: float
    host_bytes: int
    state_bytes: int  # of one checkpoint
    peak_bytes: int = 0  # on the device
    num_shards: int = 1
    bytes_up: int = 0  # a step
    bytes_down: int = 0
    bound_by: str = ""  # compute, bus, host memory or optimizer
    load_s: float = float("inf")  # bringing its resident shards to a device
    num_together: int = 1  # trials that share its frozen backbone on a device
    is_grouped: bool = False  # its backbone is streamed for a group, if only of one
    options: Mapping[str, Any] = field(default_factory=dict)  # of its optimizer; they may not change later
    built_on: str = "cpu"  # 'meta': without memory, until it is held
    is_measured: bool = False  # its time comes from rates that were measured on this machine
    note: str = ""  # what else is to be said
    ended: str = ""  # how it ended in an earlier call: nothing more is planned for it
    detail: Any = None  # the engine's own plan; workers get it, too, so it can be pickled
