"""Checkpoint: weights by name from a safetensors file, or from a folder of them with an index.

One tensor is read at a time, so that no more than the largest is in memory twice.
"""

import json
import os
from pathlib import Path

import torch

from loadmaster.core.errors import FileError, FormatError
from loadmaster.modules.tensor_files import TensorEntry, read_entries, read_tensor

_INDEX = "model.safetensors.index.json"


class Checkpoint:
    """Tensors by name; read when they are asked for."""

    def __init__(self, source: str | os.PathLike[str]) -> None:
        """Read the headers."""
        self.source = Path(source)
        self._entries: dict[str, TensorEntry] = {}
        for path in _find_files(self.source):
            self._entries |= read_entries(path)

    @property
    def names(self) -> set[str]:
        """Of all tensors."""
        return set(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one tensor."""
        return self._entries[name].shape

    def read(self, name: str) -> torch.Tensor:
        """One tensor on the CPU."""
        return read_tensor(name, self._entries[name])


def _find_files(source: Path) -> list[Path]:
    """The safetensors files of a checkpoint."""
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise FileError(
            f"{source}: no such file or folder; give a .safetensors file or a checkpoint's folder"
        )
    index = source / _INDEX
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as problem:
            raise FormatError(f"{index}: not an index of shards: {problem!r}") from None
        missing = sorted(name for name in names if not (source / str(name)).is_file())
        if missing:
            more = f" and {len(missing) - 1} more shards" if len(missing) > 1 else ", a shard"
            raise FileError(f"{source} lacks {missing[0]}{more} of its index")
        return sorted(source / str(name) for name in names)
    found = sorted(source.glob("*.safetensors"))
    if not found:
        raise FileError(f"{source} holds no .safetensors file (files that unpickle code are not read)")
    return found
