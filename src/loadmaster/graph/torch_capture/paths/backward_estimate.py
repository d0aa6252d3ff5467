"""Estimate: the backward pass by rules, where autograd cannot run it.

The forward pass has left a graph of autograd nodes. Each says what it saved, which nodes get a gradient from
it and of what shape; what it would run is not known, and is taken by rule:

    it reads the gradients it gets and all that it saved;
    it makes a gradient for every node that wants one, of that node's shape, or hands on the one it got
    (HANDS_ON: sums, views, copies) as far as the sizes agree;
    a second gradient of one tensor is added to the first, in place where nobody else holds it;
    a product takes its forward flops once for each of its factors that has a gradient, attention two and a
    half times, a recurrent layer twice.

Nodes run as autograd runs them: of those that are ready, the one that was made last.
"""

import heapq
import re
from dataclasses import dataclass, field
from typing import Any

import torch

from loadmaster.core.graph import NO_MIRROR, Dtype, Phase
from loadmaster.graph.torch_capture.record.ledger import Op
from loadmaster.graph.torch_capture.record.recorder import Recorder
from loadmaster.modules.op_signature import dtype_of
from loadmaster.modules.tensor_trees import find_tensors

HANDS_ON = frozenset(
    {
        "Add",
        "Sub",
        "View",
        "UnsafeView",
        "ReshapeAlias",
        "Transpose",
        "T",
        "Permute",
        "Unsqueeze",
        "Squeeze",
        "Expand",
        "Alias",
        "Detach",
        "Clone",
        "Cat",
        "Stack",
        "Sum",
        "ToCopy",
        "Contiguous",
        "Movedim",
        "Unflatten",
        "Flatten",
        "AsStrided",
        "Real",
        "ViewAsReal",
        "ViewAsComplex",
        "Conj",
        "LiftFresh",
    }
)
_HIGHER = ("Attention", 2.5), ("Rnn", 2.0), ("Lstm", 2.0), ("Gru", 2.0)
_NAME = re.compile(r"(?:.*::)?(\w+?)(?:Backward\d*)?$")
_LEAF = "AccumulateGrad"
Slot = tuple[Any, int]  # a node, and which of its gradients


