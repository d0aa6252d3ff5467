"""Random numbers: torch's generators, and Python's `random` and NumPy's global one (the *others*).

A model may draw from any of them. Capture, verification and the trainer keep their states here, put them back
and seed them. A trial draws in one of two ways, and never depends on what else runs: `stream` reproduces a
plain loop, where the generators go on from unit to unit and a recomputation starts from where its forward
pass did; `counter` seeds them for each (step, micro-batch, block), so that units may run in any order.
Reading the others takes tens of microseconds, so it is done once a step, and around the units that are known
to draw.
"""

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Others = tuple[Any, dict[str, Any]]  # the states of Python's generator and NumPy's


@dataclass(frozen=True, slots=True, eq=False)
class Generators:
    """States of the host's generator and the device's (None: the device is the host)."""

    host: torch.Tensor
    device: torch.Tensor | None
    others: Others | None = None  # None: left as they are


def capture_generators(device: torch.device, *, others: bool = True) -> Generators:
    """The generators as they are; `others`: Python's and NumPy's, too."""
    other = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return Generators(torch.get_rng_state(), other, capture_others() if others else None)


def restore_generators(state: Generators, device: torch.device) -> None:
    """Go on from a state."""
    torch.set_rng_state(state.host)
    if state.device is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state.device, device)
    if state.others is not None:
        _restore_others(state.others)


@contextmanager
def preserve_generators(device: torch.device) -> Iterator[None]:
    """Whatever happens inside, the generators come out as they went in."""
    before = capture_generators(device)
    try:
        yield
    finally:
        restore_generators(before, device)


def seed_all(seed: int, device: torch.device, *, others: bool = True) -> None:
    """Seed all generators; `others`: Python's and NumPy's, too."""
    if others:
        seed_rng(seed)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


def derive_seed(seed: int, *, step: int, micro_batch: int, block: int) -> int:
    """A seed of its own for each block of each micro-batch of each step."""
    text = f"{seed}/{step}/{micro_batch}/{block}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")


def fingerprint_generators(device: torch.device) -> tuple[object, ...]:
    """Something that is another as soon as anyone has drawn: from torch, Python or NumPy."""
    own = torch.cuda.default_generators[device.index or 0].get_offset() if device.type == "cuda" else 0
    python, numpy = capture_others()
    return own, torch.get_rng_state().numpy().tobytes(), python, _to_comparable(numpy)


def capture_others() -> Others:
    """The states of Python's generator and NumPy's."""
    return random.getstate(), np.random.get_state(legacy=False)


def _restore_others(others: Others) -> None:
    random.setstate(others[0])
    np.random.set_state(others[1])


def is_same_others(left: Others, right: Others) -> bool:
    """Whether nobody has drawn in between."""
    return bool(left[0] == right[0] and _to_comparable(left[1]) == _to_comparable(right[1]))


def is_same_generators(left: Generators, right: Generators) -> bool:
    """Whether nobody has drawn in between, from any generator."""
    if not torch.equal(left.host, right.host):
        return False
    if left.device is not None and right.device is not None and not torch.equal(left.device, right.device):
        return False
    return left.others is None or right.others is None or is_same_others(left.others, right.others)


@contextmanager
def preserve_rng() -> Iterator[Callable[[], str]]:
    """Afterwards all generators go on as if nothing had been drawn or seeded; until then it can be asked who
    was drawn from of Python's and NumPy's ('' where nobody was)."""
    before = capture_others()
    torch_states = _torch_states()

    def name_drawn() -> str:
        if random.getstate() != before[0]:
            return "Python's random"
        return "" if is_same_others(before, capture_others()) else "numpy.random"

    try:
        yield name_drawn
    finally:
        _restore_others(before)
        for generator, state in torch_states:
            generator.set_state(state)


def _torch_states() -> list[tuple[torch.Generator, torch.Tensor]]:
    """Torch's own generators, of the host and of GPUs that are in use: a forward may seed them."""
    found = [torch.default_generator]
    if torch.cuda.is_initialized():
        found += torch.cuda.default_generators
    with torch.utils._python_dispatch._disable_current_modes():
        return [(one, one.get_state()) for one in found]


def seed_rng(seed: int) -> None:
    """Seed the others, as torch.manual_seed does it for torch's."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _to_comparable(state: Any) -> Any:
    """A state of NumPy as what can be compared."""
    if isinstance(state, dict):
        return {key: _to_comparable(value) for key, value in state.items()}
    return state.tobytes() if isinstance(state, np.ndarray) else state


def pack_others(others: Others) -> torch.Tensor:
    """Both states as bytes (JSON) in a tensor."""
    python, numpy = others
    keys, position = numpy["state"]["key"].tolist(), numpy["state"]["pos"]
    fields = [numpy["bit_generator"], keys, position, numpy["has_gauss"], numpy["gauss"]]
    return torch.frombuffer(bytearray(json.dumps([python, fields]).encode()), dtype=torch.uint8)


def unpack_others(tensor: torch.Tensor) -> Others:
    """What was packed."""
    (version, words, gauss), numpy = json.loads(tensor.numpy().tobytes())
    kind, keys, position, has_gauss, next_gauss = numpy
    state = {"key": np.array(keys, dtype=np.uint32), "pos": position}
    found = {"bit_generator": kind, "state": state, "has_gauss": has_gauss, "gauss": next_gauss}
    return (version, tuple(words), gauss), found
