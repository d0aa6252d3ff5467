"""Checkpoint: weights by name from a safetensors file, or from a folder of them with an index.

One tensor is read at a time, so that no more than the largest is in memory twice.
"""

import os
from pathlib import Path

import msgspec
import torch

from loadmaster.core.errors import FileError, FormatError
from loadmaster.modules.tensor_files import TensorEntry, read_entries, read_tensor

_INDEX = "model.safetensors.index.json"


class _Index(msgspec.Struct):
    """What a checkpoint's index says: the file of every tensor."""

    weight_map: dict[str, str]


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
        names = _read_index(index)
        missing = sorted(name for name in names if not _is_file(source / name))
        if missing:
            more = f" and {len(missing) - 1} more shards" if len(missing) > 1 else ", a shard"
            raise FileError(f"{source} lacks {missing[0]}{more} of its index")
        return sorted(source / name for name in names)
    found = sorted(source.glob("*.safetensors"))
    if not found:
        raise FileError(f"{source} holds no .safetensors file (files that unpickle code are not read)")
    return found


def _read_index(index: Path) -> set[str]:
    """The names of the shards, which lie beside their index."""
    try:
        names = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
    except OSError as problem:
        raise FileError(f"cannot read {index}: {problem.strerror or problem}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise FormatError(f"{index}: not an index of shards: {problem!r}") from None
    outside = sorted(name for name in names if os.path.isabs(name) or ".." in Path(name).parts)
    if outside:
        raise FormatError(f"{index}: shard {outside[0]!r} lies outside of the checkpoint's folder")
    return names


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name longer than any file's
        return False
