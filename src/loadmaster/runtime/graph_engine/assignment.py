"""Assignment: the device of every node of a program, from a plan that names ops.

The plan was made for the graph of one mode and one shape. Where the program is another (eval mode, another
batch), an op that the plan knows by name and kind keeps its device; any other goes where the ops of its
module, or else its first input, are.

Three rules come before the plan, since they keep the numbers right: what writes into a tensor runs where that
tensor is, with everything that looks at the same memory; a buffer that is written is where its first writer
is; of an op with several outputs, each is taken where the op ran.
"""

import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher

from torch import fx

from loadmaster.core.errors import PlanError
from loadmaster.core.graph import Graph, Phase
from loadmaster.core.plan import Plan
from loadmaster.graph.spill import LANDED, LOAD, RESTORE, max_window_bytes
from loadmaster.graph.whole_modules import LOSS, find_viewed_ops
from loadmaster.runtime.graph_engine.op_facts import Facts
from loadmaster.runtime.graph_engine.program import Program, op_kind

_FEW = 3


@dataclass(frozen=True, slots=True)
class PlanIndex:
    """What a plan says of ops, by name."""

    device: dict[str, int]
    kind: dict[str, str]
    priority: dict[str, int]
    forward: list[tuple[str, str]]  # ops of the forward pass and their modules, in order
    by_module: dict[str, int]  # the device of most ops of a module; views and inputs count last
    views: frozenset[str]  # ops that only look at memory: they are where it is
    trains: bool  # the graph has a backward pass
    inputs: frozenset[str] = frozenset()
    spilled: frozenset[str] = frozenset()  # weights that stay at home and are loaded for each reader
    stashing: Mapping[str, int] = field(default_factory=dict)  # ops, and where what they made waits
    largest_stash_bytes: int = 0
    window_bytes: int = 0  # of copies on a device at a time


def index_plan(graph: Graph, plan: Plan) -> PlanIndex:
    """The plan of a graph as tables."""
    if len(plan.device) != graph.num_ops:
        raise PlanError(f"the plan has {len(plan.device)} ops, its graph {graph.num_ops}; give them together")
    kind = dict(zip(graph.op_name, graph.op_kind, strict=True))
    views = frozenset(graph.op_name[op] for op in find_viewed_ops(graph))
    votes: dict[str, Counter[int]] = {}
    lesser_votes: dict[str, Counter[int]] = {}
    forward = []
    device = dict(zip(graph.op_name, plan.device.tolist(), strict=True))
    for name, module, phase in zip(graph.op_name, graph.module, graph.phase.tolist(), strict=True):
        if kind[name] in (LOAD, RESTORE, LANDED):
            continue
        if phase in (Phase.FORWARD, Phase.PARAM):
            counted = lesser_votes if name in views or kind[name] == "input" else votes
            counted.setdefault(module, Counter())[device[name]] += 1
        if phase == Phase.FORWARD and kind[name] != "input" and module != LOSS:
            forward.append((name, module))
    stashes = _find_stashes(graph)
    return PlanIndex(
        device=device,
        kind=kind,
        priority=dict(zip(graph.op_name, plan.priority.tolist(), strict=True)),
        forward=forward,
        by_module={module: count.most_common(1)[0][0] for module, count in (lesser_votes | votes).items()},
        views=views,
        trains=bool((graph.phase == Phase.BACKWARD).any()),
        inputs=frozenset(name for name in graph.op_name if kind[name] == "input"),
        spilled=_find_spilled_weights(graph),
        stashing={graph.op_name[maker]: int(plan.device[op]) for op, maker, _ in stashes},
        largest_stash_bytes=max((size for _, _, size in stashes), default=0),
        window_bytes=max_window_bytes(graph),
    )


def _find_spilled_weights(graph: Graph) -> frozenset[str]:
    """Weights that have loads: these are in the group of their weight."""
    kinds = list(zip(graph.op_kind, graph.group.tolist(), graph.op_name, strict=True))
    groups = {group for kind, group, _ in kinds if kind == LOAD}
    return frozenset(name for kind, group, name in kinds if kind == "param" and group in groups)


def _find_stashes(graph: Graph) -> list[tuple[int, int, int]]:
    """Every restore, the op that made what it restores, and its bytes; what else it waits for is empty."""
    pairs = zip(graph.use_tensor.tolist(), graph.use_op.tolist(), strict=True)
    return [
        (op, int(graph.tensor_op[t]), int(graph.tensor_bytes[t]))
        for t, op in pairs
        if graph.op_kind[op] == RESTORE and graph.tensor_bytes[t]
    ]


