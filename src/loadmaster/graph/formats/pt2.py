"""`.pt2` files of torch.export.save: ops, shapes and module paths from their JSON; needs no torch.

The ops of the Graph are the nodes of the exported graph, same names and order, with the signatures that
`capture` gives them. Nothing is unpickled and no weight is read: sizes come from the JSON and the zip's
directory. A size that may vary has the value of the example. An inference graph: an export has no backward.
"""

import re
from collections.abc import Iterator, Sequence

from loadmaster.core.errors import FormatError
from loadmaster.core.problem import Workload
from loadmaster.graph.formats import _aten
from loadmaster.graph.formats._flops import count_or_refuse
from loadmaster.graph.formats._inference import ELEMENTS, Element, Recording, Row, Value, check_size
from loadmaster.graph.formats._pt2 import (
    Archive,
    Argument,
    Meta,
    Node,
    Program,
    Symbol,
    open_archive,
)

_BEGINNING = b"PK\x03\x04"
_TYPES: dict[int, Element] = {
    code: ELEMENTS[name]
    for code, name in {
        1: "uint8",
        2: "int8",
        3: "int16",
        4: "int32",
        5: "int64",
        6: "float16",
        7: "float32",
        8: "float64",
        9: "complex32",
        10: "complex64",
        11: "complex128",
        12: "bool",
        13: "bfloat16",
        28: "uint16",
        29: "float8_e4m3fn",
        30: "float8_e5m2",
        31: "float8_e4m3fnuz",
        32: "float8_e5m2fnuz",
        33: "float8_e8m0fnu",
        34: "uint32",
        35: "uint64",
    }.items()
}
_FORMATS = {1: "contiguous_format", 2: "channels_last", 3: "channels_last_3d", 4: "preserve_format"}
_STRIDED = 7
_REPEATED = re.compile(r"@\d+")  # a module's second call, as export writes it
_HIGHER = "torch.ops.higher_order."
_REGIONS = {  # nodes that run a graph as it stands
    "wrap_with_set_grad_enabled",
    "wrap_with_autocast",
    "wrap",
    "invoke_subgraph",
}
_SILENT = {"_assert_tensor_metadata", "_assert_async", "_assert_scalar", "sym_constrain_range_for_size"}
_KNOWN = ("aten.", "prims.", "prim.", "higher_order.")
_FEW = 5


def recognises(data: bytes) -> bool:
    """Whether this is a zip."""
    return data.startswith(_BEGINNING)


def read(data: bytes, name: str) -> Workload:
    """The model's inference; a .pt2 file brings no cluster and no costs."""
    archive = open_archive(data)
    reader = _Reader()
    program = archive.module.graph
    reader.begin(archive)
    reader.run(program, prefix="", inner="")
    for output in program.outputs:
        for tensor in _tensor_names(output):
            reader.recording.keep(tensor)
    if reader.unknown:
        shown = ", ".join(sorted(reader.unknown)[:_FEW]) + ", ..." * (len(reader.unknown) > _FEW)
        reader.recording.notes.append(f"for unknown ops only memory traffic is counted: {shown}")
    return Workload(reader.recording.graph(name, "pt2 file, inference"))


