"""Nouns as files: versioned columnar JSON.

    {"loadmaster": "graph", "schema": 1, "digest": "...", "content": {"name": ..., "op_name": [...], ...}}

A float column holds null for infinity. The digest, where present, must match the content: a damaged file
is said to be damaged.
"""

import os
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from loadmaster.core.cluster import Cluster
from loadmaster.core.errors import FormatError, InputError, SchemaError
from loadmaster.core.files import MAX_BYTES, read_bytes, write_bytes
from loadmaster.core.graph import Graph
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Pipeline, Plan
from loadmaster.core.problem import Costs, Problem
from loadmaster.core.run import Budget
from loadmaster.core.strategy import OpGroup, Strategy
from loadmaster.core.strategy_answer import StrategyAnswer
from loadmaster.core.timeline import Timeline

SCHEMA_VERSION = 1
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
    """Read a file that `save` or the command line wrote."""
    return decode(read_bytes(path, max_bytes=max_bytes), where=str(path))


def save(noun: AnyNoun, path: str | os.PathLike[str]) -> None:
    """Write a plan, placement, graph, cluster, costs, problem or timeline to a JSON file, atomically."""
    write_bytes(encode(noun), path)


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
