"""Blocks of a model whose module tree shows no chain: cut out of its torch.fx graph in topological order.

    nodes   embed  norm  q k v  attention  +  norm  ...          (the order forward runs them in)
    cuts                |               |        ^ before a parameter is first used, where fewest values live

What crosses a cut is every value made before it and used after it, so a skip connection is one more leaf. A
block runs the very modules and functions of the model; its parameters are the model's own. What no parameter
goes into (a mask) has no gradient in the plain model, and wants none behind a cut: attention takes other
kernels for a mask that wants one.

A trace has no regions (`no_grad`, autocast), and what runs on real tensors meanwhile runs that once: such a
forward is refused rather than trained otherwise than it is written.
"""

import operator
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from loadmaster.core.errors import InputError
from loadmaster.modules import python_state
from loadmaster.shards.model.torch_containers import find_openable, trace_container

_MOST_BLOCKS = 128
_RANDOM = re.compile(r"rand|normal|bernoulli|multinomial|poisson|dropout|exponential|uniform")
_LOOKS = ("__init__", "__index__", "__int__", "__invert__", "__iter__")
_IN_PLACE = {getattr(operator, name) for name in dir(operator) if name.startswith("i") and name != "index"}


class _Tracer(fx.Tracer):
    """As the framework's, or one that looks into no child at all; but some containers are opened."""

    def __init__(self, *, closed: bool, opened: Sequence[nn.Module]) -> None:
        super().__init__()
        self._closed, self._modes = closed, _get_modes()
        self._opened, self._depth = {id(module) for module in opened}, 0

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """A node; a graph does not know of a region around it, nor of gradients taken inside of it."""
        if len(args) > 1 and args[1] in (torch.autograd.grad, torch.autograd.backward):
            raise _Untraceable("its forward takes gradients")
        if _get_modes() != self._modes:
            raise _Untraceable("its forward runs a part without gradients or under autocast")
        return super().create_node(*args, **kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Modules that stay whole."""
        return self._closed or self._depth > 0 or super().is_leaf_module(m, module_qualified_name)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        """What forward is given; the model may itself be a container that is opened."""
        forward, args = super().create_args_for_root(root_fn, is_module, concrete_args)
        if id(self.root) not in self._opened:
            return forward, args
        return (lambda _, *given: self._open(self.root, given, {})), args

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """A module; a container that is opened is its layers, each of them whole."""
        if id(m) not in self._opened:
            return super().call_module(m, forward, args, kwargs)
        return self._open(m, args, kwargs)

    def _open(self, container: nn.Module, args: Any, kwargs: Any) -> Any:
        self._depth += 1
        try:
            return trace_container(self, container, args, kwargs)
        finally:
            self._depth -= 1


class _Untraceable(Exception):  # noqa: N818
    """What a forward does that a trace would not do again."""


class _SideEffectGuard(TorchFunctionMode):
    """Refuses what a forward does for real while it is traced: random numbers, and writes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, unless it would have to run in every step."""
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if isinstance(out, torch.Tensor) and (_RANDOM.match(name) or _writes_in_place(name)):
            raise _Untraceable(f"its forward runs {name!r} on tensors of its own")
        return out


def _writes_in_place(name: str) -> bool:
    plain = name.endswith("_") and not name.endswith("__")
    return plain or name == "__setitem__" or (name.startswith("__i") and name not in _LOOKS)


def _get_modes() -> tuple[bool, ...]:
    return torch.is_grad_enabled(), *(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))


class Segment(nn.Module):
    """A run of a model's nodes: what lives before it goes in, what is used after it comes out."""

    def __init__(self, model: nn.Module, train: fx.GraphModule, evaluation: fx.GraphModule | None) -> None:
        super().__init__()
        self.train_graph, self.eval_graph = train, evaluation
        self.__dict__["_model"] = (model,)  # not a child: it has its own parameters only

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the nodes, as the model's mode has them."""
        if self.__dict__["_model"][0].training:
            return self.train_graph(*args, **kwargs)
        if self.eval_graph is None:
            raise InputError(
                "the model runs other steps in eval mode than in training, so its blocks cannot be found by"
                " themselves; give Trial(blocks=...)"
            )
        return self.eval_graph(*args, **kwargs)


class _TupleSegment(nn.Module):
    """A segment that takes what the one before gave, in one tuple."""

    def __init__(self, segment: Segment) -> None:
        super().__init__()
        self.segment = segment

    def forward(self, value: Any) -> Any:
        """Spread the tuple."""
        return self.segment(*value)


def cut_blocks_from_graph(model: nn.Module) -> tuple[Any, ...]:
    """Blocks cut out of the model's graph; says why where it has none."""
    was_training = model.training
    try:
        opened = find_openable(model.train())
        graph, closed = _trace_model(model, opened)
        try:
            other, _ = _trace_model(model.eval(), opened, closed=closed)
        except InputError:
            other = None
    finally:
        model.train(was_training)
    if other is not None and not _has_same_nodes(graph, other):
        other = None
    starts = _find_starts(model, graph)
    train = _build_segments(model, graph, starts)
    evaluation: Sequence[fx.GraphModule | None] = (
        [None] * len(train) if other is None else _build_segments(model, other, starts)
    )
    found = [Segment(model, one, two) for one, two in zip(train, evaluation, strict=True)]
    return (found[0], *(_TupleSegment(segment) for segment in found[1:]))


def _trace_model(
    model: nn.Module, opened: Sequence[nn.Module], *, closed: bool | None = None
) -> tuple[fx.Graph, bool]:
    problem: Exception | None = None
    for shut in (False, True) if closed is None else (closed,):
        try:
            modules = list(model.modules())
            with python_state.preserve_state(modules), _SideEffectGuard():
                was_written = python_state.watch_objects(modules, with_modules=True)
                graph = _Tracer(closed=shut, opened=opened).trace(model)
                if was_written():
                    raise _Untraceable("its forward changes what its modules hold")
        except Exception as error:  # whatever the user's forward does with a stand-in
            problem = problem or error
            continue
        graph.eliminate_dead_code(lambda node: node.op != "call_function" or _is_impure(node))
        return graph, shut
    text = " ".join(str(problem).split())[:200]
    raise InputError(
        f"{type(model).__name__} shows no chain of blocks, neither in its module tree nor in its graph"
        f" ({type(problem).__name__}: {text}); give Trial(blocks=...)"
    )


def _is_impure(node: fx.Node) -> bool:
    return node.is_impure() or node.target in _IN_PLACE or bool(node.kwargs.get("inplace"))


def _has_same_nodes(left: fx.Graph, right: fx.Graph) -> bool:
    return [(n.op, str(n.target)) for n in left.nodes] == [(n.op, str(n.target)) for n in right.nodes]


def _find_starts(model: nn.Module, graph: fx.Graph) -> list[int]:
    """Positions of the first node of each block."""
    nodes = list(graph.nodes)
    place = {node: number for number, node in enumerate(nodes)}
    live = [0] * (len(nodes) + 1)  # [position] values that cross a cut before this node
    barred = [False] * (len(nodes) + 1)
    for node in nodes:
        last = max((place[user] for user in node.users), default=place[node])
        for position in range(place[node] + 1, last + 1):
            live[position] += 1
        if _writes_input(node):
            for made in node.all_input_nodes[:1]:
                for position in range(place[made] + 1, place[node] + 1):
                    barred[position] = True
    weights = [_count_elements(model, node) for node in nodes]
    least = sum(weights) / _MOST_BLOCKS
    first = next((n for n, node in enumerate(nodes) if node.op != "placeholder"), 0)
    starts, held, since = [0], 0, first
    for number, weight in enumerate(weights):
        if weight and held > least:
            open_here = [p for p in range(since + 1, number + 1) if not barred[p] and p > first]
            if open_here:
                starts.append(min(open_here, key=lambda p: (live[p], -p)))
                held = 0
        if weight:
            held, since = held + weight, number
    return starts


def _writes_input(node: fx.Node) -> bool:
    """Whether a node changes what it is given: no cut may part it from who made that."""
    in_place = node.op == "call_method" and str(node.target).endswith("_") and "__" not in str(node.target)
    return in_place or node.target in _IN_PLACE or bool(node.kwargs.get("inplace"))


def _count_elements(model: nn.Module, node: fx.Node) -> int:
    """Elements of the parameters a node brings in."""
    if node.op == "call_module":
        return sum(parameter.numel() for parameter in model.get_submodule(str(node.target)).parameters())
    if node.op == "get_attr":
        owner, _, name = str(node.target).rpartition(".")
        found = getattr(model.get_submodule(owner), name)
        return found.numel() if isinstance(found, nn.Parameter) else 0
    return 0


def _build_segments(model: nn.Module, graph: fx.Graph, starts: Sequence[int]) -> list[fx.GraphModule]:
    nodes = list(graph.nodes)
    place = {node: number for number, node in enumerate(nodes)}
    sloped = _find_grad_nodes(model, nodes)
    found = []
    for first, end in zip(starts, [*starts[1:], len(nodes)], strict=True):
        new = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in _find_crossing(nodes, place, first):
            copies[node] = new.placeholder(node.name)
        for node, given in list(copies.items()):
            if node not in sloped:
                copies[node] = new.call_function(detach_tensors, (given,))
        for node in nodes[first:end]:
            copies[node] = new.node_copy(node, lambda given, known=copies: known[given])
        if end < len(nodes):
            new.output(tuple(copies[node] for node in _find_crossing(nodes, place, end)))
        found.append(fx.GraphModule(model, new))
    return found


def detach_tensors(value: Any) -> Any:
    """A tensor, or several, as ones that want no gradient."""
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, value)


def _find_grad_nodes(model: nn.Module, nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Nodes that a parameter goes into, or may: whatever such a value is written into is one as well."""
    found: set[fx.Node] = set()
    size = -1
    while len(found) > size:
        size = len(found)
        for node in nodes:
            cut = node.op == "call_method" and node.target == "detach"
            if _count_elements(model, node) or (not cut and found.intersection(node.all_input_nodes)):
                found.add(node)
                if _writes_input(node):
                    found.update(_find_ancestors(node))
    return found


def _find_ancestors(node: fx.Node) -> set[fx.Node]:
    """Whatever goes into a node."""
    found: set[fx.Node] = set()
    ahead = list(node.all_input_nodes)
    while ahead:
        each = ahead.pop()
        if each not in found:
            found.add(each)
            ahead.extend(each.all_input_nodes)
    return found


def _find_crossing(nodes: Sequence[fx.Node], place: dict[fx.Node, int], position: int) -> list[fx.Node]:
    """Values made before a position and used at or after it."""
    if position == 0:
        return []
    return [node for node in nodes[:position] if any(place[user] >= position for user in node.users)]
