"""Facts: what a program's ops share, write and draw, found by one run on fake tensors.

Two nodes alias where their values have a storage in common. What is written in place is seen below autograd,
so that the hidden writes of batch norm are seen, too.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from loadmaster.modules.op_signature import find_written
from loadmaster.modules.torch_state import silence_torch
from loadmaster.runtime.graph_engine import gpu_autocast
from loadmaster.runtime.graph_engine.program import Program

_WORDS_OF_CHANCE = ("rand", "dropout", "bernoulli", "normal_", "multinomial", "poisson")


@dataclass(slots=True)
class Facts:
    """Storages are numbered; what is no tensor has none."""

    storages: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)  # of a node's value
    written: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)  # by a node, in place
    trained: set[fx.Node] = field(default_factory=set)  # nodes whose value has a gradient
    forms: dict[fx.Node, tuple[tuple[int, ...], torch.dtype]] = field(
        default_factory=dict
    )  # shape and type of a node's value, where it is one tensor

    @property
    def changing(self) -> set[int]:
        """Storages that some op writes in place."""
        return {storage for found in self.written.values() for storage in found}


def collect_facts(program: Program) -> Facts:
    """Run the program on its own fake tensors."""
    fake, names = program.fake, program.fake.names()
    leaves = tree_leaves((fake.args, fake.kwargs))
    flat = []
    for node in program.inputs:
        slot = node.meta["slot"]
        value = names[slot.name] if slot.kind == "weight" else slot.value
        flat.append(leaves[slot.place] if slot.kind == "input" else value)
    watch = _StorageTracker()
    run = _FactsInterpreter(fx.GraphModule(program.root, program.graph), watch)
    with silence_torch(), fake.mode, torch.enable_grad(), watch:
        run.run(*flat, enable_io_processing=False)
    return run.facts


def is_random(node: fx.Node) -> bool:
    """Whether an op may draw random numbers; of one that nobody knows it is assumed."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return isinstance(node.target, torch._ops.HigherOrderOperator)
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        return True
    return any(word in str(node.target) for word in _WORDS_OF_CHANCE)


class _StorageTracker(TorchDispatchMode):
    """Numbers storages and notes writes."""

    def __init__(self) -> None:
        super().__init__()
        self.written: set[int] = set()
        self._known: dict[int, tuple[int, Any]] = {}

    def numbers(self, tensors: Iterable[Any]) -> tuple[int, ...]:
        """The storages of tensors; each is held, so that no two have one number."""
        found = []
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                found.append(self._known.setdefault(storage._cdata, (len(self._known), storage))[0])
        return tuple(dict.fromkeys(found))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op and note what it writes."""
        kwargs = kwargs or {}
        self.written.update(self.numbers(find_written(func, args, kwargs)))
        return func(*args, **kwargs)


class _FactsInterpreter(fx.Interpreter):
    """Notes the facts of each node."""

    def __init__(self, module: fx.GraphModule, watch: _StorageTracker) -> None:
        super().__init__(module)
        self.facts, self._watch = Facts(), watch
        self._seen: set[int] = set()

    def run_node(self, n: fx.Node) -> Any:
        """One node."""
        self._watch.written.clear()
        region = [enter_context(context) for context in n.meta.get("region", ())]
        out = super().run_node(n)
        for context in reversed(region):
            context.__exit__(None, None, None)
        leaves = tree_leaves(out)
        facts = self.facts
        facts.storages[n] = self._watch.numbers(leaves)
        if isinstance(out, torch.Tensor):
            facts.forms[n] = tuple(out.shape), out.dtype
        written = self._watch.written & self._seen  # what an op makes and writes by itself is its own
        if written:
            facts.written[n] = tuple(sorted(written))
        self._seen.update(facts.storages[n])
        facts.trained.update(one for one in (n, *n.all_input_nodes) if _has_gradient(self.env.get(one, out)))
        return out


def _has_gradient(value: Any) -> bool:
    """Also asked when it is read: zeros that were filled row by row have one then."""
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(value))


def enter_context(context: tuple[Any, ...]) -> Any:
    """A region's context, entered."""
    is_grad = context[0] == "grad"
    made: Any = torch.set_grad_enabled(context[1]) if is_grad else gpu_autocast.autocast_region(*context[1:])
    made.__enter__()
    return made
