"""Nouns as files: versioned columnar JSON, read under a size limit, written atomically.

    {"loadmaster": "graph", "schema": 1, "digest": "...", "content": {"name": ..., "op_name": [...], ...}}

A float column holds null for infinity. A name that ends in `.gz` is compressed. The digest, where
present, must match the content: a damaged file is said to be damaged.

A file is replaced only when the new one is complete. A device such as /dev/null is written to, never
replaced, and of a symbolic link the file it points at.
"""

import gzip
import os
import tempfile
import zlib
from pathlib import Path
from typing import IO, Any, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from loadmaster.core.cluster import Cluster
from loadmaster.core.errors import FileError, FormatError, InputError, SchemaError
from loadmaster.core.graph import Graph
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Pipeline, Plan
from loadmaster.core.problem import Costs, Problem
from loadmaster.core.run import Budget
from loadmaster.core.strategy import OpGroup, Strategy
from loadmaster.core.strategy_answer import StrategyAnswer
from loadmaster.core.timeline import Timeline
from loadmaster.core.units import format_bytes

SCHEMA_VERSION = 1
MAX_BYTES = 2**30
AnyNoun = (
    Graph
    | Cluster
    | Costs
    | Problem
    | Plan
    | Pipeline
    | Placement
    | Timeline
    | Budget
    | OpGroup
    | Strategy
    | StrategyAnswer
)
NOUNS: dict[str, type[Any]] = {noun.__name__.lower(): noun for noun in get_args(AnyNoun)}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_CHUNK_BYTES = 2**20
_MOST_UNPACKED = (
    200  # times the size of a .gz file, where that is much: columns of names and numbers take a tenth
)
_LEAST_BOMB_BYTES = 2**26


class _Envelope(msgspec.Struct):
    loadmaster: str
    schema: int
    content: msgspec.Raw
    digest: str = ""


def encode(noun: AnyNoun) -> bytes:
    """The JSON document of a noun."""
    kind = type(noun).__name__.lower()
    if kind not in NOUNS:
        raise FormatError(f"a {type(noun).__name__} cannot be saved; give one of {', '.join(NOUNS)}")
    try:
        content = msgspec.Raw(msgspec.json.encode(noun, enc_hook=_encode_array))
    except UnicodeEncodeError as problem:  # half a surrogate pair, as Python makes of undecodable bytes
        raise FormatError(f"a name in this {kind} is not Unicode text: {problem}; rename it") from None
    return msgspec.json.encode(_Envelope(kind, SCHEMA_VERSION, content, noun.digest))


def decode(data: bytes, *, where: str = "document") -> AnyNoun:
    """The noun of a JSON document; `where` names it in errors."""
    try:
        envelope = msgspec.json.decode(data.removeprefix(_BYTE_ORDER_MARK), type=_Envelope)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise FormatError(f"{where} is not a Loadmaster JSON file: {problem}") from None
    if envelope.loadmaster not in NOUNS:
        raise SchemaError(f"{where} holds a {envelope.loadmaster!r}; known: {', '.join(NOUNS)}")
    if envelope.schema != SCHEMA_VERSION:
        newer = envelope.schema > SCHEMA_VERSION
        remedy = "upgrade loadmaster" if newer else "write it again with this version"
        raise SchemaError(
            f"{where} has schema version {envelope.schema}, this is version {SCHEMA_VERSION}; {remedy}"
        )
    noun_type = NOUNS[envelope.loadmaster]
    try:
        noun = msgspec.json.decode(envelope.content, type=noun_type, dec_hook=_decode_array)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise FormatError(f"{where}: bad {envelope.loadmaster}: {problem}") from None
    assert isinstance(noun, AnyNoun)
    found = noun.digest
    if envelope.digest and envelope.digest != found:
        raise FormatError(
            f"{where} is damaged: its digest says {envelope.digest[:12]}, its content {found[:12]};"
            " if you edited it on purpose, delete the digest"
        )
    return noun


def load(path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES) -> AnyNoun:
    """Read any noun from its JSON file."""
    return decode(read_bytes(path, max_bytes=max_bytes), where=str(path))


def save(noun: AnyNoun, path: str | os.PathLike[str]) -> None:
    """Write a noun to a JSON file, atomically."""
    write_bytes(encode(noun), path)


