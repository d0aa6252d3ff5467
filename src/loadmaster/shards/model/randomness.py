"""A trial's random numbers: its own streams, or counted ones; no trial depends on what else runs.

`stream` reproduces a plain loop: the generators go on from unit to unit, and a recomputation starts from
where its forward pass did. `counter` seeds them for each (step, micro-batch, block), so units
may run in any order. Python's `random` and NumPy's global generator are a trial's own, too; reading them
takes tens of microseconds, so that is done once a step, and around the units that are known to draw.
"""

import hashlib
import json
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
    others: tuple[Any, Any] | None = None  # of Python and NumPy; None: left as they are


def capture_generators(device: torch.device, *, others: bool = True) -> Generators:
    """The generators as they are; `others`: Python's and NumPy's, too."""
    other = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return Generators(torch.get_rng_state(), other, capture_others() if others else None)


def capture_others() -> tuple[Any, Any]:
    """The states of Python's generator and NumPy's."""
    return random.getstate(), np.random.get_state()


def is_same_others(left: tuple[Any, Any], right: tuple[Any, Any]) -> bool:
    """Whether nobody has drawn in between."""
    one, two = left[1], right[1]
    return bool(left[0] == right[0] and one[2:] == two[2:] and np.array_equal(one[1], two[1]))


def pack_others(others: tuple[Any, Any]) -> torch.Tensor:
    """Both states as bytes (JSON) in a tensor."""
    python, (kind, keys, *rest) = others
    text = json.dumps([python, [kind, keys.tolist(), *rest]]).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def unpack_others(tensor: torch.Tensor) -> tuple[Any, Any]:
    """What was packed."""
    (version, words, gauss), (kind, keys, *rest) = json.loads(tensor.numpy().tobytes())
    return (version, tuple(words), gauss), (kind, np.array(keys, dtype=np.uint32), *rest)


def restore_generators(state: Generators, device: torch.device) -> None:
    """Go on from a state."""
    torch.set_rng_state(state.host)
    if state.device is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state.device, device)
    if state.others is not None:
        random.setstate(state.others[0])
        np.random.set_state(state.others[1])


def seed_all(seed: int, device: torch.device, *, others: bool = True) -> None:
    """Seed all generators; `others`: Python's and NumPy's, too."""
    if others:
        random.seed(seed)
        np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


def fingerprint_generators(device: torch.device) -> tuple[object, ...]:
    """Something that is another as soon as anyone has drawn: from torch, Python or NumPy."""
    numpy_state: Any = np.random.get_state()
    own = torch.cuda.default_generators[device.index or 0].get_offset() if device.type == "cuda" else 0
    return (
        own,
        torch.get_rng_state().numpy().tobytes(),
        random.getstate(),
        (numpy_state[0], numpy_state[1].tobytes(), *numpy_state[2:]),
    )


def derive_seed(seed: int, *, step: int, micro_batch: int, block: int) -> int:
    """A seed of its own for each block of each micro-batch of each step."""
    text = f"{seed}/{step}/{micro_batch}/{block}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")


@contextmanager
def preserve_generators(device: torch.device) -> Iterator[None]:
    """Whatever happens inside, the generators come out as they went in."""
    before = capture_generators(device)
    try:
        yield
    finally:
        restore_generators(before, device)
