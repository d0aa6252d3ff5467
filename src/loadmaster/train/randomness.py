"""A trial's random numbers: its own streams, or counted ones; no trial depends on what else runs.

`stream` reproduces a plain loop: the generators go on from unit to unit, and a recomputation starts from
where its forward pass did. `counter` seeds them for each (step, micro-batch, block), so units
may run in any order.
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True, eq=False)
class Generators:
    """States of the host's generator and the device's (None: the device is the host)."""

    host: torch.Tensor
    device: torch.Tensor | None


def current(device: torch.device) -> Generators:
    """The generators as they are."""
    other = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return Generators(torch.get_rng_state(), other)


def install(state: Generators, device: torch.device) -> None:
    """Go on from a state."""
    torch.set_rng_state(state.host)
    if state.device is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state.device, device)


def seed_all(seed: int, device: torch.device) -> None:
    """Seed both generators."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


def mark(device: torch.device) -> tuple[object, ...]:
    """Something that is another as soon as anyone has drawn: from torch, Python or NumPy."""
    numpy_state: Any = np.random.get_state()
    own = torch.cuda.default_generators[device.index or 0].get_offset() if device.type == "cuda" else 0
    return (
        own,
        torch.get_rng_state().numpy().tobytes(),
        random.getstate(),
        (numpy_state[0], numpy_state[1].tobytes(), *numpy_state[2:]),
    )


def counted_seed(seed: int, *, step: int, micro_batch: int, block: int) -> int:
    """A seed of its own for each block of each micro-batch of each step."""
    text = f"{seed}/{step}/{micro_batch}/{block}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")


@contextmanager
def kept(device: torch.device) -> Iterator[None]:
    """Whatever happens inside, the generators come out as they went in."""
    before = current(device)
    try:
        yield
    finally:
        install(before, device)
