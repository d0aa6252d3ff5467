"""Step graph: the Graph of an optimised step: ops, tensors, weights, phases, mirrors and ties."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import tensorflow as tf
from loadmaster.core.graph import NO_GROUP, NO_STORAGE, Dtype, Graph, Phase
from loadmaster.graph.build import OWN_STORAGE, GraphBuilder
from loadmaster.graph.tf_capture.loops import is_control_flow, list_bytes, loop_work
from loadmaster.graph.tf_capture.op_work import (
    VIEWS,
    elements,
    has_free_shape,
    is_known,
    op_bytes,
    op_flops,
    tensor_bytes,
)
from loadmaster.graph.tf_capture.optimised import OptimisedStep, import_shapes
from loadmaster.graph.tf_capture.phases import find_mirrors, find_phases, is_gradient, writers_before
from loadmaster.graph.tf_capture.signatures import input_signature, op_signature
from loadmaster.graph.tf_capture.ties import find_ties
from loadmaster.graph.tf_capture.weights import find_slots, writes_variable

INPUT, VARIABLE, CONSTANT = "input", "variable", "Const"
_DTYPES = {
    "float32": Dtype.FLOAT32,
    "float16": Dtype.FLOAT16,
    "bfloat16": Dtype.BFLOAT16,
    "float64": Dtype.FLOAT64,
    "int8": Dtype.INT8,
    "uint8": Dtype.INT8,
    "int32": Dtype.INT32,
    "int64": Dtype.INT64,
    "bool": Dtype.BOOL,
}
_ALIASES = VIEWS - {
    "Const",
    "Placeholder",
    "VarHandleOp",
    "Shape",
    "ShapeN",
    "Rank",
    "Size",
    "VariableShape",
    "NoOp",
    "IdentityN",
}
_MOST_NAMES = 5


def build_step_graph(step: OptimisedStep, *, name: str, capture: str) -> Graph:
    """The Graph of a step, for arguments of the sizes that it was traced with."""
    flat = [spec for spec in tf.nest.flatten(step.traced.specs) if spec is not None]
    graph = import_shapes(step, flat)
    return _Writer(step, graph, name, capture).write()


class _Writer:
    """Writes one graph down."""

    def __init__(self, step: OptimisedStep, graph: Any, name: str, capture: str) -> None:
        self._step, self._library = step, _open_library(step.graph_def)
        self._ops = _live_ops(graph.get_operations(), step)
        writes = {op.name: writes_variable(op) for op in self._ops}
        self._writes = writes
        self._phases = find_phases(self._ops, writes)
        self._mirrors = find_mirrors(self._ops, self._phases)
        self._handles = {
            held.node: (tuple(held.variable.shape.as_list()), held.variable.dtype.name)
            for held in step.captured
            if held.variable is not None
        }
        self._slots = find_slots(self._ops, self._handles, self._phases)
        self._groups = find_ties(self._ops, list(self._slots.items()))
        self._builder = GraphBuilder(name, capture=capture)
        self._index: dict[str, int] = {}
        self._tensors: dict[str, int] = {}
        self._storage: dict[str, int] = {}
        self._lists: dict[str, int] = {}
        self._order: dict[str, int] = {}  # a writing op -> a tensor of no bytes
        self._outputs = set(step.outputs)
        self._unknown: Counter[str] = Counter()
        self._free: list[str] = []
        self._loops: list[str] = []

    def write(self) -> Graph:
        held = {one.node: one for one in self._step.captured}
        for op in self._ops:
            if op.name in held:
                self._write_captured(op, held[op.name])
            elif op.name in self._step.args:
                self._write_input(op)
            elif op.type != "NoOp":
                self._write_op(op)
        for name, mirror in self._mirrors.items():
            self._mirror(name, mirror)
        found = self._builder.build()
        return replace(found, notes=tuple(self._make_notes()))

    def _mirror(self, name: str, mirror: str) -> None:
        if name in self._index and mirror in self._index:
            at = self._index[name]
            row = self._builder._ops[at]
            self._builder._ops[at] = (*row[:4], self._index[mirror], *row[5:])

    def _write_captured(self, op: Any, held: Any) -> None:
        """A variable, with the slots beside it; or a constant from outside."""
        if op.name in self._slots:
            return
        variable = held.variable
        num_bytes = _variable_bytes(variable) if variable is not None else tensor_bytes(op.outputs[0])
        slots = [slot for slot, weight in self._slots.items() if weight == op.name]
        of = {one.node: one.variable for one in self._step.captured}
        resident = num_bytes + sum(_variable_bytes(of[slot]) for slot in slots)
        dtype = variable.dtype.name if variable is not None else op.outputs[0].dtype.name
        at = self._builder.op(
            op.name,
            kind=VARIABLE if variable is not None else CONSTANT,
            module=_module_of(variable, op.name),
            phase=Phase.PARAM,
            group=self._groups.get(op.name, NO_GROUP),
            dtype=_DTYPES.get(dtype, Dtype.FLOAT32),
            resident_bytes=resident,
        )
        tensor = self._builder.tensor(at, num_bytes)
        for name in (op.name, *slots):
            self._index[name] = at
            self._tensors[f"{name}:0"] = self._storage[f"{name}:0"] = tensor

    def _write_input(self, op: Any) -> None:
        out = op.outputs[0]
        at = self._builder.op(
            op.name,
            kind=INPUT,
            group=self._groups.get(op.name, NO_GROUP),
            signature=input_signature(out),
            dtype=_DTYPES.get(out.dtype.name, Dtype.FLOAT32),
        )
        self._index[op.name] = at
        self._add_output(at, out, tensor_bytes(out), None)

    def _write_op(self, op: Any) -> None:
        flops, moved, sizes = self._work_of(op)
        constant = op.type == CONSTANT
        at = self._builder.op(
            op.name,
            kind=op.type,
            module=_scope_of(op.name),
            phase=self._phases[op.name],
            group=self._groups.get(op.name, NO_GROUP),
            signature=op_signature(op),
            dtype=_dtype_of(op),
            flops=flops,
            bytes_moved=moved,
            resident_bytes=sum(sizes) if constant else 0,
        )
        self._index[op.name] = at
        for tensor in op.inputs:
            self._builder.use(self._tensors[tensor.name], at)
        for before in writers_before(op, self._writes):
            if before.name in self._order:
                self._builder.use(self._order[before.name], at)
        for out, size in zip(op.outputs, sizes, strict=True):
            base = NO_STORAGE if constant else None
            if op.type in _ALIASES and op.inputs and op.inputs[0].name in self._storage:
                base = self._storage[op.inputs[0].name]
            self._add_output(at, out, size, base)
        if self._writes[op.name]:
            self._order[op.name] = self._builder.tensor(at, 0)

    def _add_output(self, at: int, out: Any, num_bytes: int, base: int | None) -> None:
        keep = out.name in self._outputs
        storage = OWN_STORAGE if base is None else base
        tensor = self._builder.tensor(at, num_bytes, storage=storage, keep=keep)
        self._tensors[out.name] = tensor
        self._storage[out.name] = tensor if base is None else base

    def _work_of(self, op: Any) -> tuple[float, int, list[int]]:
        """Flops, bytes moved, and the bytes of each result."""
        if is_control_flow(op):
            found = loop_work(op, self._library, self._lists)
            self._loops.append(f"{op.name} ({op.type}{_describe_turns(op, found.turns)})")
            for out, size in zip(op.outputs, found.output_bytes, strict=True):
                self._lists[out.name] = size
            return found.flops, found.bytes_moved, list(found.output_bytes)
        if not is_known(op.type):
            self._unknown[op.type] += 1
        if any(has_free_shape(out) for out in op.outputs):
            self._free.append(op.name)
        sizes = [tensor_bytes(out) for out in op.outputs]
        for place, out in enumerate(op.outputs):
            if out.dtype == tf.variant:
                sizes[place] = self._lists[out.name] = list_bytes(op) or max(
                    (self._lists.get(tensor.name, 0) for tensor in op.inputs), default=0
                )
        moved = op_bytes(op)
        if self._writes[op.name]:
            moved += self._written_bytes(op)
        return op_flops(op), moved, sizes

    def _written_bytes(self, op: Any) -> int:
        """Reading and writing what a handle names."""
        total = 0
        for tensor in op.inputs:
            if tensor.op.name in self._handles:
                shape, dtype = self._handles[tensor.op.name]
                times = 1 if op.type == "AssignVariableOp" else 2
                rows = (
                    elements(op.inputs[-1]) if "Scatter" in op.type else int(np.prod([n or 1 for n in shape]))
                )
                total += times * rows * tf.as_dtype(dtype).size
        return total

    def _make_notes(self) -> list[str]:
        notes = []
        if self._loops:
            more = f" and {len(self._loops) - _MOST_NAMES} more" if len(self._loops) > _MOST_NAMES else ""
            notes.append(f"control flow is kept as one op each: {', '.join(self._loops[:_MOST_NAMES])}{more}")
        if self._unknown:
            kinds = ", ".join(f"{kind} ({count})" for kind, count in sorted(self._unknown.items()))
            notes.append(
                f"{sum(self._unknown.values())} ops of types without a flop rule are costed by bytes: {kinds}"
            )
        if self._free:
            more = f" and {len(self._free) - 1} more" if len(self._free) > 1 else ""
            notes.append(f"the size of {self._free[0]}{more} depends on values; a free axis is counted as 1")
        return notes


def _describe_turns(op: Any, turns: int | None) -> str:
    if "While" not in op.type:
        return ""
    return ", turns not known, counted once" if turns is None else f", {turns} turn{'s' * (turns != 1)}"


def _live_ops(ops: Sequence[Any], step: OptimisedStep) -> list[Any]:
    """Ops in topological order, without those that nothing needs."""
    needed: set[str] = {name.split(":")[0] for name in step.outputs} | set(step.args)
    place = step.order | {name: at - len(step.args) for at, name in enumerate(step.args)}  # arguments first
    ordered = _sort(sorted(ops, key=lambda op: (place.get(op.name, len(place)), op.name)))
    for op in reversed(ordered):
        if op.name in needed or (op.op_def.is_stateful and op.type not in ("VarHandleOp", "ReadVariableOp")):
            needed.add(op.name)
            needed.update(tensor.op.name for tensor in op.inputs)
            needed.update(before.name for before in op.control_inputs)
    return [op for op in ordered if op.name in needed]


def _sort(ops: Sequence[Any]) -> list[Any]:
    """Topological order, also over control edges."""
    done: set[str] = set()
    found: list[Any] = []
    for start in ops:
        stack: list[tuple[Any, bool]] = [(start, False)]
        while stack:
            op, ready = stack.pop()
            if op.name in done:
                continue
            if ready:
                done.add(op.name)
                found.append(op)
                continue
            stack.append((op, True))
            before = [*(tensor.op for tensor in op.inputs), *op.control_inputs]
            stack += [(one, False) for one in reversed(before) if one.name not in done]
    return found


def _open_library(graph_def: Any) -> dict[str, Any]:
    return {function.signature.name: function for function in graph_def.library.function}


def _variable_bytes(variable: Any) -> int:
    return int(np.prod([size or 1 for size in variable.shape.as_list()], dtype=np.int64)) * int(
        variable.dtype.size
    )


def _dtype_of(op: Any) -> Dtype:
    """What it computes in: its first floating-point tensor, else its first."""
    tensors = [*op.outputs, *op.inputs]
    names = [tensor.dtype.name for tensor in tensors if tensor.dtype.name in _DTYPES]
    floats = [name for name in names if "float" in name]
    return _DTYPES[(floats or names or ["float32"])[0]]


def _scope_of(name: str) -> str:
    """The module of an op: its scope, without the tape's."""
    scope = name.rpartition("/")[0]
    for prefix in ("gradient_tape/", "gradients/"):
        scope = scope.removeprefix(prefix)
    if is_gradient(name) and scope.count("/") > 1:
        scope = scope.rpartition("/")[0] if scope.rpartition("/")[2][:1].isupper() else scope
    return scope.replace("/", ".")


def _module_of(variable: Any, node: str) -> str:
    return _scope_of(node.removesuffix("/resource")).removesuffix(".ReadVariableOp").removesuffix(".Cast")