@dataclass(slots=True)
class Estimate:
    """Adds backward ops to the recorder's ledger; `leaf` are the gradients of weights and inputs so far."""

    recorder: Recorder
    leaf: dict[int, int]  # id of a tensor -> tensor of the ledger
    _grads: dict[Slot, int] = field(default_factory=dict)
    _holders: dict[int, int] = field(default_factory=dict)  # of a gradient

    def backward(self, loss: torch.Tensor) -> None:
        """Backward ops of everything the loss depends on."""
        root = loss.grad_fn
        assert root is not None, "the loss depends on a weight"
        waiting, todo = _num_readers(root), [root]
        mirror = self._mirror(root)
        start = Op(f"{self._name(mirror)}.backward", "ones_like", "loss", Phase.BACKWARD, mirror=mirror)
        made = self.recorder.ledger.add(start, [], [loss.numel() * loss.itemsize])
        self.recorder.ledger.keep_tensor(made[0])  # `backward` holds it to its end
        self._give((root, loss.output_nr), made[0], mirror)
        heap = [(-_sequence_number(root), 0, root)]
        while heap:
            node = heapq.heappop(heap)[2]
            self._run(node)
            for follower, _ in node.next_functions:
                if follower is not None:
                    waiting[follower] -= 1
                    if not waiting[follower]:
                        todo.append(follower)
                        heapq.heappush(heap, (-_sequence_number(follower), len(todo), follower))

    def _run(self, node: Any) -> None:
        """The op of one node, where it does more than hand on."""
        got = {nr: self._take((node, nr)) for nr in range(_num_grads(node)) if (node, nr) in self._grads}
        name = _node_name(node)
        if not got:
            return
        if name == _LEAF:
            self._accumulate(node, got[0])
            return
        wanted = [(follower, nr) for follower, nr in node.next_functions if follower is not None]
        largest = max(got.values(), key=lambda grad: self.recorder.ledger.tensors[grad].num_bytes)
        size = self.recorder.ledger.tensors[largest].num_bytes
        passed = [slot for slot in wanted if name in HANDS_ON and self._passes(name, _grad_bytes(slot), size)]
        mirror = self._mirror(node)
        for slot in passed:
            self._give(slot, largest, mirror)
        fresh = [slot for slot in wanted if slot not in passed]
        if fresh:
            self._work(node, name, sorted(set(got.values())), fresh, mirror)

    def _passes(self, name: str, wanted: int, got: int) -> bool:
        """A sum's gradient is one number seen many times, a part's is a look at the whole."""
        if name == "Sum":
            return True
        return wanted <= got if name in ("Cat", "Stack") else wanted == got

    def _work(self, node: Any, name: str, got: list[int], fresh: list[Slot], mirror: int) -> None:
        ledger = self.recorder.ledger
        saved = sorted({base for tensor in _saved_tensors(node) if (base := self._base(tensor)) is not None})
        sizes = [_grad_bytes(slot) for slot in fresh]
        home = ledger.ops[mirror] if mirror != NO_MIRROR else None
        op = Op(
            f"{self._name(mirror)}.backward",
            f"{name}_backward".lower(),
            home.module if home else "",
            Phase.BACKWARD,
            mirror=mirror,
            dtype=_dtype(fresh),
            flops=self.recorder.flops_at.get(_sequence_number(node), 0.0) * _flops_factor(name, fresh),
            bytes_moved=sum(ledger.tensors[tensor].num_bytes for tensor in {*got, *saved}) + sum(sizes),
        )
        for slot, grad in zip(fresh, ledger.add(op, sorted({*got, *saved}), sizes), strict=True):
            self._give(slot, grad, mirror)

    def _accumulate(self, node: Any, grad: int) -> None:
        """A leaf takes the gradient as its own, copies one that others hold, or adds it to what it has."""
        ledger, leaf, mirror = self.recorder.ledger, node.variable, self.recorder.last_mirror
        own, size = self.leaf.get(id(leaf)), leaf.numel() * leaf.itemsize
        if own is not None:
            home = self.recorder.maker(node, mirror)
            self.leaf[id(leaf)] = self._add_gradients(own, grad, home, in_place=True)
        elif self._holders.get(grad, 0) or ledger.tensors[grad].num_bytes != size:
            copied = Op(f"{self._name(mirror)}.backward", "clone", "", Phase.BACKWARD, mirror=mirror)
            self.leaf[id(leaf)] = ledger.add(copied, [grad], [size])[0]
        else:
            self.leaf[id(leaf)] = grad

    def _give(self, slot: Slot, grad: int, mirror: int) -> None:
        old = self._grads.get(slot)
        if old is not None:
            self._holders[old] -= 1
            home = self.recorder.maker(slot[0], mirror)
            grad = self._add_gradients(old, grad, home, in_place=not self._holders[old])
        self._grads[slot] = grad
        self._holders[grad] = self._holders.get(grad, 0) + 1

    def _take(self, slot: Slot) -> int:
        grad = self._grads.pop(slot)
        self._holders[grad] -= 1
        return grad

    def _add_gradients(self, old: int, new: int, mirror: int, *, in_place: bool) -> int:
        ledger = self.recorder.ledger
        size = ledger.tensors[old].num_bytes
        op = Op(
            f"{self._name(mirror)}.backward", "add", "", Phase.BACKWARD, mirror=mirror, bytes_moved=3 * size
        )
        reads = sorted({old, new})
        return ledger.add_into(op, reads, old, tied=False) if in_place else ledger.add(op, reads, [size])[0]

    def _base(self, tensor: torch.Tensor) -> int | None:
        number = self.recorder.key(tensor)[0]
        return self.recorder.ledger.base(number) if self.recorder.ledger.knows(number) else None

    def _mirror(self, node: Any) -> int:
        return self.recorder.find_mirror(_sequence_number(node))

    def _name(self, mirror: int) -> str:
        return self.recorder.ledger.ops[mirror].name if mirror != NO_MIRROR else "loss"


def _num_readers(root: Any) -> dict[Any, int]:
    """How many nodes give each node a gradient."""
    waiting, todo = {root: 0}, [root]
    while todo:
        for follower, _ in todo.pop().next_functions:
            if follower is not None:
                if follower not in waiting:
                    waiting[follower] = 0
                    todo.append(follower)
                waiting[follower] += 1
    return waiting


def _node_name(node: Any) -> str:
    match = _NAME.match(node.name())
    return match.group(1) if match else str(node.name())


def _sequence_number(node: Any) -> int:
    return int(node._sequence_nr())


def _num_grads(node: Any) -> int:
    return max(1, len(node._input_metadata))


def _grad_metadata(slot: Slot) -> Any:
    node, nr = slot
    return node._input_metadata[nr]


def _grad_bytes(slot: Slot) -> int:
    return int(torch.Size(_grad_metadata(slot).shape).numel()) * int(_grad_metadata(slot).dtype.itemsize)


def _dtype(slots: list[Slot]) -> Dtype:
    return dtype_of(_grad_metadata(slots[0]).dtype)


def _flops_factor(name: str, fresh: list[Slot]) -> float:
    for part, factor in _HIGHER:
        if part.lower() in name.lower():
            return factor
    return float(min(2, sum(len(_grad_metadata(slot).shape) > 1 for slot in fresh)))


def _saved_tensors(node: Any) -> list[torch.Tensor]:
    """The tensors a node saved."""
    found: list[torch.Tensor] = []
    for attribute in ("saved_tensors", *(name for name in dir(node) if name.startswith("_saved_"))):
        try:
            found += find_tensors(getattr(node, attribute, None))
        except RuntimeError:  # let go of already
            continue
    return found
