"""Step: weights, forward, loss, backward and updates of one training step, written into a ledger."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from loadmaster.core.graph import Phase
from loadmaster.graph.torch_capture.paths.backward_estimate import Estimate
from loadmaster.graph.torch_capture.paths.optimizer_update import Update, measure_updates
from loadmaster.graph.torch_capture.record.ledger import Op
from loadmaster.graph.torch_capture.record.recorder import Recorder
from loadmaster.modules.fake_model import FakeModel
from loadmaster.modules.loss import compute_loss
from loadmaster.modules.op_signature import dtype_of, signature_of
from loadmaster.modules.op_work import tensor_bytes
from loadmaster.modules.tensor_trees import find_tensors

Forward = Callable[[], Any]
SCALE = "grad_scaler.scale"
FLAG_BYTES = 4


@dataclass(slots=True)
class Step:
    """One step of a fake model as it is written down."""

    fake: FakeModel
    recorder: Recorder
    loss: Callable[[Any], torch.Tensor] | None
    optimizer: Any
    at_once: bool = False  # torch's optimizers update all weights together
    num_micro: int = 1  # forward and backward passes before the update
    scale: torch.Tensor | None = None  # what a loss in 16 bits is multiplied by
    follows: dict[int, int] = field(default_factory=dict)  # output of a micro-step -> that of the next
    _outputs: list[int] = field(default_factory=list)  # storages
    _held: Any = None
    _leaf: dict[int, int] = field(default_factory=dict)  # gradients that rules made

    def begin(self) -> dict[str, int]:
        """Weights, buffers and inputs; gives the op of every weight."""
        ops = {}
        for name, weight in self.fake.weights().items():
            ops[name] = self._resident(name, "param", weight)
        for name, buffer in self.fake.buffers().items():
            self._resident(name, "buffer", buffer)
        for name, tensor in self.fake.inputs():
            self._add_input(name, tensor)
        if self.scale is not None:
            self._add_input(SCALE, self.scale)
        return ops

    def _resident(self, name: str, kind: str, tensor: torch.Tensor) -> int:
        size, module = tensor.untyped_storage().nbytes(), name.rpartition(".")[0]
        return self.recorder.resident(tensor, Op(name, kind, module, Phase.PARAM, resident_bytes=size))

    def _add_input(self, name: str, tensor: torch.Tensor) -> None:
        key, ledger = self.recorder.key(tensor), self.recorder.ledger
        op = Op(name, "input", "", Phase.FORWARD, signature=signature_of("input", [tensor], {}))
        op.dtype = dtype_of(tensor.dtype)
        if not ledger.knows(key[0]):
            ledger.open(op)
            ledger.make(key, tensor_bytes(tensor), tensor.untyped_storage().nbytes())
            ledger.close()
            self.recorder.keep(tensor)

    def forward(self, run: Forward) -> Any:
        """The model's output; its owner holds it to the end of the step, or until there is a new one."""
        out = run()
        self.recorder.answers.leave_forward()
        ledger, made = self.recorder.ledger, [self.recorder.key(tensor)[0] for tensor in find_tensors(out)]
        last = len(ledger.ops) - 1
        for old, new in zip(self._outputs, made, strict=False):
            ledger.use(ledger.base(old), last)
            self.follows[ledger.base(old)] = ledger.base(new)
        self._outputs, self._held = made, out
        return out

    def keep_outputs(self) -> None:
        """What the model gave last is there to the end of the step."""
        for storage in self._outputs:
            self.recorder.ledger.keep(storage)

    def keep_caches(self) -> None:
        """What the model holds beyond its outputs, its step being over."""
        self._held = None
        self.recorder.keep_caches()

    def backward(self, loss: torch.Tensor) -> None:
        """The gradients of the loss, by autograd."""
        self.recorder.begin_backward(loss)
        if loss.numel() == 1:
            start = torch.ones_like(loss, memory_format=torch.preserve_format)
            self.recorder.keep(start)  # `backward` holds it to its end
            loss.backward(start)
        else:
            loss.backward()  # which says what is wrong
        for _, given in self.fake.inputs():
            if given.grad is not None:
                self.recorder.keep(given.grad)

    def estimate(self, loss: torch.Tensor) -> None:
        """The gradients of the loss, by rules."""
        self.recorder.begin_backward(loss)
        self.recorder.estimating = True
        before = dict(self._leaf)
        Estimate(self.recorder, self._leaf).backward(loss)
        for leaf, grad in self._leaf.items():
            if leaf not in before:
                self.recorder.ledger.keep_tensor(grad)
            else:
                self.follows[before[leaf]] = grad

    def collect_estimated(self, moved: dict[int, int]) -> dict[str, int]:
        """The gradient of every weight that rules gave one; `moved` says where tensors went."""
        found = {}
        for name, weight in self.fake.weights().items():
            if id(weight) in self._leaf:
                found[name] = moved.get(self._leaf[id(weight)], self._leaf[id(weight)])
                weight.grad = torch.empty_like(weight)
        return found

    def compute_loss(self, out: Any) -> torch.Tensor:
        """The loss, its ops named 'loss.*' where they are not the model's."""
        self.recorder.prefix, self.recorder.module = "loss.", "loss"
        loss = compute_loss(out, self.loss)
        self.recorder.keep(loss)
        loss = loss / self.num_micro if self.num_micro > 1 else loss
        return loss * self.scale if self.scale is not None else loss

    def update(self, param_op: dict[str, int], grads: dict[str, int] | None = None) -> None:
        """One op per weight that has a gradient; `grads` are those that rules made."""
        weights = self.fake.weights()
        trained = [name for name, weight in weights.items() if weight.grad is not None]
        if not trained:
            return
        if self.optimizer is None:
            for name in trained if grads is None else ():
                self.recorder.keep(weights[name].grad)
            return
        answers = self.recorder.answers
        found = measure_updates(
            self.optimizer, [weights[name] for name in trained], at_once=self.at_once, answers=answers
        )
        made = {name: self._grad(weights[name]) if grads is None else grads[name] for name in trained}
        checked = None
        if self.scale is not None:
            made, checked = self._unscale_grads(made, param_op)
        for name, update in zip(trained, found, strict=True):
            reads = [made[name], *([checked] if checked is not None else [])]
            self._update(name, weights[name], param_op[name], update, reads)

    def _grad(self, weight: torch.Tensor) -> int:
        """The gradient's tensor, which lives until the next step begins."""
        assert weight.grad is not None, "it is trained"
        self.recorder.keep(weight.grad)
        return self.recorder.ledger.tensor(self.recorder.key(weight.grad))

    def _unscale_grads(self, grads: dict[str, int], param_op: dict[str, int]) -> tuple[dict[str, int], int]:
        """Every gradient divided by the scale, in place, and one answer to whether all are finite."""
        ledger, made, flags = self.recorder.ledger, {}, []
        assert self.scale is not None, "there is a scale"
        scale = ledger.tensor(self.recorder.key(self.scale))
        for name, grad in grads.items():
            size, module = ledger.tensors[grad].num_bytes, name.rpartition(".")[0]
            op = Op(f"{name}.unscale", "unscale", module, Phase.UPDATE, bytes_moved=2 * size)
            made[name] = ledger.add_into(op, [grad, scale], grad)
            flags.append(ledger.output(FLAG_BYTES))
            ledger.tie(len(ledger.ops) - 1, param_op[name])
        check = Op("grad_scaler.check", "inf_check", "", Phase.UPDATE, bytes_moved=FLAG_BYTES * len(flags))
        checked = ledger.add(check, flags, [FLAG_BYTES])[0]
        ledger.tie(len(ledger.ops) - 1, param_op[next(iter(grads))])
        return made, checked

    def _update(self, name: str, weight: torch.Tensor, param: int, update: Update, reads: list[int]) -> None:
        recorder, ledger = self.recorder, self.recorder.ledger
        ledger.ops[param].resident_bytes += update.state_bytes
        op = Op(
            f"{name}.update",
            update.kind,
            name.rpartition(".")[0],
            Phase.UPDATE,
            signature=signature_of("update", [weight], {}),
            dtype=dtype_of(weight.dtype),
            bytes_moved=update.bytes_moved,
            workspace_bytes=0 if self.at_once else update.workspace_bytes,
        )
        stays = [update.workspace_bytes] if self.at_once and update.workspace_bytes else []
        for tensor in ledger.add(op, [*reads, ledger.tensor(recorder.key(weight))], stays):
            ledger.keep_tensor(tensor)
        ledger.tie(len(ledger.ops) - 1, param)