class _Reader:
    """Goes through the nodes in order."""

    def __init__(self) -> None:
        self.recording = Recording()
        self.unknown: set[str] = set()

    def begin(self, archive: Archive) -> None:
        """Weights, buffers, constants and inputs."""
        program = archive.module.graph
        seen: dict[object, str] = {}
        inputs: list[str] = []
        for spec in archive.module.signature.input_specs:
            found = spec.resident()
            if found is None:
                inputs += _tensor_names(spec.user_input.arg) if spec.user_input is not None else []
                continue
            kind, binding = found
            title = binding.parameter_name or binding.buffer_name or binding.tensor_constant_name
            value = _describe_tensor(program, binding.arg.name)
            path, size = archive.stored.get(title, (None, 0))
            look = path, value
            if path is not None and look in seen:  # tied: another name of the same weight
                self.recording.add_alias(binding.arg.name, seen[look])
                continue
            seen[look] = binding.arg.name
            module = title.rpartition(".")[0]
            self.recording.weight(
                binding.arg.name,
                value,
                title=title,
                kind=kind,
                module=module,
                storage=path,
                storage_bytes=size,
            )
        for name in inputs:
            self.recording.input(name, _describe_tensor(program, name), title=name)

    def run(self, program: Program, *, prefix: str, inner: str) -> None:
        """Every node; `prefix` goes before the names of ops, `inner` before those of a region's values."""
        for at, node in enumerate(program.nodes):
            name = node.name or next(iter(_output_names(node)), "") or f"node_{at}"
            if node.target.startswith(_HIGHER) or any(entry.arg.as_graph for entry in node.inputs):
                self._region(node, program, name, prefix, inner)
            elif not _is_size_check(node):
                self._record_node(node, program, name, prefix, inner)

    def _record_node(self, node: Node, program: Program, name: str, prefix: str, inner: str) -> None:
        target = node.target.removeprefix("torch.ops.")
        kind = _kind_of_target(target)
        reads = [inner + tensor for entry in node.inputs for tensor in _tensor_names(entry.arg)]
        tensors = [self.recording.value(tensor, prefix + name) for tensor in reads]
        makes = [(inner + output, _describe_tensor(program, output)) for output in _output_names(node)]
        others = {entry.name: _to_python(entry.arg, program) for entry in node.inputs}
        call = _aten.Call(tensors, {**others, "kind": kind}, [value for _, value in makes])
        if not target.startswith(_KNOWN) and not _aten.has_flops_rule(kind):
            self.unknown.add(target)
        changes = _aten.writes_first(kind) and bool(reads)
        views = not changes and _aten.is_view(kind, call)
        own = self._unpack_outputs(name, inner, makes)
        row = Row(
            prefix + name,
            kind,
            _module_of(node),
            tuple(reads),
            () if changes else tuple(own),
            signature=self._signature(target, node, program, inner),
            flops=count_or_refuse(lambda: _aten.flops(kind, call), f"op {name!r} ({kind})"),
            writes=tuple(reads[:1]) if changes else (),
            views=tuple(made for made, _ in own) if views else (),
            picks=kind in _aten.PICKS,
        )
        self.recording.op(row)
        if changes:
            for output, _ in makes:
                self.recording.add_alias(output, reads[0])
        elif makes != own:
            outputs, parts = [made for made, _ in makes], [made for made, _ in own]
            self._record_getitems(outputs, parts, row.module, prefix, inner)

    def _unpack_outputs(
        self, name: str, inner: str, makes: Sequence[tuple[str, Value]]
    ) -> list[tuple[str, Value]]:
        """What a node itself makes: where it gives several, nodes of their own take them out."""
        if [output for output, _ in makes] == [inner + name]:
            return list(makes)
        return [(f"{inner}{name}[{at}]\0", value) for at, (_, value) in enumerate(makes)]

    def _record_getitems(
        self, outputs: Sequence[str], parts: Sequence[str], module: str, prefix: str, inner: str
    ) -> None:
        """The nodes `getitem`, which the file leaves out: each takes one part out of what a node gives."""
        values = [self.recording.value(part, "getitem") for part in parts]
        whole = ",".join(map(str, values))
        for at, (output, part, value) in enumerate(zip(outputs, parts, values, strict=True)):
            item = Row(
                prefix + output.removeprefix(inner),
                "getitem",
                module,
                (part,),
                ((output, value),),
                signature=f"<built-in function getitem> ({whole}) {at}",
                views=(output,),
            )
            self.recording.op(item)

    def _region(self, node: Node, program: Program, name: str, prefix: str, inner: str) -> None:
        """A graph inside a node: its ops are named 'outer.inner'."""
        kind = _kind_of_target(node.target.removeprefix("torch.ops."))
        graphs = [entry.arg.as_graph for entry in node.inputs if entry.arg.as_graph is not None]
        if kind not in _REGIONS or len(graphs) != 1:
            raise FormatError(
                f"op {prefix + name!r} is {node.target}, whose work depends on values; export the model"
                " without such control flow, or capture it"
            )
        body, own = graphs[0].graph, f"{inner}{name}\0"
        at = next(at for at, entry in enumerate(node.inputs) if entry.arg.as_graph is not None)
        given = [tensor for entry in node.inputs[at + 1 :] for tensor in _tensor_names(entry.arg)]
        wanted = [tensor for entry in body.inputs for tensor in _tensor_names(entry)]
        if len(given) != len(wanted):
            raise FormatError(
                f"op {prefix + name!r} hands {len(given)} tensors to a graph of {len(wanted)};"
                " the file is broken"
            )
        for ours, theirs in zip(given, wanted, strict=True):
            self.recording.value(inner + ours, prefix + name)
            self.recording.add_alias(own + theirs, inner + ours)
        self.run(body, prefix=f"{prefix}{name}.", inner=own)
        made = [tensor for entry in body.outputs for tensor in _tensor_names(entry)]
        outputs = _output_names(node)
        if len(outputs) != len(made):
            raise FormatError(
                f"op {prefix + name!r} gives {len(outputs)} tensors, its graph {len(made)}; it is broken"
            )
        if outputs == [name]:
            self.recording.value(own + made[0], prefix + name)
            self.recording.add_alias(inner + name, own + made[0])
        else:
            parts = [own + part for part in made]
            self._record_getitems(
                [inner + output for output in outputs], parts, _module_of(node), prefix, inner
            )

    def _signature(self, target: str, node: Node, program: Program, inner: str) -> str:
        """As `capture` writes it, so that measured costs are found by it."""
        words = [target]
        for entry in node.inputs:
            asks_cudnn = entry.name in ("cudnn_enabled", "cudnn_enable")  # of the machine that exported it
            word = "True" if asks_cudnn else self._word(entry.arg, program, inner)
            words.append(f"{entry.name}={word}" if entry.kind == 2 else word)
        return " ".join(words)

    def _word(self, argument: Argument, program: Program, inner: str) -> str:
        tensors = _tensor_names(argument, absent=True)
        if tensors:
            shown = [str(self.recording.value(inner + t, "")) if t else "None" for t in tensors]
            several = argument.as_tensors is not None or argument.as_optional_tensors is not None
            return f"({','.join(shown)})" if several else shown[0]
        plain = _to_python(argument, program)
        return f"({','.join(map(str, plain))})" if isinstance(plain, list) else str(plain)


