"""Origin: how a captured graph was made, kept in `Graph.capture` so that a plan can be run.

    joint; 100.0 % of backward attributed; from hf:gpt2 --batch 4 --seq 64

They are the last part, as one would type them. Before them a graph that was traced says why it was not
exported.
"""

import re
import shlex
from dataclasses import replace
from typing import Any

from loadmaster.core.errors import InputError
from loadmaster.core.graph import Graph

TENSORFLOW = "tensorflow"  # how the capture of a TensorFlow graph begins
DEFAULT_BATCH = 8  # of a model by name
_NAMED = ("hf:", "zoo:", "keras:")
_FROM = "; from "
_REASON = "; not exported: "
_ADVICE = re.compile(r" (While executing|consider using|Caused by:) .*")  # what torch adds to an error
_WORDS = {  # field of `Asked` -> option
    "batch": "--batch",
    "seq": "--seq",
    "optimizer": "--optimizer",
    "precision": "--precision",
    "target": "--target",
    "path": "--capture",
    "assume": "--assume",
    "accumulation": "--accumulation",
}
_NUMBERS: dict[str, type] = {"batch": int, "seq": int, "accumulation": int, "assume": float}
_DEFAULT = {"precision": "fp32"}
_ROWS = re.compile(r"input \w+\[(\d+)")


def add_origin(capture: str, source: str, asked: Any) -> str:
    """How a graph was made, with the source and what was asked of it."""
    words = [source]
    for name, option in _WORDS.items():
        value = getattr(asked, name)
        if value is not None and value != _DEFAULT.get(name):
            words += [option, str(value)]
    return f"{capture}{_FROM}{shlex.join(words)}"


def add_reason(graph: Graph, reason: str) -> Graph:
    """A graph that was traced says why `torch.export` did not make it."""
    words = _ADVICE.sub("", " ".join(reason.replace(";", ",").split()))
    return replace(graph, capture=f"{graph.capture}{_REASON}{words}")


def is_tensorflow_graph(graph: Graph) -> bool:
    """Whether a graph was captured from TensorFlow, so that its plan is run there."""
    return graph.capture.startswith(f"{TENSORFLOW} ")


def reason_of(graph: Graph) -> str:
    """Why a graph was not exported; '' where nobody wrote it down."""
    _, _, rest = graph.capture.partition(_REASON)
    return rest.split(";")[0]


def origin_of(graph: Graph) -> tuple[str, dict[str, Any]] | None:
    """The source of a captured graph and the fields of `Asked`; None where nobody wrote them down."""
    _, found, text = graph.capture.partition(_FROM)
    if not found:
        return None
    option = {word: name for name, word in _WORDS.items()}
    try:
        source, *rest = shlex.split(text)
        pairs = dict(zip(rest[::2], rest[1::2], strict=True))
        return source, {option[word]: _NUMBERS.get(option[word], str)(value) for word, value in pairs.items()}
    except (ValueError, KeyError):
        raise InputError(f"the plan says that it was made from {text!r}, which cannot be read") from None


def batch_of_graph(graph: Graph) -> int | None:
    """Samples of the inputs of a captured step: as it was asked for, or as all inputs have; else None."""
    origin = origin_of(graph)
    if origin is not None:
        asked = origin[1].get("batch", DEFAULT_BATCH if origin[0].startswith(_NAMED) else None)
        if asked is not None:
            return int(asked)
    inputs = {int(at) for at, kind in zip(graph.signature, graph.op_kind, strict=True) if kind == "input"}
    rows = {int(found[1]) for at in inputs if at >= 0 and (found := _ROWS.match(graph.signature_table[at]))}
    return rows.pop() if len(rows) == 1 else None


def samples_in_a_pass(graph: Graph) -> int | None:
    """Samples that one run of the graph takes; None where nobody wrote it down."""
    origin = origin_of(graph)
    if origin is None:
        return None
    source, asked = origin
    batch = asked.get("batch", DEFAULT_BATCH if source.startswith(_NAMED) else None)
    return None if batch is None else int(batch) * int(asked.get("accumulation") or 1)
