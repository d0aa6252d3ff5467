"""Compare ops: each op of a placed graph against the exported graph as it runs unplaced on the CPU.

The exported graph is run first, every op's value and gradient noted; then the placed graph, each op of which
is compared as it runs: its values, its gradient, where its inputs are, and its copies with their originals.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from loadmaster.modules.loss import compute_loss
from loadmaster.modules.rounding import is_close, max_difference
from loadmaster.runtime.graph_engine.engine import GraphEngine, ReadyGraph
from loadmaster.runtime.graph_engine.op_facts import enter_context
from loadmaster.runtime.graph_engine.program import Program
from loadmaster.runtime.graph_engine.rewrite import COPY
from loadmaster.runtime.verify.unplaced import Loss, copy_weights, seed_and_restore, to_cpu


class OpComparison:
    """One batch of a graph engine, compared op by op."""

    def __init__(self, engine: GraphEngine, args: Any, kwargs: Any, *, loss: Loss | None, seed: int) -> None:
        self._engine = engine
        self._ready, self._leaves = engine.ready(args, kwargs)
        noted = _run_reference(engine, self._ready, self._leaves, loss, seed)
        self._watcher = _Watcher(engine, self._ready, noted)

    def run(self) -> Any:
        """What the placed model gives."""
        return self._engine.run(self._ready, self._leaves, self._watcher)

    def finding(self) -> str:
        """The first op that differs and how, '' = none."""
        return self._watcher.finding()


def _run_reference(
    engine: GraphEngine, ready: ReadyGraph, leaves: list[Any], loss: Loss | None, seed: int
) -> "_ReferenceInterpreter":
    """Every op's value and gradient, of the graph as it was exported."""
    _, tensors = copy_weights(engine)
    flat = []
    for node in ready.program.inputs:
        slot = node.meta["slot"]
        value = slot.value if slot.kind == "constant" else None
        value = tensors[slot.name] if slot.kind == "weight" else value
        flat.append(to_cpu(leaves[slot.place]) if slot.kind == "input" else to_cpu(value))
    notes = _ReferenceInterpreter(ready.program, ready.facts.changing, ready.facts.storages)
    with seed_and_restore(engine, seed), torch.enable_grad():
        out = notes.run(*flat, enable_io_processing=False)
        found = compute_loss(ready.program.unflatten_outputs(out), loss)
        weights = [tensor for tensor in flat if isinstance(tensor, torch.Tensor) and tensor.requires_grad]
        torch.autograd.grad(found, weights, allow_unused=True)
    return notes


class _ReferenceInterpreter(fx.Interpreter):
    """Runs a program unplaced and keeps what each op gave, and the gradient of it."""

    def __init__(self, program: Program, changing: set[int], storages: Mapping[fx.Node, Any]) -> None:
        super().__init__(fx.GraphModule(program.root, program.graph))
        self.values: dict[fx.Node, list[torch.Tensor]] = {}
        self.grads: dict[fx.Node, torch.Tensor] = {}
        self._changing, self._storages = changing, storages

    def run_node(self, n: fx.Node) -> Any:
        """One op."""
        if n.op != "call_function":
            return super().run_node(n)
        region = [enter_context(context) for context in n.meta["region"]]
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

    engine: GraphEngine
    ready: ReadyGraph
    noted: _ReferenceInterpreter
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
        for tensor, reading in zip(_list_tensors(given), _list_inputs(node), strict=False):
            here = self._find_device_name(tensor)
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
        for given, wanted in zip(_list_tensors(out), self.noted.values[source], strict=True):
            if not is_close(wanted, given.detach()):
                text = (
                    f"op {name!r} on {where} gives other values, off by {max_difference(wanted, given):.3g}"
                )
                self.forward.setdefault(at, text)
                return
        if self.noted.has_gradient(source, out):
            out.register_hook(lambda grad: self._compare_gradient(source, name, where, grad))

    def _compare_gradient(self, source: fx.Node, name: str, where: str, grad: torch.Tensor) -> None:
        wanted = self.noted.grads.get(source)
        if wanted is not None and not is_close(wanted, grad):
            text = (
                f"the gradient of op {name!r} on {where} differs, off by {max_difference(wanted, grad):.3g}"
            )
            self.backward.setdefault(self.place[source], text)

    def _find_device_name(self, tensor: torch.Tensor) -> str:
        """The device a tensor is on, '' = nobody knows."""
        accounts = self.engine.accounts
        if accounts is not None:
            owner = accounts.owner(tensor)
            return accounts.devices[owner].name if owner >= 0 else ""
        return next((d.name for d in self.engine.devices if d.where == tensor.device), str(tensor.device))


def _list_inputs(node: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _list_tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
