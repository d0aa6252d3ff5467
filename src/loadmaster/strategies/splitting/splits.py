"""Splits: which ops of a captured graph may be cut along the batch, by the rule table and then by probe.

Rows are followed from the inputs of the step through every forward and backward op. A tensor whose size is
a multiple of the batch is not enough: each op must have a rule that says its rows do not meet
(`rules.py`), or a probe that has seen it (`probe.py`). What rows are of a tensor is kept in memory order:
`outer` blocks, each with all rows, so that transposed views and flattened dimensions are told apart from
interleaved ones.
"""

import math
import re
from collections.abc import Callable

import numpy as np

from loadmaster.core.errors import InputError
from loadmaster.core.graph import Graph, Phase
from loadmaster.cost.signature import Signature, TensorSpec, parse_signature
from loadmaster.strategies.splitting.forms import Form, Splits
from loadmaster.strategies.splitting.rules import FULL, Arg, Call, Formed, Unsplittable, apply_rule

Probe = Callable[[Call], list[Formed] | None]
_SHAPE = re.compile(r"(?:input|param|buffer) ([a-z0-9_]+)\[([0-9,]*)\]")
_RANDOM = ("dropout", "native_dropout", "bernoulli", "rand", "randn", "rand_like", "randn_like", "normal")
_BATCH_NORM = ("batch_norm", "native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm")
PER_REPLICA_NORM = "batch norm takes its statistics from the rows of each replica, not from the whole batch"
PER_REPLICA_RANDOM = "random numbers (dropout) are drawn by each replica for its own rows"


def find_splits(graph: Graph, batch: int, *, probe: Probe | None = None) -> Splits:
    """Follow the rows of a batch through a graph."""
    if batch < 1:
        raise InputError(f"batch is {batch}; a batch has at least one row")
    return _Walk(graph, batch, probe).run()


