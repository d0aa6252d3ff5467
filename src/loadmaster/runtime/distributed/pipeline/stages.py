"""Stages: an `nn.Module` for each stage of a cut, with the model's own parameters under their own names.

A stage is called with what the stage before gave, and with the inputs of the model that it reads by itself:

    given = stage(*received, leaves=leaves)     tuples of tensors, in the order of the cut

`state_dict` of a stage is that part of the model's, tied weights under their first name. A weight that two
stages read stands in both.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from loadmaster.runtime.distributed.pipeline.deferred_weights import DEFERRABLE
from loadmaster.runtime.distributed.pipeline.stage_cut import StageCut
from loadmaster.runtime.graph_engine.input_binding import Fill, make_fills
from loadmaster.runtime.graph_engine.op_facts import Facts
from loadmaster.runtime.graph_engine.program import Program
from loadmaster.runtime.graph_engine.rewrite import RegionStack, change_region


class Stage(nn.Module):
    """One stage of a model; its parameters and buffers are the model's own objects."""

    def __init__(self, index: int, module: fx.GraphModule, num_received: int, reads: frozenset[int]) -> None:
        super().__init__()
        self.index = index
        self.num_received = num_received
        self.written: frozenset[str] = frozenset()  # buffers that its forward reads and changes
        self.reads = reads  # which leaves of the arguments
        self.__dict__["graph_module"] = module  # its constants are no part of a state_dict
        self.__dict__["fills"] = ()

    @property
    def holder(self) -> nn.Module:
        """What has the buffers that the forward reads."""
        return self

    def forward(self, *received: torch.Tensor, leaves: Sequence[Any] = ()) -> tuple[Any, ...]:
        """What the next stage needs; of the last stage what the model gives."""
        fills: tuple[Fill, ...] = self.__dict__["fills"]
        flat = [fill(list(leaves)) for fill in fills]
        regions = RegionStack()
        try:
            given = self.__dict__["graph_module"](regions, *received, *flat)
        finally:
            regions.close()
        return tuple(given)


def build_stage(
    program: Program,
    facts: Facts,
    cut: StageCut,
    index: int,
    model: nn.Module,
    *,
    where: torch.device,
    outputs: Sequence[Any],
    instead: Callable[[fx.Node], Any] | None = None,
) -> Stage:
    """One stage of a cut; `outputs` are what the graph gives, None where nobody asks for it.

    `instead` gives the function that runs instead of an op without named arguments, or None.
    """
    writer = _StageWriter(program, facts, cut, index, where, instead)
    module, used = writer.write(outputs)
    reads = frozenset(node.meta["slot"].place for node in used if node.meta["slot"].kind == "input")
    stage = Stage(index, module, len(writer.received), reads)
    for node in used:
        if node.meta["slot"].kind == "weight":
            _share_tensor(stage, model, node.meta["slot"].name)
    stage.written = _find_written_buffers(stage, facts, cut, used)
    part = _PartOfProgram(used)
    stage.__dict__["fills"] = make_fills(stage, part, dict.fromkeys(used, 0), [where])  # type: ignore[arg-type]
    return stage


def find_deferrable(node: fx.Node) -> Any:
    """What runs instead of a layer whose weights are the model's own, so that their gradients may wait."""
    instead, weights = DEFERRABLE.get(node.target, (None, ()))
    for at in weights:
        one = node.args[at] if at < len(node.args) else None
        if one is not None and (not isinstance(one, fx.Node) or one.op != "placeholder"):
            return None
    return instead


def _find_written_buffers(
    stage: Stage, facts: Facts, cut: StageCut, used: Sequence[fx.Node]
) -> frozenset[str]:
    """Names of buffers that a stage writes, and reads for more than that."""
    own = dict(stage.named_buffers())
    written = {
        storage for one, found in facts.written.items() if cut.stage[one] == stage.index for storage in found
    }
    found = set()
    for node in used:
        name, users = node.meta["slot"].name, [one for one in node.users if cut.stage.get(one) == stage.index]
        if name in own and written.intersection(facts.storages[node]):
            found |= set() if all(_only_counts(one) for one in users) else {name}
    return frozenset(found)


