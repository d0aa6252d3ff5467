"""Rewrite: a program, its devices and its order become the graph that runs.

    x ─────► op            op on x's device: as it was
    x ─carried─► c         op elsewhere: one copy per (tensor, device), again once the tensor was written,
    x,c ─joined─► op       and one edge per reading, or one per device where gradients are added (presum)
    fetched ─► op ─► dropped    a weight that stays at home is copied for each reader (`weight_loads.py`)

What each node of the new graph carries in its `meta`: op (name), device (where its memory is), back (where
the memory of its backward is); a copy also its role and source, the node of the program it is a copy of.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from loadmaster.runtime.graph_engine.op_facts import Facts, enter_context
from loadmaster.runtime.graph_engine.program import Program, Region
from loadmaster.runtime.spill.weight_loads import (
    Reading,
    StashingOp,
    WeightLoads,
    anchor_gradient,
    drop_load,
    expect_stash,
    fetch_load,
    link_load_gradient,
    stash_output,
)
from loadmaster.runtime.transport.copies import copy_to_device, link_gradient, move_to_device

COPY, EDGE = "copy", "edge"


@dataclass(frozen=True, slots=True)
class RewrittenGraph:
    """A graph to run; `original` maps each of its ops to the program's."""

    module: fx.GraphModule
    original: dict[fx.Node, fx.Node]
    num_copies: int
    readings: tuple[Reading, ...] = ()  # of weights that stay at home
    stashing: tuple[StashingOp, ...] = ()


def rewrite_program(
    program: Program,
    facts: Facts,
    device: Mapping[fx.Node, int],
    order: Sequence[fx.Node],
    where: Sequence[torch.device],
    *,
    presum: bool = False,
    output_device: torch.device | None = None,
    spilled: frozenset[str] = frozenset(),
    stashing: Mapping[fx.Node, int] | None = None,
) -> RewrittenGraph:
    """The graph of a program on devices; its first input is the stack of regions.

    `stashing` says of ops where what they made waits for its backward.
    """
    writer = _Writer(program, facts, device, where, presum=presum)
    writer.homes = stashing or {}
    writer.drops = _find_last_uses(program, facts, order, spilled)
    for node in order:
        writer.op(node)
    writer.output(output_device)
    module = fx.GraphModule(program.root, writer.graph)
    return RewrittenGraph(
        module, writer.original, writer.num_copies, tuple(writer.readings), tuple(writer.stashing)
    )


def _find_last_uses(
    program: Program, facts: Facts, order: Sequence[fx.Node], spilled: frozenset[str]
) -> dict[tuple[fx.Node, fx.Node], fx.Node]:
    """For each (weight that stays at home, reader): the last op that needs the copy.

    A weight that is written to, or of which the graph gives a view, is left out: it is copied as others are.
    """
    place = {node: at for at, node in enumerate(order)}
    found = {}
    for weight in program.inputs:
        own = set(facts.storages[weight])
        if weight.meta["op"] not in spilled or weight.meta["slot"].kind != "weight" or own & facts.changing:
            continue
        for reader in weight.users:
            waiting, views, last = [reader], {reader}, reader
            while waiting:
                node = waiting.pop()
                last = max(last, node, key=lambda one: place.get(one, len(order)))
                if node in place and own & set(facts.storages[node]):
                    waiting += [user for user in node.users if user not in views]
                    views.update(node.users)
            if last in place:
                found[weight, reader] = last
    return found


class RegionStack:
    """The contexts that are entered while a graph runs; left when it ends, however it ends."""

    def __init__(self, loads: WeightLoads | None = None) -> None:
        self._stack = ExitStack()
        self.loads = loads

    def change(self, region: Region) -> None:
        """Leave what is entered, and enter these."""
        self._stack.close()
        for context in region:
            self._stack.push(enter_context(context).__exit__)

    def close(self) -> None:
        """Leave all."""
        self._stack.close()


def change_region(regions: RegionStack, region: Region) -> None:
    """A node of the graph that changes its region."""
    regions.change(region)