class _Walk:
    def __init__(self, graph: Graph, batch: int, probe: Probe | None) -> None:
        self.graph, self.batch, self.probe = graph, batch, probe
        self.form = np.zeros(graph.num_tensors, dtype=np.int8)
        self.outer = np.zeros(graph.num_tensors, dtype=np.int32)
        self.splits = np.ones(graph.num_ops, dtype=np.bool_)
        self.scales = np.zeros(graph.num_ops, dtype=np.bool_)
        self.reason: dict[int, str] = {}
        self.deviations: dict[int, str] = {}
        self.outs: list[list[int]] = [[] for _ in range(graph.num_ops)]
        for tensor, op in enumerate(graph.tensor_op.tolist()):
            self.outs[op].append(tensor)
        self.ins: list[list[int]] = [[] for _ in range(graph.num_ops)]
        for tensor, op in zip(graph.use_tensor.tolist(), graph.use_op.tolist(), strict=True):
            self.ins[op].append(tensor)
        self.weight = (graph.phase[graph.tensor_op] == Phase.PARAM).tolist()
        self.parsed: dict[int, Signature | None] = {}

    def run(self) -> Splits:
        for op in range(self.graph.num_ops):
            self._visit(op)
        return Splits(
            self.batch, self.form, self.outer, self.splits, self.scales, self.reason, self.deviations
        )

    def _visit(self, op: int) -> None:
        phase, kind = self.graph.phase[op], self.graph.op_kind[op]
        if phase == Phase.PARAM or phase == Phase.UPDATE:
            return
        if kind == "input":
            return self._visit_input(op)
        touched = [t for t in self.ins[op] if self.form[t] != Form.FULL]
        name = kind.rstrip("_")
        if name in _RANDOM and self._is_random(op):
            self.deviations[op] = PER_REPLICA_RANDOM
        if not touched:
            self._visit_constant_gradient(op)
            return None
        try:
            forms = self._forms(op, touched)
        except Unsplittable as why:
            self.splits[op] = False
            self.reason[op] = str(why)
            self.deviations.pop(op, None)
            return None
        self.scales[op] = any(self.form[t] == Form.PART for t in touched)
        for tensor, (form, outer) in zip(self.outs[op], forms, strict=True):
            self.form[tensor], self.outer[tensor] = form, outer if form == Form.PART else 0
        if name in _BATCH_NORM:
            self._say_batch_norm(op)
        if name == "scaled_dot_product_attention" and self._is_random(op):
            self.deviations[op] = PER_REPLICA_RANDOM
        return None

    def _visit_input(self, op: int) -> None:
        shape = self._own_shape(op)
        for tensor in self.outs[op]:
            if shape and shape[0] == self.batch:
                self.form[tensor], self.outer[tensor] = Form.PART, 1

    def _visit_constant_gradient(self, op: int) -> None:
        """A mean's gradient is one value, whatever the rows are; spread over them it is rows all the same."""
        mirror = int(self.graph.mirror[op])
        if self.graph.phase[op] != Phase.BACKWARD or mirror < 0:
            return
        reduced = any(self.form[t] in (Form.SUM, Form.WEIGHTED) for t in self.outs[mirror])
        signature = self._signature(mirror) if reduced else None
        if signature is None:
            return
        try:
            args = self._match(mirror, signature)
        except Unsplittable:
            return
        for tensor in self.outs[op]:
            size = int(self.graph.tensor_bytes[tensor])
            for arg in args:
                if arg.form == Form.PART and _logical_bytes(arg.spec) == size:
                    outer = max(math.prod(arg.spec.shape[: arg.dim]), 1)
                    self.form[tensor], self.outer[tensor], self.scales[op] = Form.PART, outer, True
                    break

    def _own_shape(self, op: int) -> tuple[int, ...]:
        match = _SHAPE.fullmatch(self._signature_text(op))
        return tuple(int(n) for n in match[2].split(",")) if match and match[2] else ()

    def _signature_text(self, op: int) -> str:
        row = int(self.graph.signature[op])
        return self.graph.signature_table[row] if row >= 0 else ""

    def _signature(self, op: int) -> Signature | None:
        row = int(self.graph.signature[op])
        if row not in self.parsed:
            self.parsed[row] = parse_signature(self.graph.signature_table[row]) if row >= 0 else None
        return self.parsed[row]

    def _is_random(self, op: int) -> bool:
        """Whether a dropout drops anything: its share is not 0, and it trains."""
        signature = self._signature(op)
        if signature is None:
            return True
        values = [*signature.args, *signature.kwargs.values()]
        if self.graph.op_kind[op] == "scaled_dot_product_attention":
            shares = signature.args[4:5] or (signature.kwargs.get("dropout_p", 0.0),)
            return any(isinstance(v, float) and v > 0 for v in shares)
        off = any(v is False for v in values) or any(v == 0.0 and isinstance(v, float) for v in values)
        return not ("dropout" in self.graph.op_kind[op] and off)

    def _say_batch_norm(self, op: int) -> None:
        signature = self._signature(op)
        if signature is None or any(v is True for v in signature.args[:6]):
            self.deviations[op] = PER_REPLICA_NORM

    def _forms(self, op: int, touched: list[int]) -> list[Formed]:
        graph = self.graph
        if graph.op_kind[op] == "getitem":  # one of several outputs: the same memory
            return [(Form(self.form[touched[0]]), int(self.outer[touched[0]]))] * len(self.outs[op])
        signature = self._signature(op)
        if signature is None:
            raise Unsplittable("how it was called is not known, so that no rule can be applied")
        args = self._match(op, signature)
        sizes = tuple(self._elements(t, signature) for t in self.outs[op])
        call = Call(signature.op[1], signature, args, sizes, self.batch)
        forms = apply_rule(call)
        if forms is None and self.probe is not None:
            forms = self.probe(call)
        if forms is None:
            raise Unsplittable(f"there is no rule for {signature.op[1]}")
        return forms if forms else [FULL] * len(sizes)

    def _elements(self, tensor: int, signature: Signature) -> int:
        """Elements of an output: those of an argument with as many bytes, else 4 bytes each."""
        size = int(self.graph.tensor_bytes[tensor])
        for spec in signature.tensors:
            if spec.num_bytes == size:
                return math.prod(spec.shape) or 1
        masks = {math.prod(spec.shape) for spec in signature.tensors}
        return size if size in masks else max(size // 4, 1)

    def _match(self, op: int, signature: Signature) -> tuple[Arg, ...]:
        """The tensor of each argument: in order, by bytes; weights by their shape."""
        left = list(self.ins[op])
        args = []
        for spec in signature.tensors:
            tensor = self._pick(left, spec)
            if tensor is None:
                args.append(Arg(spec, Form.FULL, 0, -1, weight=False))
                continue
            left.remove(tensor)
            args.append(self._arg(tensor, spec))
        missed = [t for t in left if self.form[t] == Form.PART]
        if missed and not any(arg.form == Form.PART for arg in args):
            raise Unsplittable("what it reads of the rows is not known")
        return tuple(args)

    def _pick(self, left: list[int], spec: TensorSpec) -> int | None:
        """The tensor that an argument is, of those that are left."""
        logical, first = _logical_bytes(spec), len(left)
        shaped = [
            t for t in left if self.weight[t] and self._own_shape(int(self.graph.tensor_op[t])) == spec.shape
        ]
        plain = [t for t in left if not self.weight[t]]
        equal = [t for t in plain if self.graph.tensor_bytes[t] in (logical, spec.num_bytes)]
        wide = [t for t in plain if self._base_bytes(t) >= spec.num_bytes > logical]
        chosen = sorted(wide, key=self._base_bytes) or equal
        if shaped and (left.index(chosen[0]) if chosen else first) > left.index(shaped[0]):
            return shaped[0]
        if chosen:
            return chosen[0]
        other = [t for t in left if self._base_bytes(t) >= spec.num_bytes]
        return other[0] if other else None

    def _base_bytes(self, tensor: int) -> int:
        base = int(self.graph.tensor_storage[tensor])
        return int(max(self.graph.tensor_bytes[tensor], self.graph.tensor_bytes[base] if base >= 0 else 0))

    def _arg(self, tensor: int, spec: TensorSpec) -> Arg:
        form, outer = Form(self.form[tensor]), int(self.outer[tensor])
        if form != Form.PART:
            return Arg(spec, form, 0, -1, weight=self.weight[tensor])
        base = int(self.graph.tensor_storage[tensor])
        item = max(spec.num_bytes // max(spec.num_elements, 1), 1)
        sizes = [int(self.graph.tensor_bytes[t]) // item for t in (base, tensor) if t >= 0]
        found = [
            d
            for whole in dict.fromkeys(sizes)
            for d, (size, step) in enumerate(zip(spec.shape, spec.stride, strict=True))
            if size % self.batch == 0 and size * step * outer == whole and size > 0
        ]
        if not found:
            raise Unsplittable("the rows are interleaved with another dimension")
        return Arg(spec, form, outer, found[0], weight=False)


def _logical_bytes(spec: TensorSpec) -> int:
    """Bytes of the elements alone, whatever lies between them."""
    return math.prod(spec.shape) * (spec.num_bytes // max(spec.num_elements, 1))
