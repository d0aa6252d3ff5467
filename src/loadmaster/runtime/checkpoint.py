"""Checkpoint: weights by name from a safetensors file, or from a folder of them with an index.

Read here without the library: 8 bytes give the length of a JSON header that says of each tensor its dtype,
shape and bytes. One tensor is read at a time, so that no more than the largest is in memory twice.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from loadmaster.core.errors import FileError, FormatError, InputError

_LONGEST_HEADER = 100_000_000  # bytes, as in the library
_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")  # in a zip, and bare
_INDEX = "model.safetensors.index.json"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where a tensor lies."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class Checkpoint:
    """Tensors by name; read when they are asked for."""

    def __init__(self, source: str | os.PathLike[str]) -> None:
        """Read the headers."""
        self.source = Path(source)
        self._entries: dict[str, _Entry] = {}
        for path in _find_files(self.source):
            self._entries |= _read_header(path)

    @property
    def names(self) -> set[str]:
        """Of all tensors."""
        return set(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one tensor."""
        return self._entries[name].shape

    def read(self, name: str) -> torch.Tensor:
        """One tensor on the CPU."""
        entry = self._entries[name]
        with open(entry.path, "rb") as file:
            file.seek(entry.begin)
            data = bytearray(entry.end - entry.begin)
            if file.readinto(data) != len(data):
                raise FormatError(f"{entry.path}: tensor {name!r} is cut off; fetch the file again")
        if not data:
            return torch.empty(entry.shape, dtype=entry.dtype)
        return torch.frombuffer(data, dtype=entry.dtype).reshape(entry.shape)


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


def _read_header(path: Path) -> dict[str, _Entry]:
    """Every tensor of one file."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        first = file.read(8)
        length = int.from_bytes(first, "little")
        if length > min(size - 8, _LONGEST_HEADER):
            if first.startswith(_PICKLES):
                raise FormatError(
                    f"{path} is a pickle (as torch.save writes it): reading one runs code, so it is not read;"
                    " save the weights with safetensors, or load them into the model before it is placed"
                )
            raise FormatError(f"{path}: not a safetensors file (its header would have {length} bytes)")
        try:
            header = json.loads(file.read(length))
            return {
                name: _parse_entry(path, name, what, 8 + length, size)
                for name, what in header.items()
                if name != "__metadata__"
            }
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as problem:
            if isinstance(problem, InputError):
                raise
            raise FormatError(f"{path}: not a safetensors file: {problem!r}") from None


def _parse_entry(path: Path, name: str, what: Any, start: int, size: int) -> _Entry:
    dtype = _DTYPES.get(what["dtype"])
    if dtype is None:
        raise FormatError(f"{path}: tensor {name!r} is of {what['dtype']!r}; known: {', '.join(_DTYPES)}")
    shape, (begin, end) = tuple(int(axis) for axis in what["shape"]), what["data_offsets"]
    count = 1
    for axis in shape:
        count *= axis
    if min((0, *shape)) < 0 or not 0 <= begin <= end <= size - start or count * dtype.itemsize != end - begin:
        raise FormatError(f"{path}: tensor {name!r} of {list(shape)} does not lie in bytes {begin} to {end}")
    return _Entry(path, dtype, shape, start + begin, start + end)
