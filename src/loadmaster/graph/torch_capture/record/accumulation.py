"""Gradient accumulation: repeats a recorded stretch of a step, by copying.

A micro-step that adds to gradients which are there already is recorded once, the second one; the others are
copies of it. What a copy reads

    of its own micro-step is its own;
    of memory that each micro-step writes in place (a gradient, a running mean) is what the one before left;
    of the outputs of the micro-step before (Python holds them until it has new ones) is that one's;
    of anything else (weights, inputs) is the same.

All copies of an op sit on one device: it is one op of the model, run several times.
"""

from dataclasses import dataclass, field, replace

from loadmaster.core.graph import NO_MIRROR, Phase
from loadmaster.graph.build import OWN_STORAGE
from loadmaster.graph.torch_capture.record.ledger import Ledger, Tensor

MARK = "@"  # 'linear@2' is the second run of 'linear'


def micro_step_suffix(micro_step: int) -> str:
    """What the names of a micro-step end in; those of the first are the model's own."""
    return f"{MARK}{micro_step}" if micro_step > 1 else ""


@dataclass(slots=True)
class MicroStepRepeater:
    """The ops of the second micro-step, from `first` to the end of the ledger."""

    ledger: Ledger
    first: int
    follows: dict[int, int] = field(default_factory=dict)  # a tensor of the one before -> its successor

    def repeat(self, num_steps: int) -> dict[int, int]:
        """Copies up to micro-step `num_steps`; gives where each tensor of the second went in the last."""
        ledger = self.ledger
        self._tie_ops()
        for old, new in ledger.rewritten(self.first):
            self.follows.setdefault(old, new)
        end = len(ledger.ops)
        ops = [op for op in range(self.first, end) if ledger.ops[op].phase != Phase.PARAM]
        inside = set(ops)
        tensors = [at for at, one in enumerate(ledger.tensors) if one.op in inside]
        uses = [(tensor, op) for tensor, op in ledger.uses() if op in inside]
        pairs = [(one, other) for one, other in ledger.pairs() if one in inside or other in inside]
        to_op, to_tensor = {op: op for op in ops}, {tensor: tensor for tensor in tensors}
        for step in range(3, num_steps + 1):
            before = to_tensor
            to_op, to_tensor = self._ops(ops, step), {}
            self._tensors(tensors, to_op, to_tensor)
            carried = {old: before.get(new, new) for old, new in self.follows.items()}
            for tensor, op in uses:
                ledger.use(to_tensor.get(tensor, carried.get(tensor, tensor)), to_op[op])
            for one, other in pairs:
                ledger.tie(to_op.get(one, one), to_op.get(other, other))
            for op in ops:
                ledger.tie(op, to_op[op])
        ledger.redirect(to_op, to_tensor)
        return to_tensor

    def _tie_ops(self) -> None:
        """The second run of an op sits with the first."""
        ledger = self.ledger
        known = {op.name: at for at, op in enumerate(ledger.ops[: self.first])}
        for at in range(self.first, len(ledger.ops)):
            same = known.get(ledger.ops[at].name.replace(micro_step_suffix(2), ""))
            if same is not None and ledger.ops[at].phase == Phase.FORWARD:
                ledger.tie(same, at)

    def _ops(self, ops: list[int], step: int) -> dict[int, int]:
        ledger, to_op = self.ledger, dict[int, int]()
        for at in ops:
            op = ledger.ops[at]
            name = op.name.replace(micro_step_suffix(2), micro_step_suffix(step))
            name = name if name != op.name else f"{name}{micro_step_suffix(step)}"
            mirror = to_op.get(op.mirror, op.mirror) if op.mirror != NO_MIRROR else NO_MIRROR
            to_op[at] = ledger.make_copy(replace(op, name=name, mirror=mirror))
        return to_op

    def _tensors(self, tensors: list[int], to_op: dict[int, int], to_tensor: dict[int, int]) -> None:
        ledger = self.ledger
        for at in tensors:
            to_tensor[at] = len(ledger.tensors) + len(to_tensor)
        made = []
        for at in tensors:
            one = ledger.tensors[at]
            base = OWN_STORAGE if one.base == OWN_STORAGE else to_tensor.get(one.base, one.base)
            made.append(Tensor(to_op[one.op], one.num_bytes, base, one.floating))
        ledger.tensors += made
