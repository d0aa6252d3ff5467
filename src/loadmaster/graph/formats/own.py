"""Our own JSON: a graph, a problem or a placement as `loadmaster.core.io` writes them."""

import re

from loadmaster.core import io
from loadmaster.core.errors import FormatError
from loadmaster.core.graph import Graph
from loadmaster.core.placement import Placement
from loadmaster.core.problem import Problem, Workload
from loadmaster.graph.formats._records import top_keys

_BEGINNING = re.compile(rb'\s*\{\s*"loadmaster"\s*:')


def recognises(data: bytes) -> bool:
    """Whether this is a document of ours, whatever noun it holds."""
    return _BEGINNING.match(data) is not None or "loadmaster" in top_keys(data)


def read(data: bytes, name: str) -> Workload:
    """The graph of the document, and for a problem or a placement what was asked about it."""
    try:
        noun = io.decode(data, where=name)
    except RecursionError:
        raise FormatError(f"{name} is not a Loadmaster JSON file: nested too deep") from None
    if isinstance(noun, Placement):
        noun = noun.problem
    if isinstance(noun, Problem):
        return Workload(
            noun.graph,
            noun.cluster,
            noun.costs,
            noun.objective,
            noun.links,
            split=noun.split,
            load=noun.load,
            pinned=noun.pinned,
            pipeline=noun.pipeline,
        )
    if isinstance(noun, Graph):
        return Workload(noun)
    kind = type(noun).__name__.lower()
    raise FormatError(f"{name} holds a {kind}, not a graph; give a graph, a problem or a placement")
