"""Weights of `learned_order`: a safetensors file named by the digest of what it was trained on.

What a file says of itself (version, size of the network, training set, digest of its tensors) is a tensor of
bytes among the others, so that a changed byte anywhere is noticed. Files are data: nothing in them is run.
"""

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadmaster.core.errors import FileError, FormatError

if TYPE_CHECKING:
    from loadmaster.placers.learned._order_network import OrderNetwork

VERSION = 1
MOST_BYTES = 4 * 2**20
_MOST_SIZES = {"width": 1024, "rounds": 100}  # more do not fit into the bytes, or have no use
FOLDER = Path(__file__).parent / "weights"


def shipped_weights() -> Path:
    """The file that comes with the package."""
    found = sorted(FOLDER.glob("learned_order-*.safetensors"))
    if not found:
        raise FileError(f"no weights of learned_order in {FOLDER}; install the package again, or train them")
    return found[-1]


def weights_name(training_set: str) -> str:
    """The file name of weights trained on this set."""
    return f"learned_order-{training_set[:12]}.safetensors"


def save_weights(network: "OrderNetwork", path: Path, *, training_set: str, about: dict[str, Any]) -> None:
    """Write weights whole or not at all."""
    import torch

    from loadmaster.modules.tensor_files import write_tensors

    state = {name: value.detach().contiguous() for name, value in network.state_dict().items()}
    said = {
        **about,
        "version": VERSION,
        "width": network.size.width,
        "rounds": network.size.rounds,
        "training_set": training_set,
        "tensors": _digest(state),
    }
    text = json.dumps(said, sort_keys=True).encode()
    tensors = {**state, "about": torch.frombuffer(bytearray(text), dtype=torch.uint8)}
    partial = path.with_name(f".{path.name}.part")
    write_tensors(partial, tensors)
    partial.replace(path)


def load_weights(path: Path) -> tuple["OrderNetwork", dict[str, Any]]:
    """The network of a file, and what the file says of itself."""
    from loadmaster.modules.tensor_files import read_tensors
    from loadmaster.placers.learned._order_network import NetworkSize, make_network

    try:
        size = path.stat().st_size
    except OSError as trouble:
        raise FileError(f"cannot read weights {path}: {trouble.strerror or trouble}") from None
    if size > MOST_BYTES:
        raise FormatError(f"{path} has {size} bytes; weights of learned_order have at most {MOST_BYTES}")
    state = read_tensors(path)
    about = _read_about(path, state)
    if about.get("version") != VERSION:
        raise FormatError(
            f"{path} is of version {about.get('version')!r}, this Loadmaster reads version {VERSION};"
            " train them again: loadmaster learn train"
        )
    if about.get("tensors") != _digest(state):
        raise FormatError(f"{path} is damaged: its tensors are not those that were written")
    size_of = {name: _read_size(path, about, name) for name in _MOST_SIZES}
    network = make_network(NetworkSize(**size_of), seed=0)
    try:
        network.load_state_dict(state)
    except RuntimeError as trouble:
        raise FormatError(f"{path}: {str(trouble).splitlines()[0]}") from None
    if not all(bool(value.isfinite().all()) for value in network.state_dict().values()):
        raise FormatError(f"{path} holds numbers that are not finite; train the weights again")
    return network.eval(), about


@cache
def cached_weights(path: str, changed_ns: int) -> "OrderNetwork":
    """The network of a file, read once until the file changes."""
    del changed_ns
    return load_weights(Path(path))[0]


def _read_about(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    said = state.pop("about", None)
    try:
        about = json.loads(bytes(said.numpy()).decode()) if said is not None else None
    except (ValueError, TypeError, RecursionError):
        about = None
    if not isinstance(about, dict):
        raise FormatError(f"{path} holds no weights of learned_order; name another file")
    return about


def _read_size(path: Path, about: dict[str, Any], name: str) -> int:
    value, most = about.get(name), _MOST_SIZES[name]
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise FormatError(f"{path}: {name} is {str(value)[:40]}, not a whole number from 1 to {most}")
    return value


def _digest(state: dict[str, Any]) -> str:
    import torch

    digest = hashlib.sha256()
    for name in sorted(state):
        value = state[name]
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
