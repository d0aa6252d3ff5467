"""Tape: record a forward pass op by op, and derive the backward pass and the updates.

Reverse-mode differentiation on shapes alone. Every forward op made by `apply` gets one backward
op that mirrors it, in reverse order; it reads the gradients that the backward ops of its
consumers made, and what it saved. Several gradients of one tensor stay separate tensors, summed
inside the op that reads them; only those of a parameter that is used twice are summed by an op
of their own, so that its update reads one tensor.
"""

import math
from dataclasses import dataclass

from loadmaster.core.graph import NO_GROUP, NO_MIRROR, Dtype, Graph, Phase
from loadmaster.graph.build import OWN_STORAGE, GraphBuilder

UPDATE_FLOPS_PER_ELEMENT = 12  # an Adam-like optimizer
UPDATE_TOUCHES = 7  # reads weight, gradient and two moments; writes all but the gradient


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the forward pass."""

    tensor: int
    shape: tuple[int, ...]
    dtype: Dtype
    needs_grad: bool = True

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Elements times their size."""
        return self.num_elements * self.dtype.itemsize

    def __str__(self) -> str:
        """As a signature writes it: 'float32[8,1024,768]'."""
        return f"{self.dtype.name.lower()}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class _Record:
    """What is needed to make the backward op of a forward op."""

    op: int
    name: str
    kind: str
    module: str
    inputs: tuple[Value, ...]
    output: Value
    saved: tuple[Value, ...]
    through: tuple[Value, ...]
    flops: float


