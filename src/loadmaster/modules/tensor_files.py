"""Safetensors files: written in pieces, read whole and checked, or one tensor at a time.

    8 bytes: length of the header | JSON {name: {dtype, shape, data_offsets}} | the bytes, one after another

Read and written here rather than by the library, so that a file is written piece by piece with its CRC-32 on
the way and never held twice in memory, and so that checkpoints need no extra.
"""

import math
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from loadmaster.core.errors import FileError, FormatError

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TYPES = {code: dtype for dtype, code in _CODES.items()}
_METADATA = "__metadata__"  # a key of the header that is no tensor
_PIECE_BYTES = 2**24
_MOST_HEADER_BYTES = 10**8  # as in the library
_MOST_DIMENSIONS = 64  # as many as a tensor may have
_MOST_ELEMENTS = 2**63  # of an axis, too: one of nothing may be followed by any number
_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")  # in a zip, and bare


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies: dtype, shape, and its bytes in the file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class _HeaderEntry(msgspec.Struct):
    """What a header says of a tensor."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
    """Write and fsync a file; returns its size and CRC-32. A failed write leaves no file."""
    crc = size = 0
    try:
        with open(path, "wb") as file:
            for piece in _iter_pieces(tensors):
                file.write(piece)
                crc = zlib.crc32(piece, crc)
                size += len(piece)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return size, crc


def match_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int] | None:
    """Size and CRC-32 of a file, if it holds exactly these tensors; None: it does not, or is not there."""
    crc = size = 0
    try:
        with open(path, "rb") as file:
            for piece in _iter_pieces(tensors):
                if file.read(len(piece)) != piece:
                    return None
                crc = zlib.crc32(piece, crc)
                size += len(piece)
            return None if file.read(1) else (size, crc)
    except FileNotFoundError:
        return None


def _iter_pieces(tensors: Mapping[str, torch.Tensor]) -> Iterator[memoryview | bytes]:
    header: dict[str, Any] = {}
    at = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _CODES:
            raise FileError(f"tensor {name!r} is of {tensor.dtype}, which checkpoints cannot hold")
        header[name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        for start in range(0, len(flat), _PIECE_BYTES):
            yield memoryview(flat[start : start + _PIECE_BYTES].numpy())


def read_tensors(path: Path, *, size: int | None = None, crc: int | None = None) -> dict[str, torch.Tensor]:
    """Every tensor of a file, in memory of its own; size and CRC-32 are compared where they are known."""
    try:
        found = path.stat().st_size
        if size is not None and found != size:
            raise FormatError(f"{path} is damaged: {found} bytes instead of {size}")
        data = torch.empty(found, dtype=torch.uint8)
        view = memoryview(data.numpy())
        with open(path, "rb", buffering=0) as file:
            seen = _read_into(file, view)
    except OSError as problem:
        raise _make_read_error(path, problem) from None
    if crc is not None and seen != crc:
        raise FormatError(f"{path} is damaged: its check sum is {seen:08x} instead of {crc:08x}")
    length = _parse_header_length(path, bytes(view[:8]), found)
    entries = _parse_header(path, bytes(view[8 : 8 + length]), found)
    return {
        # A copy: views would start at odd addresses, where no tensor may.
        name: data[entry.begin : entry.end].clone().view(entry.dtype).reshape(entry.shape)
        for name, entry in entries.items()
    }


def read_entries(path: Path) -> dict[str, TensorEntry]:
    """Where every tensor of a file lies."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = _parse_header_length(path, file.read(8), size)
            text = file.read(length)
    except OSError as problem:
        raise _make_read_error(path, problem) from None
    return _parse_header(path, text, size)


def read_tensor(name: str, entry: TensorEntry) -> torch.Tensor:
    """One tensor on the CPU."""
    data = torch.empty(entry.end - entry.begin, dtype=torch.uint8)
    view = memoryview(data.numpy())
    try:
        with open(entry.path, "rb") as file:
            file.seek(entry.begin)
            count = file.readinto(view)
    except OSError as problem:
        raise _make_read_error(entry.path, problem) from None
    if count != len(data):
        raise FormatError(f"{entry.path}: tensor {name!r} is cut off; fetch the file again")
    return data.view(entry.dtype).reshape(entry.shape)


def _read_into(file: Any, into: memoryview) -> int:
    crc = at = 0
    while at < len(into):
        count = file.readinto(into[at : at + _PIECE_BYTES])
        if not count:
            break
        crc = zlib.crc32(into[at : at + count], crc)
        at += count
    return crc


def _parse_header_length(path: Path, first: bytes, size: int) -> int:
    """How long the header is, which must lie within the file."""
    length = int.from_bytes(first, "little")
    if length <= min(size - 8, _MOST_HEADER_BYTES):
        return length
    if first.startswith(_PICKLES):
        raise FormatError(
            f"{path} is a pickle (as torch.save writes it): reading one runs code, so it is not read;"
            " save the weights with safetensors, or load them into the model before it is placed"
        )
    raise FormatError(f"{path}: not a safetensors file (its header would have {length} bytes)")


def _parse_header(path: Path, text: bytes, size: int) -> dict[str, TensorEntry]:
    try:
        parts = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        header = {
            name: msgspec.json.decode(part, type=_HeaderEntry)
            for name, part in parts.items()
            if name != _METADATA
        }
    except (msgspec.DecodeError, ValueError, RecursionError) as problem:
        raise FormatError(f"{path}: not a safetensors file: {problem!r}") from None
    start = 8 + len(text)
    entries = {name: _parse_entry(path, name, each, start, size) for name, each in header.items()}
    _require_one_after_another(path, entries, start, size)
    return entries


def _require_one_after_another(path: Path, entries: dict[str, TensorEntry], start: int, size: int) -> None:
    """Refuse tensors that share bytes, and bytes that are of no tensor: then the header lies."""
    at = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != at:
            what = "overlaps another tensor" if entry.begin < at else "follows bytes that belong to no tensor"
            raise FormatError(
                f"{path}: tensor {name!r} {what}: it begins at byte {entry.begin - start} of the data instead"
                f" of {at - start}; write the file again"
            )
        at = entry.end
    if at != size:
        raise FormatError(
            f"{path}: {size - at} bytes after the last tensor belong to no tensor, or the file is not whole;"
            " write it again"
        )


def _parse_entry(path: Path, name: str, given: _HeaderEntry, start: int, size: int) -> TensorEntry:
    dtype = _TYPES.get(given.dtype)
    if dtype is None:
        raise FormatError(f"{path}: tensor {name!r} is of {given.dtype!r}; known: {', '.join(_TYPES)}")
    shape, (begin, end) = given.shape, given.data_offsets
    if len(shape) > _MOST_DIMENSIONS or max((0, *shape)) >= _MOST_ELEMENTS:
        raise FormatError(f"{path}: tensor {name!r} has a shape that no tensor has, {str(shape)[:80]}")
    num_bytes = math.prod(shape) * dtype.itemsize
    if min((0, *shape)) < 0 or not 0 <= begin <= end <= size - start or num_bytes != end - begin:
        raise FormatError(f"{path}: tensor {name!r} of {shape} does not lie in bytes {begin} to {end}")
    return TensorEntry(path, dtype, tuple(shape), start + begin, start + end)


def _make_read_error(path: Path, problem: OSError) -> FileError:
    return FileError(f"cannot read {path}: {problem.strerror or problem}")
