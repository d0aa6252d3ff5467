"""Verify: loss and gradients of a placed model against the unplaced one, and the op where they first part.

Three runs of one batch with one seed: the model itself, its exported graph on the CPU (every op's value and
gradient noted), and the placed graph, each op of which is compared as it runs. Buffers and random numbers are
as before when it ends, and no gradient of the user's is touched.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map_only

from loadmaster.core.errors import InputError
from loadmaster.graph.torch_capture.step import loss_of
from loadmaster.runtime.engine import Engine, Ready
from loadmaster.runtime.facts import entered
from loadmaster.runtime.program import Program
from loadmaster.runtime.rewrite import COPY

RELATIVE = 1e-5
_OF_LARGEST = 1e-7  # a difference this small beside the largest element is rounding
_SHOWN = 3

Loss = Callable[[Any], torch.Tensor]
Values = dict[fx.Node, list[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Verification:
    """What came of comparing."""

    loss: float
    reference_loss: float
    gradients: dict[str, float]  # largest difference of each weight's gradient
    finding: str  # the first op that differs and how, '' = none

    @property
    def ok(self) -> bool:
        """Whether the numbers are the model's."""
        return not self.finding

    def __str__(self) -> str:
        """A few lines: the finding, and the weights that differ most."""
        worst = sorted(self.gradients.items(), key=lambda item: -item[1])[:_SHOWN]
        shown = ", ".join(f"{name} {difference:.3g}" for name, difference in worst)
        head = self.finding or "same numbers as the unplaced model"
        return (
            f"{head}\nloss {self.loss:.9g}, unplaced {self.reference_loss:.9g};"
            f" largest differences of gradients: {shown}"
        )


def verification(
    engine: Engine,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    loss: Loss | None,
    seed: int = 0,
) -> Verification:
    """Compare one batch."""
    ready, leaves = engine.ready(args, kwargs)
    own, own_grads = _unplaced(engine, args, kwargs, loss, seed)
    noted = _noted(engine, ready, leaves, loss, seed)
    watcher = _Watcher(engine, ready, noted)
    weights = {name: weight for name, weight in engine.model.named_parameters() if weight.requires_grad}
    with _restored(engine, seed), torch.enable_grad():
        out = engine.run(ready, leaves, watcher)
        placed = loss_of(out, loss)
        grads = torch.autograd.grad(placed, list(weights.values()), allow_unused=True)
    found = dict(zip(weights, grads, strict=True))
    differences = {name: _distance(own_grads[name], grad) for name, grad in found.items()}
    finding = watcher.finding() or _left_over(own, placed, own_grads, found)
    return Verification(placed.item(), own.item(), differences, finding)


def _left_over(
    own: torch.Tensor, placed: torch.Tensor, own_grads: Mapping[str, Any], grads: Mapping[str, Any]
) -> str:
    """A difference that no op explains: the exported graph is not what the model computes."""
    if not _same(own.detach(), placed.detach()):
        return "the loss differs, but no op does: the exported graph is not the model's own forward"
    for name, grad in grads.items():
        if not _same(own_grads[name], grad):
            return f"the gradient of weight {name!r} differs, but no op's does"
    return ""