def _only_counts(node: fx.Node) -> bool:
    """Whether an op makes nothing of a buffer but its next value: batch norm in training, or a counter."""
    return "batch_norm" in str(node.target) or not node.users


class _PartOfProgram:
    """The inputs of a program that a stage reads, for `make_fills`."""

    def __init__(self, inputs: list[fx.Node]) -> None:
        self.inputs = inputs


def _share_tensor(stage: nn.Module, model: nn.Module, name: str) -> None:
    """Register a parameter or buffer of the model under its own name."""
    path, _, own = name.rpartition(".")
    home, source = stage, model.get_submodule(path)
    for part in path.split(".") if path else ():
        if part not in home._modules:
            home.add_module(part, nn.Module())
        home = home.get_submodule(part)
    if own in source._parameters:
        home.register_parameter(own, source._parameters[own])
    else:
        lasting = own not in source._non_persistent_buffers_set
        home.register_buffer(own, source._buffers[own], persistent=lasting)


class _StageWriter:
    """Writes the graph of one stage: (regions, received tensors, own inputs) -> outputs."""

    def __init__(
        self,
        program: Program,
        facts: Facts,
        cut: StageCut,
        index: int,
        where: torch.device,
        instead: Callable[[fx.Node], Any] | None,
    ) -> None:
        self._program, self._facts, self._cut, self._index = program, facts, cut, index
        self._where, self._instead = where, instead
        self._graph = fx.Graph()
        self._new: dict[fx.Node, fx.Node] = {}
        self._region: Any = ()
        self._regions = self._graph.placeholder("regions")
        self.received = cut.crossing[index - 1] if index else ()

    def write(self, outputs: Sequence[Any]) -> tuple[fx.GraphModule, list[fx.Node]]:
        """The module, and the inputs of the program that it reads, in the order of its arguments."""
        last = self._index == self._cut.num_stages - 1
        ops = [node for node in self._program.ops if self._cut.stage[node] == self._index]
        given = list(outputs) if last else list(self._cut.crossing[self._index])
        wanted = {one for node in ops for one in node.all_input_nodes}
        wanted.update(node for node in given if isinstance(node, fx.Node))
        for node in self.received:
            self._new[node] = self._graph.placeholder(f"received_{node.name}")
        used = [node for node in self._program.inputs if node in wanted]
        for node in used:
            self._new[node] = self._graph.placeholder(node.name)
        self._keep_received_whole(ops)
        for node in self._program.graph.nodes:
            if node.op == "get_attr" and node in wanted:
                self._new[node] = self._graph.get_attr(str(node.target))
        for node in ops:
            self._op(node)
        self._enter(())
        self._graph.output(tuple(fx.map_arg(one, self._new.__getitem__) for one in given))
        return fx.GraphModule(self._program.root, self._graph), used

    def _keep_received_whole(self, ops: list[fx.Node]) -> None:
        """What is written in place is a copy: a leaf that wants a gradient may not be written."""
        written = {storage for node in ops for storage in self._facts.written.get(node, ())}
        for node in self.received:
            if written.intersection(self._facts.storages[node]):
                self._new[node] = self._graph.call_function(torch.clone, (self._new[node],))

    def _op(self, node: fx.Node) -> None:
        self._enter(node.meta["region"])
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._new.__getitem__)
        args, kwargs = self._set_devices(node, args, kwargs)
        target = self._instead(node) if self._instead is not None and not kwargs else None
        made = self._graph.call_function(target or node.target, args, kwargs)
        made.meta = {"op": node.meta["op"]}
        self._new[node] = made

    def _enter(self, region: Any) -> None:
        if region != self._region:
            self._region = region
            self._graph.call_function(change_region, (self._regions, region))

    def _set_devices(self, node: fx.Node, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Devices among the arguments are the stage's own; what is made of nothing is made there."""

        def moved(leaf: Any) -> Any:
            return self._where if isinstance(leaf, torch.device) else leaf

        schema = getattr(node.target, "_schema", None)
        takes = schema is not None and any(argument.name == "device" for argument in schema.arguments)
        if not node.all_input_nodes and takes and "device" not in kwargs:
            kwargs = {**kwargs, "device": self._where}
        return fx.node.map_aggregate((tuple(args), dict(kwargs)), moved)