class _Writer:
    """Writes the new graph op by op."""

    def __init__(
        self,
        program: Program,
        facts: Facts,
        device: Mapping[fx.Node, int],
        where: Sequence[torch.device],
        *,
        presum: bool,
    ) -> None:
        self.graph = fx.Graph()
        self.original: dict[fx.Node, fx.Node] = {}
        self.num_copies = 0
        self.drops: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
        self.readings: list[Reading] = []
        self.homes: Mapping[fx.Node, int] = {}
        self.stashing: list[StashingOp] = []
        self._to_drop: dict[fx.Node, list[int]] = {}
        self._num_edges = 0
        self._program, self._facts, self._device, self._where = program, facts, device, where
        self._presum = presum
        self._new: dict[fx.Node, fx.Node] = {}
        self._copies: dict[tuple[fx.Node, int, int], fx.Node] = {}  # node, its version, device
        self._edges: dict[tuple[fx.Node, bool], fx.Node] = {}  # of copies that gradients are added in
        self._version: dict[int, int] = {}  # times a storage was written
        self._region: Region = ()
        self._regions = self.graph.placeholder("regions")
        for node in program.inputs:
            self._add_input(node)
        self._top = list(self.graph.nodes)[-1]  # anchors follow: autograd comes to them last

    def _add_input(self, node: fx.Node) -> None:
        at = self._device[node]
        made = self._new[node] = self.graph.placeholder(node.name)
        given = node.meta["slot"].kind == "input"
        made.meta = {"op": node.meta["op"], "device": at, "back": at, "given": given}
        self.original[made] = node

    def op(self, node: fx.Node) -> None:
        """One op, with the copies it needs before it."""
        at = self._device[node]
        self._enter(node.meta["region"])
        readings: list[fx.Node] = []
        fx.map_arg((node.args, node.kwargs), readings.append)
        here = self._facts.storages[node] or node in self._facts.written  # a size is read anywhere
        ready = iter(self._at(node, readings, at) if here else [self._new[one] for one in readings])
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: next(ready))
        args, kwargs = self._set_devices(node.target, args, kwargs, at=at, readings=readings)
        stashes = self.homes.get(node, at) != at
        if stashes:
            self.graph.call_function(expect_stash, (self._regions,))
        made = self.graph.call_function(node.target, args, kwargs)
        made.meta = {"op": node.meta["op"], "device": at, "back": at}
        if stashes:
            self.graph.call_function(stash_output, (self._regions, len(self.stashing), made))
            self.stashing.append(StashingOp(node.meta["op"], self.homes[node], at))
        self._new[node] = made
        self.original[made] = node
        for storage in self._facts.written.get(node, ()):
            self._version[storage] = self._version.get(storage, 0) + 1
        for load in self._to_drop.pop(node, ()):
            self.graph.call_function(drop_load, (self._regions, load))

    def output(self, where: torch.device | None) -> None:
        """What the graph gives."""
        self._enter(())
        last = next(node for node in self._program.graph.nodes if node.op == "output")
        given = fx.map_arg(last.args[0], lambda node: self._move_output(node, where))
        self.graph.output(given)

    def _move_output(self, node: fx.Node, where: torch.device | None) -> fx.Node:
        made = self._new[node]
        return made if where is None else self._call(move_to_device, (made, where), made.meta)

    def _at(self, reader: fx.Node, readings: list[fx.Node], at: int) -> list[fx.Node]:
        """Each reading on a device: copies first, then the edges, the last reading's first.

        Autograd runs the edges of one op in reverse, and so adds the gradients of an op that reads one
        tensor twice in the order of its arguments.
        """
        found = {}
        far = [place for place, node in enumerate(readings) if self._is_far(node, at)]
        loads: dict[int, tuple[int, fx.Node]] = {}
        for place in far:
            key = (readings[place], reader)
            if key in self.drops:
                same = [loads[other] for other in loads if readings[other] is key[0]]
                loads[place] = same[0] if same else self._load(key, at)
            else:
                self._copy(readings[place], at)
        for place in reversed(far):
            node = readings[place]
            if place in loads:
                found[place] = self._add_load_edge(node, *loads[place])
            else:
                found[place] = self._add_edge(node, self._copy(node, at))
        return [found.get(place, self._new[node]) for place, node in enumerate(readings)]

    def _load(self, key: tuple[fx.Node, fx.Node], at: int) -> tuple[int, fx.Node]:
        """The copy of a weight that stays at home, for one reader."""
        weight, load = key[0], len(self.readings)
        place = self._program.inputs.index(weight)
        self.readings.append(Reading(weight.meta["op"], place, self._device[weight], at))
        self._to_drop.setdefault(self.drops[key], []).append(load)
        return load, self._call(fetch_load, (self._regions, load), {"op": weight.meta["op"]})

    def _add_load_edge(self, weight: fx.Node, load: int, copy: fx.Node) -> fx.Node:
        if weight not in self._facts.trained:
            return copy
        edge, meta = self._num_edges, {"op": weight.meta["op"]}
        self._num_edges += 1
        with self.graph.inserting_after(self._top):
            self._top = anchor = self._call(anchor_gradient, (self._regions, edge, self._new[weight]), meta)
        return self._call(link_load_gradient, (self._regions, load, edge, anchor, copy), meta)

    def _is_far(self, node: fx.Node, at: int) -> bool:
        return self._device[node] != at and bool(self._facts.storages[node])

    def _copy(self, node: fx.Node, at: int) -> fx.Node:
        version = sum(self._version.get(storage, 0) for storage in self._facts.storages[node])
        key = (node, version, at)
        if key not in self._copies:
            meta = {"op": node.meta["op"], "device": at, "back": at, "role": COPY, "source": node}
            self._copies[key] = self._call(copy_to_device, (self._new[node], self._where[at]), meta)
            self.num_copies += 1
        return self._copies[key]

    def _add_edge(self, node: fx.Node, copy: fx.Node) -> fx.Node:
        if node not in self._facts.trained:
            return copy
        key = (copy, any(context == ("grad", False) for context in self._region))
        if not self._presum or key not in self._edges:
            meta = {**copy.meta, "back": self._device[node], "role": EDGE}
            self._edges[key] = self._call(link_gradient, (self._new[node], copy, self._device[node]), meta)
        return self._edges[key]

    def _call(self, target: Any, args: tuple[Any, ...], meta: dict[str, Any]) -> fx.Node:
        made = self.graph.call_function(target, args)
        made.meta = dict(meta)
        return made

    def _enter(self, region: Region) -> None:
        if region != self._region:
            self._region = region
            self.graph.call_function(change_region, (self._regions, region))

    def _set_devices(
        self, target: Any, args: Any, kwargs: Any, *, at: int, readings: list[fx.Node]
    ) -> tuple[Any, dict[str, Any]]:
        """Devices among the arguments are the op's own."""

        def replace_device(leaf: Any) -> Any:
            return self._where[at] if isinstance(leaf, torch.device) else leaf

        if not readings and _takes_device(target) and "device" not in kwargs:
            kwargs = {**kwargs, "device": self._where[at]}  # it would be made on the CPU
        return fx.node.map_aggregate((tuple(args), dict(kwargs)), replace_device)


def _takes_device(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is not None and any(argument.name == "device" for argument in schema.arguments)
