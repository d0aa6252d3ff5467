"""Tensors in a file that any reader of safetensors opens, written in pieces and checked when read.

    8 bytes: length of the header | JSON {name: {dtype, shape, data_offsets}} | the bytes, one after another

Written here rather than by the library, so that a file is written piece by piece with its CRC-32 on the
way and never held twice in memory, and so that checkpoints need no extra.
"""

import math
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from loadmaster.core.errors import FileError, FormatError
from loadmaster.train.disk.journal import make_write_error

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_TYPES = {code: dtype for dtype, code in _CODES.items()}
_PIECE_BYTES = 2**24
_MOST_HEADER_BYTES = 10**8


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
    except OSError as problem:
        path.unlink(missing_ok=True)
        raise make_write_error(path, problem) from None
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
        with open(path, "rb", buffering=0) as file:
            seen = _read_into(file, memoryview(data.numpy()))
    except OSError as problem:
        raise FileError(f"cannot read {path}: {problem.strerror or problem}") from None
    if crc is not None and seen != crc:
        raise FormatError(f"{path} is damaged: its check sum is {seen:08x} instead of {crc:08x}")
    return _parse_tensors(path, data)


def _read_into(file: Any, into: memoryview) -> int:
    crc = at = 0
    while at < len(into):
        count = file.readinto(into[at : at + _PIECE_BYTES])
        if not count:
            break
        crc = zlib.crc32(into[at : at + count], crc)
        at += count
    return crc


def _parse_tensors(path: Path, data: torch.Tensor) -> dict[str, torch.Tensor]:
    try:
        length = int.from_bytes(bytes(data[:8].tolist()), "little")
        if length > min(_MOST_HEADER_BYTES, len(data) - 8):
            raise FormatError(f"{path} is no safetensors file: its header would be {length} bytes long")
        header = msgspec.json.decode(data[8 : 8 + length].numpy().tobytes())
        body = data[8 + length :]
        found = {}
        for name, facts in header.items():
            if name == "__metadata__":
                continue
            dtype, shape = _TYPES[facts["dtype"]], facts["shape"]
            start, end = facts["data_offsets"]
            if end - start != math.prod(shape) * dtype.itemsize or not 0 <= start <= end <= len(body):
                raise FormatError(f"{path}: tensor {name!r} has {end - start} bytes for shape {shape}")
            # A copy: views would start at odd addresses, where no tensor may.
            found[name] = body[start:end].clone().view(dtype).reshape(shape)
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as problem:
        if isinstance(problem, FormatError):
            raise
        raise FormatError(f"{path} is no safetensors file: {problem}") from None
    return found
