"""Estimate: the backward pass by rules from the forward pass, where autograd cannot run. Knows no torch.

What autograd holds after the forward pass is known. By rule, the backward op of an op reads

    what only that op made (a mask, statistics);
    its own output, if it is one of SAVE_OUTPUT;
    its inputs, unless it is one of SAVE_NOTHING,

as far as it is held. It makes a gradient for every input that needs one, of that input's size, or hands on
the one it got (PASS_ON, and views of the whole); a second gradient of a tensor is added to the first. What
the op made for itself has gradients as well, which are workspace. It takes the op's flops once for every
such input of a product, as both factors have a gradient.
"""

from dataclasses import dataclass, field

from loadmaster.core.graph import Phase
from loadmaster.graph.build import OWN_STORAGE
from loadmaster.graph.torch_capture.ledger import Ledger, Op

_VIEWS = """
reshape view _unsafe_view transpose t permute unsqueeze squeeze flatten to detach getitem contiguous expand
"""
_PLAIN = "add add_ sub copy_"
_OWN_OUTPUT = "softmax _softmax log_softmax _log_softmax tanh sigmoid relu relu_ exp"
_REST = """
sub_ neg cat stack sum mean clone slice select split split_with_sizes chunk _to_copy embedding dropout
native_dropout unbind adaptive_avg_pool2d avg_pool2d pad constant_pad_nd
"""
_KEPT = "sqrt rsqrt max_pool2d scaled_dot_product_attention cross_entropy_loss threshold hardtanh elu"
SAVE_OUTPUT = frozenset(f"{_OWN_OUTPUT} {_KEPT}".split())
SAVE_NOTHING = frozenset(f"{_VIEWS} {_PLAIN} {_OWN_OUTPUT} {_REST}".split())
PASS_ON = frozenset(f"{_VIEWS} {_PLAIN}".split())


@dataclass(slots=True)
class Estimate:
    """The gradients made so far, by tensor; a view's gradient is its own until it is handed to its base."""

    ledger: Ledger
    trained: set[int]  # param ops
    grads: dict[int, int] = field(default_factory=dict)
    needs_grad: set[int] = field(default_factory=set)  # tensors

    def backward(self, loss: int, op: int) -> None:
        """Backward ops for every forward op up to the one that made the loss."""
        ledger, inputs, held = self.ledger, self.ledger.inputs(), self.ledger.held()
        made: dict[int, list[int]] = {}
        readers: dict[int, set[int]] = {}
        for index, one in enumerate(ledger.tensors):
            made.setdefault(one.op, []).append(index)
        for reader, tensors in inputs.items():
            for tensor in tensors:
                readers.setdefault(self._base(tensor), set()).add(reader)
        self._find_needs(inputs, made)
        start = Op(f"{ledger.ops[op].name}.backward", "ones_like", "loss", Phase.BACKWARD, mirror=op)
        self.grads[loss] = ledger.add(start, [loss], [ledger.tensors[loss].num_bytes])[0]
        for forward in range(op, -1, -1):
            if ledger.ops[forward].phase == Phase.FORWARD:
                self._mirror(forward, inputs.get(forward, []), made.get(forward, []), held, readers)

    def _find_needs(self, inputs: dict[int, list[int]], made: dict[int, list[int]]) -> None:
        """What depends on a trained weight, in the order of the ops."""
        for index, op in enumerate(self.ledger.ops):
            depends = index in self.trained or not self.needs_grad.isdisjoint(inputs.get(index, ()))
            if depends and op.has_grad and (op.phase == Phase.FORWARD or index in self.trained):
                floating = (t for t in made.get(index, ()) if self.ledger.tensors[t].floating)
                self.needs_grad.update(floating)

    def _mirror(
        self, forward: int, inputs: list[int], made: list[int], held: set[int], readers: dict[int, set[int]]
    ) -> None:
        got = sorted({self.grads[tensor] for tensor in made if tensor in self.grads})
        wanted = [tensor for tensor in inputs if tensor in self.needs_grad]
        if not got or not wanted:
            return
        ledger, op = self.ledger, self.ledger.ops[forward]
        saved = self._saved(op.kind, inputs, made, held, readers)
        got_bytes = max(ledger.tensors[grad].num_bytes for grad in got)
        hands_on = op.kind in PASS_ON or all(ledger.tensors[t].base != OWN_STORAGE for t in made)
        passed = [t for t in wanted if hands_on and ledger.tensors[t].num_bytes == got_bytes]
        fresh = [t for t in wanted if t not in passed]
        for tensor in passed:
            self._hand_on(tensor, got[0])
        if not fresh:
            return
        sizes = [ledger.tensors[tensor].num_bytes for tensor in fresh]
        mirror = Op(
            f"{op.name}.backward",
            f"{op.kind}_backward",
            op.module,
            Phase.BACKWARD,
            mirror=forward,
            signature=f"backward of {op.signature}" if op.signature else "",
            dtype=op.dtype,
            flops=op.flops * min(2, len(wanted)),
            bytes_moved=sum(ledger.tensors[t].num_bytes for t in {*got, *saved}) + sum(sizes),
        )
        new = [t for t in fresh if t not in self.grads]
        old = [t for t in fresh if t in self.grads]
        mirror.workspace_bytes = sum(ledger.tensors[t].num_bytes for t in old)
        mirror.workspace_bytes += self._inner_bytes(made, readers)
        reads = [*got, *saved, *(self.grads[t] for t in old)]
        results = ledger.add(mirror, reads, [ledger.tensors[t].num_bytes for t in new])
        for tensor, grad in zip(new, results, strict=True):
            self.grads[tensor] = grad

    def _saved(
        self, kind: str, inputs: list[int], made: list[int], held: set[int], readers: dict[int, set[int]]
    ) -> list[int]:
        bases = {self._base(tensor) for tensor in made}
        saved = {base for base in bases if kind in SAVE_OUTPUT or not readers.get(base)}
        if kind not in SAVE_NOTHING:
            saved |= {self._base(tensor) for tensor in inputs}
        return sorted(saved & held)

    def _inner_bytes(self, made: list[int], readers: dict[int, set[int]]) -> int:
        """What the op made for itself has gradients too; two of them are there at once."""
        inner = [t for t in made if self._base(t) == t and not readers.get(t)]
        sizes = sorted(self.ledger.tensors[t].num_bytes for t in inner if self.ledger.tensors[t].floating)
        return sum(sizes[-2:])

    def _hand_on(self, tensor: int, grad: int) -> None:
        """The gradient of an input is that of the output; a second one is added into the first."""
        self.grads.setdefault(tensor, grad)

    def _base(self, tensor: int) -> int:
        base = self.ledger.tensors[tensor].base
        return tensor if base == OWN_STORAGE else base
