"""The inside of a .pt2 file: a zip whose JSON says it all. Only the JSON is read, never a pickle or a weight.

    NAME/archive_format, archive_version        'pt2', '0'
    NAME/models/model.json                      the program (schema 8: torch 2.6 and later)
    NAME/data/weights/model_weights_config.json which member holds which weight; tied weights share one
    NAME/data/constants/...                     the same for constants

torch before 2.8 writes the program as serialized_exported_program.json, its weights as a pickle.
"""

import io
import zipfile
import zlib
from dataclasses import dataclass

import msgspec

from loadmaster.core.errors import FormatError, SchemaError
from loadmaster.core.units import format_bytes
from loadmaster.graph.formats._records import decode

SCHEMA_MAJOR = 8
MAX_JSON_BYTES = 2**28
_MAX_WORD_BYTES = 64
_OLD_PROGRAM = "serialized_exported_program.json"
_BROKEN = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    KeyError,
    OSError,
    OverflowError,
    RuntimeError,  # an encrypted member, an unknown compression
    UnicodeDecodeError,
    ValueError,
)
_KINDS = {"parameter": "param", "buffer": "buffer", "tensor_constant": "constant"}


class Hint(msgspec.Struct):
    """The number an expression had when the model was exported."""

    as_int: int | None = None
    as_float: float | str | None = None
    as_bool: bool | None = None


class Expression(msgspec.Struct):
    """A size that may vary."""

    expr_str: str = ""
    hint: Hint | None = None


class Size(msgspec.Struct):
    """A whole number, or an expression."""

    as_int: int | None = None
    as_expr: Expression | None = None

    def number(self) -> int | None:
        """The number, that of the example where it may vary."""
        if self.as_int is not None or self.as_expr is None or self.as_expr.hint is None:
            return self.as_int
        return self.as_expr.hint.as_int


class Meta(msgspec.Struct):
    """What a tensor looks like."""

    dtype: int
    sizes: list[Size]
    strides: list[Size] = []
    storage_offset: Size = msgspec.field(default_factory=lambda: Size(as_int=0))
    layout: int = 7


class Named(msgspec.Struct):
    """A tensor by its name."""

    name: str


class Symbol(msgspec.Struct):
    """A number by its name, or itself."""

    as_name: str | None = None
    as_int: int | None = None
    as_float: float | str | None = None
    as_bool: bool | None = None


class Maybe(msgspec.Struct):
    """A tensor that may be absent."""

    as_tensor: Named | None = None
    as_none: bool | None = None


class Device(msgspec.Struct):
    """Where the example was."""

    type: str
    index: int | None = None


class Subgraph(msgspec.Struct):
    """A graph that an op is given."""

    name: str
    graph: "Program"


class Argument(msgspec.Struct):
    """One of many things; what is not listed here says nothing about cost."""

    as_none: bool | None = None
    as_tensor: Named | None = None
    as_tensors: list[Named] | None = None
    as_nested_tensors: list[list[Named]] | None = None
    as_optional_tensor: Maybe | None = None
    as_optional_tensors: list[Maybe] | None = None
    as_int: int | None = None
    as_ints: list[int] | None = None
    as_float: float | str | None = None
    as_floats: list[float | str] | None = None
    as_string: str | None = None
    as_bool: bool | None = None
    as_bools: list[bool] | None = None
    as_sym_int: Symbol | None = None
    as_sym_ints: list[Symbol] | None = None
    as_sym_float: Symbol | None = None
    as_sym_bool: Symbol | None = None
    as_scalar_type: int | None = None
    as_memory_format: int | None = None
    as_layout: int | None = None
    as_device: Device | None = None
    as_graph: Subgraph | None = None


class Input(msgspec.Struct):
    """An argument; kind 2 was given by keyword."""

    name: str
    arg: Argument
    kind: int | None = None


class Node(msgspec.Struct):
    """An op."""

    target: str
    inputs: list[Input]
    outputs: list[Argument]
    metadata: dict[str, str] = {}
    name: str | None = None


class Program(msgspec.Struct):
    """A graph, ops in the order in which they run."""

    inputs: list[Argument]
    outputs: list[Argument]
    nodes: list[Node]
    tensor_values: dict[str, Meta]
    sym_int_values: dict[str, Size] = {}


class Binding(msgspec.Struct):
    """What an input of the graph is; the name is in the one field that is there."""

    arg: Named
    parameter_name: str = ""
    buffer_name: str = ""
    tensor_constant_name: str = ""


class UserValue(msgspec.Struct):
    """An input or output of the model's own."""

    arg: Argument


class InputSpec(msgspec.Struct):
    """One of these."""

    user_input: UserValue | None = None
    parameter: Binding | None = None
    buffer: Binding | None = None
    tensor_constant: Binding | None = None

    def resident(self) -> tuple[str, Binding] | None:
        """The kind of a weight, buffer or constant."""
        for field, kind in _KINDS.items():
            found = getattr(self, field)
            if found is not None:
                return kind, found
        return None


