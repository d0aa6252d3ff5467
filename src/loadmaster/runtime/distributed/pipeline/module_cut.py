"""Module cut: the stages of a model that cannot be exported, cut where its modules begin and end.

    unit      a module all of whose ops the plan has on one stage, and whose parent's are on several
    glue      what the model's own forward does between units; every stage runs it again up to where it ends

The model's forward is run once, on a process that still has all weights. What it shows: which stages need
which weights (of units, and those that glue reads), how the outputs of units are made up, and which of them
the glue writes into. A unit runs no earlier than the one before it: where a planned stage has passed, the
call belongs to the stage that the pass has reached.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves

from loadmaster.core.graph import Graph, Phase
from loadmaster.core.plan import Plan
from loadmaster.modules.randomness import preserve_generators

Call = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class ModuleCut:
    """What stages of modules need to know; equal on all ranks."""

    num_stages: int
    stage: Mapping[str, int]  # planned, of every unit by its path
    made: Mapping[str, tuple[Any, ...]]  # [call] how a unit's output is made up, by its path
    written: frozenset[str]  # units whose outputs the glue writes into
    readers: Mapping[str, frozenset[int]]  # of every weight and buffer by its first name
    counted: tuple[str, ...]  # buffers that glue changes
    changed: frozenset[str] = frozenset()  # all that the forward changes, and may read

    @property
    def draws_later(self) -> tuple[bool, ...]:
        """[S] states of generators go with what units gave, not by themselves."""
        return (False,) * self.num_stages

    @property
    def units(self) -> list[str]:
        """Paths in the order of the model."""
        return list(self.stage)


def cut_modules(
    model: nn.Module, graph: Graph, plan: Plan, args: Any, kwargs: Mapping[str, Any]
) -> ModuleCut:
    """The cut of a plan at module boundaries, after one forward pass of the whole model."""
    assert plan.pipeline is not None, "asked of pipelines"
    num = len(plan.pipeline.replicas)
    stage = plan_units(model, graph, plan)
    watch = _Rehearsal(model, stage, num)
    state = {name: one.detach().clone() for name, one in model.named_buffers()}
    home = next((one.device for one in model.parameters()), torch.device("cpu"))
    try:
        with preserve_generators(home), torch.no_grad(), calls_replaced(model, stage, watch.call), watch:
            model(*args, **kwargs)
        watch.look_for_writes()
        changed = [name for name, one in model.named_buffers() if not torch.equal(one, state[name])]
    finally:
        for name, one in model.named_buffers():
            one.data.copy_(state[name])
    of_units = {id(one) for path in stage for one in model.get_submodule(path).buffers()}
    tensors = dict(model.named_buffers())
    return ModuleCut(
        num,
        stage,
        {path: tuple(specs) for path, specs in watch.made.items()},
        frozenset(watch.written),
        watch.find_readers(),
        tuple(name for name in changed if id(tensors[name]) not in of_units),
        frozenset(changed) - _averages_of_batch_norms(model),
    )


def _averages_of_batch_norms(model: nn.Module) -> set[str]:
    """Buffers that are written in training, and not read."""
    norms = nn.modules.batchnorm._BatchNorm
    return {
        f"{path}.{name}" if path else name
        for path, one in model.named_modules()
        if isinstance(one, norms)
        for name in one._buffers
    }


def plan_units(model: nn.Module, graph: Graph, plan: Plan) -> dict[str, int]:
    """The planned stage of every unit; one that the plan does not know is where the unit before it is."""
    assert plan.pipeline is not None, "asked of pipelines"
    known = _count_votes(graph, plan.pipeline.stage.tolist())
    modules = dict(model.named_modules())
    found: dict[str, int] = {}

    def visit(path: str, module: nn.Module) -> None:
        prefix = f"{path}." if path else ""
        below = [one for one in modules if one == path or one.startswith(prefix)]
        stages = {known[one] for one in below if one in known}
        children = [(f"{prefix}{name}", child) for name, child in module.named_children()]
        children = [(one, child) for one, child in children if one in modules]
        is_called = not isinstance(module, nn.ModuleList | nn.ModuleDict)
        if is_called and (len(stages) == 1 or not children):
            found[path] = next(iter(stages), max(found.values(), default=0))
            return
        if not stages and is_called and path:
            found[path] = max(found.values(), default=0)
            return
        for one, child in children:
            visit(one, child)

    visit("", model)
    return found


def _count_votes(graph: Graph, stage: list[int]) -> dict[str, int]:
    """The stage of most ops of the forward pass of every module."""
    votes: dict[str, Counter[int]] = {}
    rows = zip(graph.module, graph.op_kind, graph.phase.tolist(), stage, strict=True)
    for module, kind, phase, at in rows:
        if phase == Phase.FORWARD and kind != "input":
            votes.setdefault(module, Counter())[at] += 1
    return {module: count.most_common(1)[0][0] for module, count in votes.items()}


@contextmanager
def calls_replaced(model: nn.Module, units: Mapping[str, int], call: Call) -> Iterator[None]:
    """Units are called through `call`; nothing is left on them."""
    replaced: list[tuple[nn.Module, Any]] = []
    try:
        for path in units:
            module = model.get_submodule(path)
            before = module.__dict__.get("forward")
            original = module.forward

            def instead(
                *args: Any, _path: str = path, _run: Callable[..., Any] = original, **kwargs: Any
            ) -> Any:
                return call(_path, _run, args, kwargs)

            module.__dict__["forward"] = instead
            replaced.append((module, before))
        yield
    finally:
        for module, before in replaced:
            if before is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = before


@dataclass(eq=False)
class _Rehearsal(TorchFunctionMode):
    """Looks at one forward pass of the whole model."""

    model: nn.Module
    stage: Mapping[str, int]
    num_stages: int
    made: dict[str, list[Any]] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)
    position: int = 0
    _inside: bool = False
    _given: list[tuple[str, torch.Tensor, int]] = field(default_factory=list)
    _stages: dict[str, set[int]] = field(default_factory=dict)  # of a unit's calls
    _glue: dict[str, int] = field(default_factory=dict)  # weight -> the stage from which glue reads it

    def __post_init__(self) -> None:
        super().__init__()
        tensors = {**dict(self.model.named_buffers()), **dict(self.model.named_parameters())}
        self._names = {id(one): name for name, one in tensors.items()}

    def call(self, path: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of a unit."""
        if self._inside:
            return run(*args, **kwargs)
        self.position = max(self.position, self.stage[path])
        self._stages.setdefault(path, set()).add(self.position)
        self._inside = True
        try:
            out = run(*args, **kwargs)
        finally:
            self._inside = False
        leaves, spec = tree_flatten(out)
        self.made.setdefault(path, []).append(spec)
        self._given += [(path, one, one._version) for one in leaves if isinstance(one, torch.Tensor)]
        return out

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Glue reads a weight: from this stage on, every stage does."""
        if not self._inside:
            for leaf in tree_leaves((args, kwargs or {})):
                name = self._names.get(id(leaf))
                if name is not None:
                    self._glue.setdefault(name, self.position)
        return func(*args, **(kwargs or {}))

    def look_for_writes(self) -> None:
        """Units whose outputs have changed since they were given."""
        self.written |= {path for path, one, version in self._given if one._version != version}
        self._given.clear()

    def find_readers(self) -> dict[str, frozenset[int]]:
        """Stages that need each weight and buffer."""
        found: dict[str, set[int]] = {}
        for path, planned in self.stage.items():
            module = self.model.get_submodule(path)
            stages = self._stages.get(path) or {planned}
            for one in (*module.parameters(), *module.buffers()):
                found.setdefault(self._names[id(one)], set()).update(stages)
        for name, first in self._glue.items():
            found.setdefault(name, set()).update(range(first, self.num_stages))
        return {name: frozenset(stages) for name, stages in found.items()}