def find_unplanned_ops(program: Program, facts: Facts, known: PlanIndex) -> list[str]:
    """Ops of the program that the plan does not know, in words; none: the plan is for this program."""
    found = []
    for node in _list_placeable_ops(program, facts):
        name, kind = node.meta["op"], op_kind(node)
        if known.kind.get(name) != kind:
            there = f"is {known.kind[name]!r} in the plan" if name in known.kind else "is not in the plan"
            found.append(f"op {name!r} ({kind}) {there}")
    return found


def names_in_plan(program: Program, facts: Facts, known: PlanIndex) -> dict[fx.Node, str]:
    """What the plan calls each op; ops that it does not know are left out.

    Another mode or batch numbers ops in another way ('mul_8' for 'mul'), so ops are then matched by kind and
    module along both graphs, and one that stands in for another (a slice for an alias) takes its place.
    """
    ops = _list_placeable_ops(program, facts)
    if not find_unplanned_ops(program, facts, known):
        return {node: node.meta["op"] for node in ops}
    here = [(op_kind(node), node.meta["module"]) for node in ops]
    there = [(known.kind[name], module) for name, module in known.forward]
    found: dict[fx.Node, str] = {}
    for tag, i, j, k, end in SequenceMatcher(None, here, there, autojunk=False).get_opcodes():
        if tag == "equal" or (tag == "replace" and j - i == end - k):
            found.update((ops[i + at], known.forward[k + at][0]) for at in range(j - i))
    return found


def _list_placeable_ops(program: Program, facts: Facts) -> list[fx.Node]:
    """Ops that give or write tensors; sizes have no place."""
    return [node for node in program.ops if facts.storages[node] or node in facts.written]


def assign_devices(
    program: Program, facts: Facts, known: PlanIndex, names: Mapping[fx.Node, str], homes: Mapping[str, int]
) -> tuple[dict[fx.Node, int], list[str]]:
    """The device of every node, and what had to differ from the plan; `homes` says where weights are."""
    device: dict[fx.Node, int] = {}
    for node in program.inputs:
        name = node.meta["op"]
        device[node] = homes.get(name, known.device.get(name, 0))
    for node in program.ops:
        device[node] = known.device[names[node]] if node in names else _nearest_device(node, device, known)
        if node.target is operator.getitem:
            device[node] = device[node.args[0]]
    _place_constants(program, device)
    moved = _keep_memory_together(program, facts, device)
    strange = [node.meta["op"] for node in _list_placeable_ops(program, facts) if node not in names]
    notes = []
    if strange:
        notes.append(f"{_summarise_names(strange)} not in the plan: placed with the ops around")
    if moved:
        notes.append(f"{_summarise_names(moved)} moved to the memory written in place")
    return device, notes


def _nearest_device(node: fx.Node, device: Mapping[fx.Node, int], known: PlanIndex) -> int:
    """Where the ops of its module are, or its first input."""
    found = known.by_module.get(node.meta["module"])
    if found is not None:
        return found
    return next((device[one] for one in node.all_input_nodes if one in device), 0)


def _place_constants(program: Program, device: dict[fx.Node, int]) -> None:
    """A constant is where it is first read."""
    for node in program.inputs:
        if node.meta["slot"].kind == "constant":
            device[node] = next((device[user] for user in node.users if user in device), 0)


def _keep_memory_together(program: Program, facts: Facts, device: dict[fx.Node, int]) -> list[str]:
    """All that looks at memory which is written runs at its home; gives the names of what moved."""
    maker: dict[int, fx.Node] = {}
    writer: dict[int, fx.Node] = {}
    for node in (*program.inputs, *program.ops):
        for storage in facts.storages[node]:
            maker.setdefault(storage, node)
        for storage in facts.written.get(node, ()):
            writer.setdefault(storage, node)
    moved: dict[str, None] = {}
    home = {}
    for storage, first in writer.items():
        made = maker[storage]
        home[storage] = device[first if made.op == "placeholder" else made]
    for node in (*program.inputs, *program.ops):
        touched = [s for s in (*facts.written.get(node, ()), *facts.storages[node]) if s in home]
        if touched and device[node] != home[touched[0]]:
            device[node] = home[touched[0]]
            if node.op == "call_function":
                moved[node.meta["op"]] = None
    return list(moved)


def _summarise_names(names: list[str]) -> str:
    """'a, b, c and 4 more'."""
    more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
    return f"{len(names)} op{'s' * (len(names) > 1)} ({', '.join(names[:_FEW])}{more})"
