"""The XML of OpenVINO's IR as records: layers with their ports, and edges. Its weights file is not read.

Read by expat as it streams. A document type declaration is refused before anything in it is looked at, so
there are no entities to expand and nothing outside of the file is ever asked for.
"""

import re
from dataclasses import dataclass, field
from typing import Any, NoReturn
from xml.parsers import expat

from loadmaster.core.errors import FormatError, SchemaError

VERSIONS = (10, 11)
_MOST_DEEP = 64
_LOOPS = {"TensorIterator", "Loop", "If"}
_WHOLE = re.compile(r"-?[0-9]{1,19}")


@dataclass(slots=True)
class Port:
    """An output of a layer, or an input."""

    precision: str
    shape: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Layer:
    """An op as the file has it."""

    id: int
    name: str
    type: str
    opset: str
    data: dict[str, str] = field(default_factory=dict)
    inputs: dict[int, Port] = field(default_factory=dict)
    outputs: dict[int, Port] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Edge:
    """From an output port to an input port."""

    source: int
    source_port: int
    target: int
    target_port: int


@dataclass(slots=True)
class Document:
    """All of it."""

    name: str = ""
    layers: list[Layer] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)


def parse_ir(data: bytes) -> Document:
    """The records of an IR; anything else is a FormatError."""
    handler = _Handler()
    parser = expat.ParserCreate()
    parser.buffer_text = True
    parser.StartDoctypeDeclHandler = _refuse_doctype
    parser.EntityDeclHandler = _refuse_doctype
    parser.StartElementHandler = handler.start
    parser.EndElementHandler = handler.end
    parser.CharacterDataHandler = handler.text
    try:
        parser.Parse(data, True)
    except FormatError:
        raise
    except (expat.ExpatError, ValueError, LookupError) as problem:  # the latter for odd encodings
        raise FormatError(f"not an OpenVINO IR: {problem}") from None
    if not handler.seen_net:
        raise FormatError("not an OpenVINO IR: the XML has no <net>")
    return handler.document


def _refuse_doctype(*_: Any) -> NoReturn:
    raise FormatError("the XML has a document type declaration, which no OpenVINO IR has; it is not read")


class _Handler:
    """Follows the elements by their path from the root; what it does not know it passes over."""

    def __init__(self) -> None:
        self.document = Document()
        self.seen_net = False
        self._path: list[str] = []
        self._layer: Layer | None = None
        self._port: Port | None = None
        self._text: list[str] | None = None

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        """An element opens."""
        self._path.append(tag)
        if len(self._path) > _MOST_DEEP:
            raise FormatError(f"the XML nests deeper than {_MOST_DEEP}; no OpenVINO IR does")
        match self._path:
            case ["net"]:
                self._start_net(attributes)
            case ["net", "layers", "layer"]:
                self._layer = _read_layer(attributes)
                self.document.layers.append(self._layer)
            case ["net", "layers", "layer", "data"] if self._layer is not None:
                self._layer.data = dict(attributes)
            case ["net", "layers", "layer", "input" | "output", "port"] if self._layer is not None:
                ports = self._layer.inputs if self._path[3] == "input" else self._layer.outputs
                label = f"a port of layer {self._layer.name!r}"
                self._port = ports[_parse_whole_number(attributes, "id", label)] = Port(
                    attributes.get("precision", "")
                )
            case ["net", "layers", "layer", "input" | "output", "port", "dim"]:
                self._text = []
            case ["net", "edges", "edge"]:
                words = ("from-layer", "from-port", "to-layer", "to-port")
                self.document.edges.append(
                    Edge(*(_parse_whole_number(attributes, word, "an edge") for word in words))
                )
            case _:
                pass

    def end(self, _: str) -> None:
        """An element closes."""
        self._path.pop()
        if self._text is not None and self._port is not None and self._layer is not None:
            text, self._text = "".join(self._text).strip(), None
            if _WHOLE.fullmatch(text) is None:
                raise FormatError(
                    f"a port of layer {self._layer.name!r} has an axis of {text[:40]!r}; needs a number"
                )
            self._port.shape.append(int(text))

    def text(self, text: str) -> None:
        """What stands in an element."""
        if self._text is not None:
            self._text.append(text)

    def _start_net(self, attributes: dict[str, str]) -> None:
        self.seen_net = True
        self.document.name = attributes.get("name", "")
        version = _parse_whole_number(attributes, "version", "<net>")
        if version not in VERSIONS:
            newer = version > VERSIONS[-1]
            remedy = "upgrade loadmaster" if newer else "convert the model again with a current OpenVINO"
            raise SchemaError(
                f"the IR has version {version}, {VERSIONS[0]} and {VERSIONS[1]} are read; {remedy}"
            )


def _read_layer(attributes: dict[str, str]) -> Layer:
    name, kind = attributes.get("name", ""), attributes.get("type", "")
    if not kind:
        raise FormatError(f"layer {name!r} has no type; the file is broken")
    if kind in _LOOPS:
        raise FormatError(
            f"layer {name!r} is a {kind}, which is control flow that depends on values; convert the"
            " model without control flow"
        )
    return Layer(
        _parse_whole_number(attributes, "id", f"layer {name!r}"), name, kind, attributes.get("version", "")
    )


def _parse_whole_number(attributes: dict[str, str], word: str, label: str) -> int:
    text = attributes.get(word, "")
    if _WHOLE.fullmatch(text) is None:
        raise FormatError(f"{label} has {word}={text[:40]!r}; needs a whole number")
    return int(text)