class Tape:
    """Records a forward pass and finishes it into a training step.

    A group is named by the index of its first op: a forward op with its backward op, a parameter
    with its update.
    """

    def __init__(self, name: str) -> None:
        self._builder = GraphBuilder(name, capture="generated")
        self._num_ops = 0
        self._base: list[int] = []  # [T] storage of each tensor
        self._bytes: list[int] = []  # [T]
        self._records: list[_Record] = []
        self._params: list[tuple[int, str, str, Value]] = []
        self._grads: dict[int, list[int]] = {}  # gradients made so far for a forward tensor

    def param(self, name: str, shape: tuple[int, ...], *, module: str, dtype: Dtype) -> Value:
        """A parameter: an op without time, where its weight is resident, whose output is that weight."""
        value = Value(len(self._base), shape, dtype)
        op = self._add_op(
            name,
            "param",
            module,
            Phase.PARAM,
            (value,),
            group=self._num_ops,
            resident_bytes=value.num_bytes,
        )
        self._tensor(op, value.num_bytes)
        self._params.append((op, name, module, value))
        return value

    def constant(self, name: str, shape: tuple[int, ...], *, dtype: Dtype) -> Value:
        """An input or a buffer, without gradient."""
        value = Value(len(self._base), shape, dtype, needs_grad=False)
        op = self._add_op(name, "input", "", Phase.FORWARD, (value,))
        self._tensor(op, value.num_bytes)
        return value

    def apply(
        self,
        kind: str,
        inputs: tuple[Value, ...],
        shape: tuple[int, ...],
        *,
        module: str,
        name: str = "",
        flops: float = 0.0,
        backward_flops: float = 0.0,
        read_bytes: int | None = None,
        saved: tuple[Value, ...] = (),
        save_output: bool = False,
        save_mask: bool = False,
        through: tuple[Value, ...] = (),
        view: bool = False,
        keep: bool = False,
    ) -> Value:
        """Add a forward op to the tape.

        Its backward op hands the gradient of the output on to the inputs `through` as it is, and
        makes one for every other input that needs it. `save_mask` adds a mask of the output's
        shape, made forward and read backward. A `view` shares its first input's storage. What is
        read is all inputs unless `read_bytes` says less.
        """
        dtype = next(value.dtype for value in inputs if value.needs_grad)
        full_name = f"{module}.{name or kind}"
        output = Value(len(self._base), shape, dtype)
        written = 0 if view else output.num_bytes + save_mask * output.num_elements
        if read_bytes is None:
            read_bytes = 0 if view else sum(value.num_bytes for value in inputs)
        op = self._add_op(
            full_name,
            kind,
            module,
            Phase.FORWARD,
            inputs,
            group=self._num_ops,
            flops=flops,
            bytes_moved=read_bytes + written,
            dtype=dtype,
        )
        self._tensor(op, output.num_bytes, view_of=inputs[0].tensor if view else OWN_STORAGE, keep=keep)
        for value in inputs:
            self._builder.use(value.tensor, op)
        if save_output:
            saved = (*saved, output)
        if save_mask:
            mask = Value(len(self._base), shape, Dtype.BOOL, needs_grad=False)
            self._tensor(op, mask.num_bytes)
            saved = (*saved, mask)
        self._records.append(
            _Record(op, full_name, kind, module, inputs, output, saved, through, backward_flops)
        )
        return output

    def finish(self, loss: Value) -> Graph:
        """The training step that minimises `loss`."""
        self._grads[loss.tensor] = [loss.tensor]  # autograd starts from the loss itself
        for record in reversed(self._records):
            self._backward(record)
        for op, name, module, value in self._params:
            self._update(op, name, module, value)
        return self._builder.build()

    def _backward(self, record: _Record) -> None:
        parts = self._grads[record.output.tensor]
        made = [value for value in record.inputs if value.needs_grad and value not in record.through]
        alias = bool(record.through) and len(parts) == 1
        size = record.output.dtype.itemsize
        # parts that overlap must be added up; the parts of slices lie side by side
        adds = max(0, sum(self._bytes[part] for part in parts) - record.output.num_bytes) // size
        read = {*parts, *(value.tensor for value in record.saved)}
        moved = sum(self._bytes[tensor] for tensor in read) + sum(value.num_bytes for value in made)
        moved += record.output.num_bytes if record.through and not alias else 0
        op = self._add_op(
            f"{record.name}.backward",
            f"{record.kind}_backward",
            record.module,
            Phase.BACKWARD,
            record.inputs,
            mirror=record.op,
            group=record.op,
            flops=record.flops + adds,
            bytes_moved=0 if alias and not made else moved,
            dtype=record.output.dtype,
        )
        for tensor in sorted(read):
            self._builder.use(tensor, op)
        if record.through:
            grad = self._tensor(op, record.output.num_bytes, view_of=parts[0] if alias else OWN_STORAGE)
            for value in record.through:
                self._grads.setdefault(value.tensor, []).append(grad)
        for value in made:
            self._grads.setdefault(value.tensor, []).append(self._tensor(op, value.num_bytes))

    def _update(self, param: int, name: str, module: str, value: Value) -> None:
        grad = self._add_gradient_sum(param, name, module, value)
        op = self._add_op(
            f"{name}.update",
            "update",
            module,
            Phase.UPDATE,
            (value,),
            group=param,
            flops=UPDATE_FLOPS_PER_ELEMENT * value.num_elements,
            bytes_moved=UPDATE_TOUCHES * value.num_bytes,
        )
        self._builder.use(grad, op)
        self._builder.use(value.tensor, op)

    def _add_gradient_sum(self, param: int, name: str, module: str, value: Value) -> int:
        """The one gradient of a parameter."""
        parts = self._grads[value.tensor]
        if len(parts) == 1:
            return parts[0]
        op = self._add_op(
            f"{name}.grad_sum",
            "grad_sum",
            module,
            Phase.BACKWARD,
            (value,) * len(parts),
            group=param,
            flops=(len(parts) - 1) * value.num_elements,
            bytes_moved=(len(parts) + 1) * value.num_bytes,
        )
        for part in parts:
            self._builder.use(part, op)
        return self._tensor(op, value.num_bytes)

    def _add_op(
        self,
        name: str,
        kind: str,
        module: str,
        phase: Phase,
        signed: tuple[Value, ...],
        *,
        group: int = NO_GROUP,
        mirror: int = NO_MIRROR,
        flops: float = 0.0,
        bytes_moved: int = 0,
        resident_bytes: int = 0,
        dtype: Dtype | None = None,
    ) -> int:
        self._num_ops += 1
        return self._builder.op(
            name,
            kind=kind,
            module=module,
            phase=phase,
            mirror=mirror,
            group=group,
            signature=" ".join([kind, *map(str, signed)]),
            dtype=signed[0].dtype if dtype is None else dtype,
            flops=float(flops),
            bytes_moved=bytes_moved,
            resident_bytes=resident_bytes,
        )

    def _tensor(self, op: int, num_bytes: int, *, view_of: int = OWN_STORAGE, keep: bool = False) -> int:
        base = OWN_STORAGE if view_of == OWN_STORAGE else self._base[view_of]
        tensor = self._builder.tensor(op, num_bytes, storage=base, keep=keep)
        self._base.append(tensor if base == OWN_STORAGE else base)
        self._bytes.append(num_bytes)
        return tensor
