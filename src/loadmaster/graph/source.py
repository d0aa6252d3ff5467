"""One way to name any graph: a file in a known format, `gen:FAMILY:OPS[:SEED]`, or a PyTorch model."""

import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from loadmaster.core import files
from loadmaster.core.errors import FileError, FormatError, InputError, UnknownNameError
from loadmaster.core.graph import Graph
from loadmaster.core.problem import Workload
from loadmaster.graph.models import CaptureOptions, capture_model, is_saved_model, names_model

FORMATS: tuple[str, ...] = ("own", "msr", "piper", "pipedream", "nodelink", "onnx", "pt2", "openvino")
_SUFFIXES = {".onnx": "onnx", ".pt2": "pt2", ".xml": "openvino"}  # of files that are known by name too
TRANSFORMER = "transformer"
_EXAMPLE = "for example gen:fork_join:10k or gen:fork_join:10000:7"
_COUNT = re.compile(r"([0-9]{1,12})([kM]?)")
_TIMES = {"": 1, "k": 1000, "M": 1000_000}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class _Format(NamedTuple):
    recognises: Callable[[bytes], bool]
    read: Callable[[bytes, str], Workload]


def read_source(
    source: str | os.PathLike[str] | Graph | Workload,
    *,
    format: str | None = None,
    max_bytes: int = files.MAX_BYTES,
    asked: CaptureOptions | None = None,
) -> Workload:
    """The graph a source names, with what the source brings; `format` forces one of FORMATS.

    `asked` is for models (hf:NAME, zoo:NAME, file.py:function), which are captured; its batch and seq also
    for the free axes of an ONNX file.
    """
    asked = asked or CaptureOptions()
    if is_model(source):
        if format is not None:
            raise InputError(f"{source!r} is captured and has no format; leave {format!r} out")
        return Workload(capture_model(str(source), asked))
    if isinstance(source, Workload | Graph):
        _require_none(asked, source)
        return source if isinstance(source, Workload) else Workload(source)
    if not isinstance(source, str | os.PathLike):
        raise InputError(f"a source is text, a path, a Graph or a Workload, not {type(source).__name__}")
    if format is not None and format not in FORMATS:
        raise UnknownNameError("format", format, FORMATS)
    if isinstance(source, str) and source.startswith("gen:"):
        if format is not None:
            raise InputError(f"{source!r} is generated and has no format; leave {format!r} out")
        _require_none(asked, source)
        return _generate_workload(source)
    return _read_file(os.fsdecode(source), format=format, max_bytes=max_bytes, asked=asked)


def is_model(source: object) -> bool:
    """Whether a source is a model, which is captured."""
    if not isinstance(source, str) or not names_model(source):
        return False
    return is_saved_model(source) or not _is_file(source)


def _require_none(asked: CaptureOptions, source: object, *, sized: bool = False) -> None:
    """Refuse what only a model can be asked; `sized` sources have a batch and a seq."""
    names: tuple[str, ...] = ("target", "path", "assume", "accumulation", "ranges")
    names = names if sized else ("batch", "seq", *names)
    for name in names:
        value = getattr(asked, name)
        if value is not None:
            raise InputError(f"{source!r} is not a model, so it has no {name}; leave {value!r} out")


def _is_file(source: str) -> bool:
    return "\0" not in source and os.path.lexists(source)


def _generate_workload(source: str) -> Workload:
    """The workload of `gen:FAMILY:OPS[:SEED]`."""
    from loadmaster.graph.generate import FAMILIES, with_benchmark_cluster

    parts = source.split(":")
    if len(parts) not in (3, 4):
        raise InputError(f"{source!r} is not gen:FAMILY:OPS[:SEED]; write {_EXAMPLE}")
    family = parts[1]
    if family not in FAMILIES:
        raise UnknownNameError("family", family, FAMILIES, see=f"families: {', '.join(FAMILIES)}")
    num_ops = _parse_count(parts[2], "OPS", source)
    seed = _parse_count(parts[3], "SEED", source) if len(parts) == 4 else 0
    graph = FAMILIES[family](num_ops, seed)
    workload = with_benchmark_cluster(graph)
    return replace(workload, optimizer="adamw") if family == TRANSFORMER else workload


def _parse_count(text: str, what: str, source: str) -> int:
    """A whole number from '10000', '10k' or '1M'."""
    match = _COUNT.fullmatch(text)
    if match is None or not text.isascii():
        raise InputError(f"{what} of {source!r} is {text!r}, needs a whole number; write {_EXAMPLE}")
    return int(match[1]) * _TIMES[match[2]]


def _read_file(path: str, *, format: str | None, max_bytes: int, asked: CaptureOptions) -> Workload:
    if not _is_file(path):
        raise FileError(
            f"no such file {path!r}; a source is a file or gen:FAMILY:OPS[:SEED], or a model: hf:NAME,"
            " zoo:NAME, keras:NAME, a SavedModel folder or file.py:function"
        )
    if path.endswith(".py"):
        raise InputError(f"{path!r} is Python; name the function that builds the model: {path}:function")
    data = files.read_bytes(path, max_bytes=max_bytes).removeprefix(_BYTE_ORDER_MARK)
    formats = _list_formats(asked)
    chosen = format if format is not None else _recognise_format(formats, data, path)
    name = path if chosen == "own" else _graph_name(path)  # our own files name the graph themselves
    _require_none(asked, path, sized=chosen == "onnx")
    try:
        return formats[chosen].read(data, name)
    except InputError as problem:
        if not str(problem).startswith(path):
            problem.args = (f"{path}: {problem}",)
        raise


def _list_formats(asked: CaptureOptions) -> dict[str, _Format]:
    """The formats by name, in the order in which they are tried."""
    from loadmaster.graph.formats import msr, nodelink, onnx, openvino, own, pipedream, piper, pt2

    return {
        "own": _Format(own.recognises, own.read),
        "msr": _Format(msr.recognises, msr.read),
        "piper": _Format(piper.recognises, piper.read),
        "pipedream": _Format(pipedream.recognises, pipedream.read),
        "nodelink": _Format(nodelink.recognises, nodelink.read),
        "onnx": _Format(onnx.recognises, partial(onnx.read, batch=asked.batch, seq=asked.seq)),
        "pt2": _Format(pt2.recognises, pt2.read),
        "openvino": _Format(openvino.recognises, openvino.read),
    }


def _recognise_format(formats: dict[str, _Format], data: bytes, path: str) -> str:
    for name, known in formats.items():
        if known.recognises(data):
            return name
    by_name = _SUFFIXES.get(Path(path.removesuffix(".gz")).suffix.lower())
    if by_name is not None and data:
        return by_name  # whose reader says what is wrong with it
    begin = f"begins with {data[:32]!r}" if data else "is empty"
    raise FormatError(
        f"{path} {begin}, which is none of the formats {', '.join(FORMATS)};"
        " if it is one of them after all, say which with --format"
    )


def _graph_name(path: str) -> str:
    """The file's name without .json, .txt, .onnx, .pt2, .xml or .gz."""
    whole = os.fsencode(Path(path).name).decode("utf-8", "replace")  # a file's name may be any bytes
    name = whole.removesuffix(".gz")
    for suffix in (".json", ".txt", *_SUFFIXES):
        name = name.removesuffix(suffix) or name
    return name
