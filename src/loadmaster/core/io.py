"""Nouns as files: versioned columnar JSON, read under a size limit, written atomically.

    {"loadmaster": "graph", "schema": 1, "digest": "...", "content": {"name": ..., "op_name": [...], ...}}

A float column holds null for infinity. A name that ends in `.gz` is compressed. The digest, where
present, must match the content: a damaged file is said to be damaged.
"""

import gzip
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import msgspec
import numpy as np

from loadmaster.core.cluster import Cluster
from loadmaster.core.errors import FileError, FormatError, InputError, SchemaError
from loadmaster.core.graph import Graph
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Pipeline, Plan
from loadmaster.core.problem import Costs, Problem
from loadmaster.core.timeline import Timeline
from loadmaster.core.units import format_bytes

SCHEMA_VERSION = 1
MAX_BYTES = 2**30
AnyNoun = Graph | Cluster | Costs | Problem | Plan | Pipeline | Placement | Timeline
NOUNS: dict[str, type[Any]] = {
    noun.__name__.lower(): noun
    for noun in (Graph, Cluster, Costs, Problem, Plan, Pipeline, Placement, Timeline)
}


class _Envelope(msgspec.Struct):
    loadmaster: str
    schema: int
    content: msgspec.Raw
    digest: str = ""


def encode(noun: AnyNoun) -> bytes:
    """The JSON document of a noun."""
    content = msgspec.Raw(msgspec.json.encode(noun, enc_hook=_encode_array))
    kind = type(noun).__name__.lower()
    return msgspec.json.encode(_Envelope(kind, SCHEMA_VERSION, content, noun.digest))


def decode(data: bytes, *, where: str = "document") -> AnyNoun:
    """The noun of a JSON document; `where` names it in errors."""
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
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
    except (msgspec.DecodeError, RecursionError) as problem:
        raise FormatError(f"{where}: bad {envelope.loadmaster}: {problem}") from None
    assert isinstance(noun, AnyNoun)
    if envelope.digest and envelope.digest != noun.digest:
        raise FormatError(
            f"{where} is damaged: its digest says {envelope.digest[:12]}, its content {noun.digest[:12]};"
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
                raise _too_large(path, size, max_bytes)
            if not str(path).endswith(".gz"):
                data = file.read(max_bytes + 1)
            else:
                with gzip.GzipFile(fileobj=file) as unzipped:
                    data = unzipped.read(max_bytes + 1)
    except (OSError, ValueError) as problem:  # ValueError: a name with a NUL in it
        if isinstance(problem, InputError):
            raise
        raise FileError(f"cannot read {path}: {getattr(problem, 'strerror', None) or problem}") from None
    except (EOFError, zlib.error) as problem:
        raise FormatError(f"{path} is not a whole gzip file: {problem}") from None
    if len(data) > max_bytes:
        raise _too_large(path, len(data), max_bytes)
    return data


def write_bytes(data: bytes, path: str | os.PathLike[str]) -> None:
    """Write a file whole or not at all: an old file stays until the new one is complete."""
    target = Path(path)
    if target.is_dir():
        raise FileError(f"cannot write {path}: it is a folder; name a file")
    scratch: str | None = None
    try:
        if target.exists() and not os.access(target, os.W_OK):
            raise PermissionError(13, "the file is read-only")
        handle, scratch = tempfile.mkstemp(prefix=f".{target.name[:64]}.", dir=target.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(gzip.compress(data, 6, mtime=0) if target.name.endswith(".gz") else data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(scratch, target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask())
        os.replace(scratch, target)
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise FileError(f"cannot write {path}: {reason}; the old content, if any, is untouched") from None
    finally:
        if scratch is not None and os.path.exists(scratch):
            os.unlink(scratch)


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
        array = np.asarray(value, dtype=wanted if wanted.kind == "f" else None)
    except (TypeError, ValueError) as problem:
        raise InputError(f"a column cannot be read as numbers: {problem}") from None
    if wanted.kind == "f":
        array[np.isnan(array)] = np.inf
    return array


def _array_schema(kind: Any) -> dict[str, Any]:
    """Numbers of one type, nested where the column has more than one axis; null is infinity."""
    item = {"b": "boolean", "i": "integer", "f": "number"}[np.dtype(kind.__args__[1].__args__[0]).kind]
    allowed = {"type": [item, "null"] if item == "number" else item}
    return {"type": "array", "items": {"anyOf": [allowed, {"type": "array"}]}}


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _too_large(path: str | os.PathLike[str], size: int, max_bytes: int) -> FileError:
    return FileError(
        f"{path} has {format_bytes(size)} or more, the limit is {format_bytes(max_bytes)};"
        " raise it with --max-bytes"
    )
