"""Step: weights, forward, loss, backward and updates of one training step, written into a ledger."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from loadmaster.core.errors import GraphError
from loadmaster.core.graph import Phase
from loadmaster.graph.torch_capture.estimate import Estimate
from loadmaster.graph.torch_capture.fake import FakeModel, tensors_in
from loadmaster.graph.torch_capture.ledger import Op
from loadmaster.graph.torch_capture.recorder import Recorder
from loadmaster.graph.torch_capture.update import Update, updates
from loadmaster.graph.torch_capture.words import dtype_of, signature_of, tensor_bytes

Forward = Callable[[], Any]


@dataclass(slots=True)
class Step:
    """One step of a fake model as it is written down."""

    fake: FakeModel
    recorder: Recorder
    loss: Callable[[Any], torch.Tensor] | None
    optimizer: Any
    at_once: bool = False  # torch's optimizers update all weights together
    _leaf: dict[int, int] = field(default_factory=dict)  # gradients that rules made

    def begin(self) -> dict[str, int]:
        """Weights, buffers and inputs; gives the op of every weight."""
        ops = {}
        for name, weight in self.fake.weights().items():
            ops[name] = self._resident(name, "param", weight)
        for name, buffer in self.fake.buffers().items():
            self._resident(name, "buffer", buffer)
        for name, tensor in self.fake.inputs():
            self._input(name, tensor)
        return ops

    def _resident(self, name: str, kind: str, tensor: torch.Tensor) -> int:
        size, module = tensor.untyped_storage().nbytes(), name.rpartition(".")[0]
        return self.recorder.resident(tensor, Op(name, kind, module, Phase.PARAM, resident_bytes=size))

    def _input(self, name: str, tensor: torch.Tensor) -> None:
        key, ledger = self.recorder.key(tensor), self.recorder.ledger
        op = Op(name, "input", "", Phase.FORWARD, signature=signature_of("input", [tensor], {}))
        op.dtype = dtype_of(tensor.dtype)
        if not ledger.knows(key[0]):
            ledger.open(op)
            ledger.make(key, tensor_bytes(tensor), tensor.untyped_storage().nbytes())
            ledger.close()
            self.recorder.keep(tensor)

    def forward(self, run: Forward) -> Any:
        """The model's output; its owner holds it to the end of the step."""
        out = run()
        for tensor in tensors_in(out):
            self.recorder.keep(tensor)
        return out

    def backward(self, loss: torch.Tensor) -> None:
        """The gradients of the loss, by autograd."""
        self.recorder.begin_backward(loss)
        loss.backward()
        for _, given in self.fake.inputs():
            if given.grad is not None:
                self.recorder.keep(given.grad)

    def estimate(self, loss: torch.Tensor) -> dict[str, int]:
        """The gradients of the loss, by rules; gives that of every weight that has one."""
        self.recorder.begin_backward(loss)
        Estimate(self.recorder, self._leaf).backward(loss)
        ledger, found = self.recorder.ledger, {}
        for grad in self._leaf.values():
            ledger.keep_tensor(grad)
        for name, weight in self.fake.weights().items():
            if id(weight) in self._leaf:
                found[name] = self._leaf[id(weight)]
                weight.grad = torch.empty_like(weight)
        return found

    def lost(self, out: Any) -> torch.Tensor:
        """The loss, its ops named 'loss.*' where they are not the model's."""
        self.recorder.prefix, self.recorder.module = "loss.", "loss"
        loss = loss_of(out, self.loss)
        self.recorder.keep(loss)
        return loss

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
        found = updates(self.optimizer, [weights[name] for name in trained], at_once=self.at_once)
        for name, update in zip(trained, found, strict=True):
            self._update(name, weights[name], param_op[name], update, None if grads is None else grads[name])

    def _update(
        self, name: str, weight: torch.Tensor, param: int, update: Update, estimated: int | None
    ) -> None:
        recorder, ledger = self.recorder, self.recorder.ledger
        ledger.ops[param].resident_bytes += update.state_bytes
        op = Op(
            f"{name}.update",
            "update",
            name.rpartition(".")[0],
            Phase.UPDATE,
            signature=signature_of("update", [weight], {}),
            dtype=dtype_of(weight.dtype),
            bytes_moved=update.bytes_moved,
            workspace_bytes=0 if self.at_once else update.workspace_bytes,
        )
        grad = ledger.tensor(recorder.key(weight.grad)) if estimated is None else estimated
        stays = [update.workspace_bytes] if self.at_once and update.workspace_bytes else []
        for tensor in ledger.add(op, [grad, ledger.tensor(recorder.key(weight))], stays):
            ledger.keep_tensor(tensor)
        ledger.together(len(ledger.ops) - 1, param)
        if estimated is None:
            recorder.keep(weight.grad)  # it lives until the next step begins


def loss_of(out: Any, loss: Callable[[Any], torch.Tensor] | None) -> torch.Tensor:
    """The scalar to minimise: the user's function, the output's own loss, else the mean of all outputs."""
    if loss is not None:
        found = loss(out)
        if not isinstance(found, torch.Tensor) or found.numel() != 1:
            shown = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise GraphError(f"loss gives {shown}; it must give one number")
        return found
    own = out.get("loss") if isinstance(out, dict) else getattr(out, "loss", None)
    if isinstance(own, torch.Tensor) and own.numel() == 1:
        return own
    floats = [tensor for tensor in tensors_in(out) if tensor.requires_grad]
    if not floats:
        raise GraphError(
            "nothing the model gives depends on a weight that is trained; capture it with train=False"
        )
    scalars = [leaf for leaf in floats if leaf.numel() == 1]
    if scalars:
        return scalars[0]
    total = floats[0].mean()
    for leaf in floats[1:]:
        total = total + leaf.mean()
    return total