def _is_size_check(node: Node) -> bool:
    """A check of sizes, or a number taken from them."""
    return _kind_of_target(node.target.removeprefix("torch.ops.")) in _SILENT or not any(
        True for _ in _output_names(node)
    )


def _kind_of_target(target: str) -> str:
    """'linear' of aten.linear.default."""
    parts = target.split(".")
    return parts[1] if len(parts) > 2 else parts[-1]


def _output_names(node: Node) -> list[str]:
    return [tensor for output in node.outputs for tensor in _tensor_names(output)]


def _tensor_names(argument: Argument, *, absent: bool = False) -> list[str]:
    """The names of an argument's tensors; '' for one that is absent, where asked."""
    return [name for name in _iterate_tensor_names(argument) if name or absent]


def _iterate_tensor_names(argument: Argument) -> Iterator[str]:
    if argument.as_tensor is not None:
        yield argument.as_tensor.name
    for tensor in argument.as_tensors or ():
        yield tensor.name
    for nested in argument.as_nested_tensors or ():
        yield from (tensor.name for tensor in nested)
    maybes = list(argument.as_optional_tensors or ())
    if argument.as_optional_tensor is not None:
        maybes.append(argument.as_optional_tensor)
    for maybe in maybes:
        yield maybe.as_tensor.name if maybe.as_tensor is not None else ""


def _to_python(argument: Argument, program: Program) -> object:
    """What is no tensor, as Python has it."""
    if argument.as_sym_int is not None:
        return _resolve_symbol(argument.as_sym_int, program)
    if argument.as_sym_ints is not None:
        return [_resolve_symbol(symbol, program) for symbol in argument.as_sym_ints]
    if argument.as_scalar_type is not None:
        element = _TYPES.get(argument.as_scalar_type)
        return f"torch.{element.name}" if element is not None else "torch.unknown"
    if argument.as_memory_format is not None:
        return f"torch.{_FORMATS.get(argument.as_memory_format, 'unknown_format')}"
    if argument.as_layout is not None:
        return "torch.strided" if argument.as_layout == _STRIDED else "torch.sparse"
    if argument.as_device is not None:
        index = argument.as_device.index
        return argument.as_device.type + (f":{index}" if index is not None else "")
    fields = ("as_bool", "as_int", "as_float", "as_string", "as_ints", "as_floats", "as_bools")
    return next((found for field in fields if (found := getattr(argument, field)) is not None), None)


def _resolve_symbol(symbol: Symbol, program: Program) -> int | None:
    if symbol.as_name is None:
        return symbol.as_int
    known = program.sym_int_values.get(symbol.as_name)
    return known.number() if known is not None else None


def _describe_tensor(program: Program, name: str) -> Value:
    """The looks of a tensor that the file describes."""
    meta = program.tensor_values.get(name)
    if meta is None:
        raise FormatError(f"tensor {name!r} has no entry in tensor_values; the file is broken")
    element = _TYPES.get(meta.dtype)
    if element is None:
        raise FormatError(f"tensor {name!r} has element type {meta.dtype}; known: 1 to 13 and 28 to 35")
    if meta.layout != _STRIDED:
        raise FormatError(
            f"tensor {name!r} has layout {meta.layout}; only strided tensors ({_STRIDED}) are read"
        )
    shape, strides = _shape_and_strides(meta, name)
    offset = meta.storage_offset.number() or 0
    return check_size(Value(shape, element, strides, offset), f"tensor {name!r}")


def _shape_and_strides(meta: Meta, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides; strides that do not belong to the shape are refused."""
    shape = [size.number() for size in meta.sizes]
    strides = [size.number() for size in meta.strides]
    known = [length for length in shape if length is not None]
    steps = [step for step in strides if step is not None]
    if len(known) != len(shape) or len(steps) != len(strides):
        raise FormatError(f"tensor {name!r} has a size that is not known; export the model with fixed sizes")
    if len(known) != len(steps):
        raise FormatError(
            f"tensor {name!r} has {len(known)} sizes and {len(steps)} strides; the file is broken"
        )
    return tuple(known), tuple(steps)


def _module_of(node: Node) -> str:
    """The path of the innermost module a node comes from."""
    stack = node.metadata.get("nn_module_stack", "").split(";")[-1].split(",")
    return _REPEATED.sub("", stack[1]) if len(stack) > 1 else ""