class Signature(msgspec.Struct):
    """What goes in."""

    input_specs: list[InputSpec]


class GraphModule(msgspec.Struct):
    """A graph and its inputs."""

    graph: Program
    signature: Signature


class Version(msgspec.Struct):
    """Of the schema."""

    major: int
    minor: int = 0


class _Dated(msgspec.Struct):
    schema_version: Version
    torch_version: str = "unknown"


class Exported(msgspec.Struct):
    """The JSON document."""

    graph_module: GraphModule


class _Payload(msgspec.Struct):
    path_name: str


class _Payloads(msgspec.Struct):
    config: dict[str, _Payload]


@dataclass(frozen=True, slots=True)
class Archive:
    """What was read: the program, and by the name of a weight the member that holds it with its bytes."""

    module: GraphModule
    stored: dict[str, tuple[str, int]]


def open_archive(data: bytes) -> Archive:
    """The archive; anything that is none is a FormatError."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return _read_archive(archive, len(data))
    except FormatError:
        raise
    except _BROKEN as problem:
        said = " ".join(str(problem).split())[:200]
        raise FormatError(f"not a whole .pt2 file: {said or type(problem).__name__}") from None


def _read_archive(archive: zipfile.ZipFile, num_bytes: int) -> Archive:
    members = {info.filename: info for info in archive.infolist()}
    program = _find_program(members)
    root = program.rpartition("models/")[0] if program.endswith(".json") and "models/" in program else ""
    for name, expected in (("archive_format", "pt2"), ("archive_version", "0")):
        if root + name in members:
            found = (
                _read_member(archive, members[root + name], _MAX_WORD_BYTES)
                .decode("utf-8", "replace")
                .strip()
            )
            if found != expected:
                raise SchemaError(
                    f"{name} is {found!r}, {expected!r} is read; upgrade loadmaster or export again"
                )
    text = _read_member(archive, members[program], MAX_JSON_BYTES)
    dated = decode(text, _Dated, what="the program of a .pt2 file")
    major = dated.schema_version.major
    if major != SCHEMA_MAJOR:
        remedy = "upgrade loadmaster" if major > SCHEMA_MAJOR else "export again with torch 2.6 or later"
        raise SchemaError(
            f"the program has schema {major} (torch {dated.torch_version}), {SCHEMA_MAJOR} is read; {remedy}"
        )
    module = decode(text, Exported, what="the program of a .pt2 file").graph_module
    stored: dict[str, tuple[str, int]] = {}
    for folder, config in (("data/weights/", "weights"), ("data/constants/", "constants")):
        title = program.rpartition("/")[2].removesuffix(".json")
        listed = members.get(f"{root}{folder}{title}_{config}_config.json")
        if listed is not None:
            payloads = decode(
                _read_member(archive, listed, MAX_JSON_BYTES), _Payloads, what=f"the list of {config}"
            )
            for name, payload in payloads.config.items():
                path = f"{root}{folder}{payload.path_name}"
                stored[name] = path, _weight_member_bytes(members, path, name, num_bytes)
    return Archive(module, stored)


def _find_program(members: dict[str, zipfile.ZipInfo]) -> str:
    """The name of the member that is the program."""
    models = sorted(name for name in members if _is_model(name))
    if len(models) > 1:
        shown = ", ".join(map(repr, models[:5]))
        raise FormatError(f"the .pt2 file holds {len(models)} programs ({shown}); save one by itself")
    found = models or [name for name in members if name.rpartition("/")[2] == _OLD_PROGRAM]
    if found:
        return found[0]
    if any(name.endswith("data.pkl") for name in members):
        raise FormatError(
            "this zip is a pickle of torch.save or TorchScript, which is code and not read;"
            " write the model with torch.export.save"
        )
    raise FormatError("this zip has no member models/*.json, so it is not a .pt2 file of torch.export.save")


def _is_model(name: str) -> bool:
    folder, _, last = name.rpartition("/")
    return last.endswith(".json") and folder.rpartition("/")[2] == "models"


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, limit: int) -> bytes:
    """A member's bytes; memory is taken as they come, and no more than the limit."""
    with archive.open(info) as stream:
        found = stream.read(limit + 1)
    if len(found) > limit:
        raise FormatError(
            f"{info.filename} unpacks to more than {format_bytes(limit)}, the limit; the file looks broken"
        )
    return found


def _weight_member_bytes(members: dict[str, zipfile.ZipInfo], path: str, name: str, num_bytes: int) -> int:
    """The size of a weight's member, from the directory of the zip."""
    info = members.get(path)
    if info is None:
        raise FormatError(f"weight {name!r} should be in member {path!r}, which is missing; export again")
    if info.compress_type == zipfile.ZIP_STORED and info.file_size > num_bytes:
        raise FormatError(
            f"member {path!r} claims {info.file_size} bytes of a file of {num_bytes}; it is broken"
        )
    return info.file_size