def read_bytes(path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES) -> bytes:
    """The content of a file, decompressed if its name ends in .gz, refused above `max_bytes`."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > max_bytes:
                raise _too_large_error(path, size, max_bytes)
            if str(path).endswith(".gz"):
                most = min(max_bytes, max(_LEAST_BOMB_BYTES, _MOST_UNPACKED * size))
                with gzip.GzipFile(fileobj=file) as unzipped:
                    data = _read_at_most(unzipped, most + 1, _CHUNK_BYTES)
                if most < len(data) and most < max_bytes:
                    raise FileError(
                        f"{path} unpacks to more than {_MOST_UNPACKED} times its size,"
                        f" {format_bytes(size)}, as no file of ours does; unpack it yourself if you trust it"
                    )
            else:
                data = _read_at_most(file, max_bytes + 1, max(size + 1, _CHUNK_BYTES))
    except (OSError, ValueError) as problem:  # ValueError: a name with a NUL in it
        if isinstance(problem, InputError):
            raise
        raise FileError(f"cannot read {path}: {getattr(problem, 'strerror', None) or problem}") from None
    except (EOFError, zlib.error) as problem:
        raise FormatError(f"{path} is not a whole gzip file: {problem}") from None
    if len(data) > max_bytes:
        raise _too_large_error(path, None, max_bytes)
    return data


def _read_at_most(stream: IO[bytes] | gzip.GzipFile, limit: int, chunk_bytes: int) -> bytes:
    """Up to `limit` bytes; memory is taken as they come, not as they are allowed."""
    parts: list[bytes] = []
    left = limit
    while left > 0 and (part := stream.read(min(left, chunk_bytes))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def write_bytes(data: bytes, path: str | os.PathLike[str]) -> None:
    """Write a file whole or not at all: an old file stays until the new one is complete."""
    require_writable(path)
    target = _resolve_target(path)
    content = gzip.compress(data, 6, mtime=0) if target.name.endswith(".gz") else data
    scratch: str | None = None
    try:
        if _is_special(target):
            target.write_bytes(content)
            return
        handle, scratch = tempfile.mkstemp(prefix=".loadmaster-", dir=target.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(scratch, target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_current_umask())
        os.replace(scratch, target)
    except OSError as problem:
        raise _unwritable_error(path, problem.strerror or str(problem)) from None
    finally:
        if scratch is not None and os.path.exists(scratch):
            os.unlink(scratch)


def require_writable(path: str | os.PathLike[str]) -> None:
    """Refuse before any work is done what `write_bytes` would refuse after it."""
    try:
        target = _resolve_target(path)
        if target.is_dir():
            raise FileError(f"cannot write {path}: it is a folder; name a file")
        if target.exists() and not os.access(target, os.W_OK):
            raise _unwritable_error(path, "the file is read-only")
        if not target.parent.is_dir():
            raise _unwritable_error(path, f"there is no folder {target.parent}")
        if not _is_special(target):
            with tempfile.TemporaryFile(dir=target.parent):
                return
    except (OSError, ValueError) as problem:  # ValueError: a name with a NUL in it
        if isinstance(problem, InputError):
            raise
        raise _unwritable_error(path, getattr(problem, "strerror", None) or str(problem)) from None


def _resolve_target(path: str | os.PathLike[str]) -> Path:
    """What is to be written: a device or pipe as it is named, else the file that a link points at."""
    return Path(path) if _is_special(Path(path)) else Path(os.path.realpath(path))


def _is_special(target: Path) -> bool:
    """Whether this is a device or a pipe: something to write to, which must not be replaced."""
    return target.exists() and not target.is_file()


def _unwritable_error(path: str | os.PathLike[str], reason: str) -> FileError:
    return FileError(f"cannot write {path}: {reason}; the old content, if any, is untouched")


def json_schema(noun_type: type[Any]) -> dict[str, Any]:
    """The JSON Schema of a noun's file."""
    (ref,), defs = msgspec.json.schema_components(
        [noun_type], schema_hook=lambda _: {"type": "array"}, ref_template="#/$defs/{name}"
    )
    for noun in NOUNS.values():
        for field, kind in get_type_hints(noun).items():
            if get_origin(kind) is np.ndarray and noun.__name__ in defs:
                defs[noun.__name__]["properties"][field] = _array_schema(kind)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Loadmaster {noun_type.__name__}",
        "type": "object",
        "required": ["loadmaster", "schema", "content"],
        "properties": {
            "loadmaster": {"const": noun_type.__name__.lower()},
            "schema": {"const": SCHEMA_VERSION},
            "digest": {"type": "string"},
            "content": ref,
        },
        "$defs": defs,
    }


def _encode_array(value: object) -> list[Any]:
    assert isinstance(value, np.ndarray)
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        boxed = value.astype(object)
        boxed[~np.isfinite(value)] = None
        value = boxed
    return list(value.tolist())


def _decode_array(kind: Any, value: object) -> Any:
    wanted = np.dtype(kind.__args__[1].__args__[0])
    try:
        array = np.asarray(value)
        if array.dtype.kind in "US" or any(isinstance(part, str) for part in _loose_values(array)):
            raise InputError("a column holds text; give numbers")
        if wanted.kind == "f" and array.dtype != wanted:
            array = array.astype(wanted)
    except (TypeError, ValueError, OverflowError) as problem:
        if isinstance(problem, InputError):
            raise
        raise InputError(f"a column cannot be read as numbers: {problem}") from None
    if wanted.kind == "f":
        array[np.isnan(array)] = np.inf
    return array


def _loose_values(array: np.ndarray[Any, Any]) -> list[Any]:
    """The parts of an array that numpy found no number type for: nulls, huge numbers, anything."""
    return array.reshape(-1).tolist() if array.dtype.kind == "O" else []


def _array_schema(kind: Any) -> dict[str, Any]:
    """Numbers of one type, nested where the column has more than one axis; null is infinity."""
    item = {"b": "boolean", "i": "integer", "f": "number"}[np.dtype(kind.__args__[1].__args__[0]).kind]
    allowed = {"type": [item, "null"] if item == "number" else item}
    return {"type": "array", "items": {"anyOf": [allowed, {"type": "array"}]}}


def _current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _too_large_error(path: str | os.PathLike[str], size: int | None, max_bytes: int) -> FileError:
    """`size` is None where reading stopped at the limit."""
    limit = format_bytes(max_bytes)
    have = f"more than {limit}" if size is None else format_bytes(size)
    if have == limit:  # the difference is lost in rounding
        have, limit = f"{size} bytes", f"{max_bytes} bytes"
    return FileError(f"{path} has {have}, the limit is {limit}; raise it with --max-bytes")
