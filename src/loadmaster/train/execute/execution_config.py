"""How a trial is run on a device, and what is counted while it runs."""

from dataclasses import dataclass

from loadmaster.shards.device.cpu_device import HostEvent
from loadmaster.shards.device.streams import Event
from loadmaster.shards.plan.layout import Placement

_PATIENCE_S = 5e-4


@dataclass(frozen=True, slots=True)
class ExecutionConfig:
    """How a trial is run on a device."""

    placement: tuple[Placement, ...]  # [piece]
    num_slots: int
    depth: int
    ring_bytes: int
    num_rings: int = 2
    num_threads: int = 1
    num_in_flight: int = 3  # pieces whose gradients may be on their way down
    own_bytes: int | None = None  # planned, beside the slots trials share
    moving_bytes: int = 0  # planned, of what comes and goes in a step
    recompute: tuple[bool, ...] = ()  # [shard] by call: runs again in backward; () = none does


@dataclass(slots=True)
class TransferLedger:
    """Bytes and loads since the trial came to the device."""

    up_bytes: int = 0
    down_bytes: int = 0
    loads: int = 0
    waited_s: float = 0.0  # for updates on the host


@dataclass(slots=True)
class StepFacts:
    """What a step gave."""

    loss: float
    num_tokens: int
    ledger: TransferLedger


def is_host_event(event: Event) -> bool:
    """Whether a thread of this process sets it."""
    return isinstance(event, HostEvent)


def wait_briefly(event: Event) -> None:
    """Wait for it a moment."""
    flag = getattr(event, "_flag", None)
    if flag is not None:
        flag.wait(_PATIENCE_S)


def subtract_ledgers(before: TransferLedger, now: TransferLedger) -> TransferLedger:
    """What was counted between the two."""
    return TransferLedger(
        now.up_bytes - before.up_bytes,
        now.down_bytes - before.down_bytes,
        now.loads - before.loads,
        now.waited_s - before.waited_s,
    )
