"""Shard forecast: what training shard by shard takes on one device, before anything is trained."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShardForecast:
    """One model under the memory of one device; its weights wait in the host's memory."""

    device: str
    step_s: float  # predicted, of the whole batch
    peak_bytes: int  # on the device
    host_bytes: int
    num_shards: int
    by_call: bool  # the model's own forward runs; else a chain of blocks
    bound_by: str  # compute, bus up, bus down, host memory or optimizer
    up_bytes: int  # a step, host to device
    down_bytes: int
    command: str  # what trains it so