def _unplaced(
    engine: Engine, args: Any, kwargs: Mapping[str, Any], loss: Loss | None, seed: int
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Loss and gradients of the model itself, on copies of its weights on the CPU."""
    weights, tensors = _copies(engine)
    given = tree_map_only(torch.Tensor, _on_host, (args, dict(kwargs)))
    before, engine.model.training = engine.model.training, engine.root.training
    try:
        with _restored(engine, seed), torch.enable_grad():
            out = torch.func.functional_call(engine.model, tensors, given[0], given[1])
            found = loss_of(out, loss)
            grads = torch.autograd.grad(found, list(weights.values()), allow_unused=True)
    finally:
        engine.model.training = before
    return found, dict(zip(weights, grads, strict=True))


def _noted(engine: Engine, ready: Ready, leaves: list[Any], loss: Loss | None, seed: int) -> "_Notes":
    """Every op's value and gradient, of the graph as it was exported."""
    _, tensors = _copies(engine)
    flat = []
    for node in ready.program.inputs:
        slot = node.meta["slot"]
        value = slot.value if slot.kind == "constant" else None
        value = tensors[slot.name] if slot.kind == "weight" else value
        flat.append(_on_host(leaves[slot.place]) if slot.kind == "input" else _on_host(value))
    notes = _Notes(ready.program, ready.facts.changing, ready.facts.storages)
    with _restored(engine, seed), torch.enable_grad():
        out = notes.run(*flat, enable_io_processing=False)
        found = loss_of(ready.program.handed(out), loss)
        weights = [tensor for tensor in flat if isinstance(tensor, torch.Tensor) and tensor.requires_grad]
        torch.autograd.grad(found, weights, allow_unused=True)
    return notes


def _copies(engine: Engine) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights to be trained, and all weights and buffers, as copies on the CPU."""
    weights = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in engine.model.named_parameters():
        tensors[name] = weight.detach().to("cpu", copy=True).requires_grad_(weight.requires_grad)
        if weight.requires_grad:
            weights[name] = tensors[name]
    for name, buffer in engine.model.named_buffers():
        tensors[name] = buffer.detach().to("cpu", copy=True)
    return weights, tensors


def _on_host(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.device.type == "cpu":
        return value
    return value.detach().to("cpu").requires_grad_(value.requires_grad)


@contextmanager
def _restored(engine: Engine, seed: int) -> Iterator[None]:
    """Random numbers from a seed; afterwards they and the buffers are what they were."""
    kept = [(buffer, buffer.detach().clone()) for buffer in engine.model.buffers()]
    devices = sorted({d.where.index or 0 for d in engine.devices if d.where.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)


class _Notes(fx.Interpreter):
    """Runs a program unplaced and keeps what each op gave, and the gradient of it."""

    def __init__(self, program: Program, changing: set[int], storages: Mapping[fx.Node, Any]) -> None:
        super().__init__(fx.GraphModule(program.root, program.graph))
        self.values: Values = {}
        self.grads: dict[fx.Node, torch.Tensor] = {}
        self._changing, self._storages = changing, storages

    def run_node(self, n: fx.Node) -> Any:
        """One op."""
        if n.op != "call_function":
            return super().run_node(n)
        region = [entered(context) for context in n.meta["region"]]
        out = super().run_node(n)
        for context in reversed(region):
            context.__exit__(None, None, None)
        self.values[n] = [t.detach().clone() for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        if self.has_gradient(n, out):
            out.register_hook(lambda grad: self.grads.__setitem__(n, grad.detach().clone()))
        return out

    def has_gradient(self, node: fx.Node, out: Any) -> bool:
        """Whether a value's gradient can be looked at: it is one tensor, and nobody writes into it."""
        whole = isinstance(out, torch.Tensor) and out.requires_grad
        return whole and not self._changing.intersection(self._storages[node])


@dataclass(slots=True)
class _Watcher:
    """Compares each op of the placed graph as it runs."""

    engine: Engine
    ready: Ready
    noted: _Notes
    place: dict[fx.Node, int] = field(init=False)  # in captured order
    forward: dict[int, str] = field(default_factory=dict)  # findings
    backward: dict[int, str] = field(default_factory=dict)
    _original: Any = None  # what is being copied

    def __post_init__(self) -> None:
        """Number the ops."""
        self.place = {node: at for at, node in enumerate(self.ready.program.graph.nodes)}

    def finding(self) -> str:
        """The first difference: of the forward pass the earliest, else of the backward pass the latest."""
        if self.forward:
            return self.forward[min(self.forward)]
        return self.backward[max(self.backward)] if self.backward else ""

    def before(self, node: fx.Node, given: Any) -> None:
        """An op reads only what is on its device."""
        if node.meta.get("role") == COPY:
            self._original = given[0][0].detach()
        source = self.ready.rewritten.original.get(node)
        if source is None or node.op != "call_function":
            return
        for tensor, reading in zip(_tensors(given), _read(node), strict=False):
            here = self._name_of(tensor)
            wanted = self.engine.devices[node.meta["device"]]
            if here not in ("", wanted.name):
                self.forward.setdefault(
                    self.place[source],
                    f"op {node.meta['op']!r} on {wanted.name} reads {reading.meta['op']!r} on {here}:"
                    " a copy is missing",
                )

    def after(self, node: fx.Node, out: Any) -> Any:
        """An op gives what it gave unplaced; a copy is like its original."""
        if node.meta.get("role") == COPY:
            self._compare_copy(node, out)
        source = self.ready.rewritten.original.get(node)
        if source is not None and node.op == "call_function":
            self._compare(source, node, out)
        return out

    def _compare_copy(self, node: fx.Node, out: Any) -> None:
        if not torch.equal(self._original, out.to(self._original.device)):
            where = self.engine.devices[node.meta["device"]].name
            self.forward.setdefault(
                self.place[node.meta["source"]],
                f"the copy of {node.meta['op']!r} on {where} is not like its original: it is stale or wrong",
            )

    def _compare(self, source: fx.Node, node: fx.Node, out: Any) -> None:
        at, name = self.place[source], node.meta["op"]
        where = self.engine.devices[node.meta["device"]].name
        for given, wanted in zip(_tensors(out), self.noted.values[source], strict=True):
            if not _same(wanted, given.detach()):
                text = f"op {name!r} on {where} gives other values, off by {_distance(wanted, given):.3g}"
                self.forward.setdefault(at, text)
                return
        if self.noted.has_gradient(source, out):
            out.register_hook(lambda grad: self._compare_gradient(source, name, where, grad))

    def _compare_gradient(self, source: fx.Node, name: str, where: str, grad: torch.Tensor) -> None:
        wanted = self.noted.grads.get(source)
        if wanted is not None and not _same(wanted, grad):
            text = f"the gradient of op {name!r} on {where} differs, off by {_distance(wanted, grad):.3g}"
            self.backward.setdefault(self.place[source], text)

    def _name_of(self, tensor: torch.Tensor) -> str:
        """The device a tensor is on, '' = nobody knows."""
        accounts = self.engine.accounts
        if accounts is not None:
            owner = accounts.owner(tensor)
            return accounts.devices[owner].name if owner >= 0 else ""
        return next((d.name for d in self.engine.devices if d.where == tensor.device), str(tensor.device))


def _read(node: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _same(wanted: Any, given: Any) -> bool:
    """Equal up to rounding; what is not a number is equal to itself."""
    if wanted is None or given is None:
        return wanted is given
    given = given.detach().to(wanted.device)
    if wanted.shape != given.shape or wanted.dtype != given.dtype:
        return False
    if not wanted.dtype.is_floating_point or not wanted.numel():
        return torch.equal(wanted, given)
    room = RELATIVE * wanted.abs() + _OF_LARGEST * wanted.abs().nan_to_num(posinf=0.0).max()
    close = ((wanted - given).abs() <= room) | (wanted == given) | (wanted.isnan() & given.isnan())
    return bool(close.all())


def _distance(wanted: Any, given: Any) -> float:
    """The largest difference; infinite where only one is there."""
    if wanted is None or given is None:
        return 0.0 if wanted is given else float("inf")
    if not wanted.numel():
        return 0.0
    return float((wanted.double() - given.detach().to(wanted.device).double()).abs().max())


def require_batch(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a batch: a tensor, a tuple of arguments, or a dict of named ones."""
    if isinstance(batch, torch.Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, tuple | list):
        return tuple(batch), {}
    raise InputError(f"{type(batch).__name__} is no batch; give a tensor, a tuple or a dict of arguments")
