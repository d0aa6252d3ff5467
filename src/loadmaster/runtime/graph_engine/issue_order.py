"""Order: in what order the ops of a program are issued: by the plan's priority, as far as data allows.

Kept as captured, since the numbers depend on it:
- ops that draw random numbers (else dropout would drop other elements);
- ops that touch memory which some op writes in place;
- the readers of a tensor with three or more of them: autograd adds gradients in the reverse order of the
  readers, and only a sum of two does not depend on it.
"""

import heapq
from collections.abc import Mapping
from itertools import pairwise

from torch import fx

from loadmaster.runtime.graph_engine.op_facts import Facts, is_random
from loadmaster.runtime.graph_engine.program import Program

_SUM_HAS_AN_ORDER = 3


def issue_order(program: Program, facts: Facts, priority: Mapping[fx.Node, int]) -> list[fx.Node]:
    """The ops, each after what it reads; one without a priority comes as early as it can."""
    ops, lowest = program.ops, min(priority.values(), default=0)
    rank = {node: (priority.get(node, lowest), at) for at, node in enumerate(ops)}
    after: dict[fx.Node, set[fx.Node]] = {node: set() for node in ops}
    for node in ops:
        for source in node.all_input_nodes:
            if source in after:
                after[source].add(node)
    for chain in _find_chains(program, facts):
        for one, other in pairwise(chain):
            after[one].add(other)
    waiting = dict.fromkeys(ops, 0)
    for users in after.values():
        for user in users:
            waiting[user] += 1
    ready = [(rank[node], node) for node in ops if waiting[node] == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        _, node = heapq.heappop(ready)
        order.append(node)
        for user in after[node]:
            waiting[user] -= 1
            if waiting[user] == 0:
                heapq.heappush(ready, (rank[user], user))
    assert len(order) == len(ops), "captured order satisfies every chain"
    return order


def _find_chains(program: Program, facts: Facts) -> list[list[fx.Node]]:
    """Ops that keep the captured order among themselves."""
    ops = program.ops
    place = {node: at for at, node in enumerate(ops)}
    chains = [[node for node in ops if is_random(node)]]
    touching: dict[int, list[fx.Node]] = {storage: [] for storage in sorted(facts.changing)}
    for node in ops:
        touched = {*facts.written.get(node, ()), *facts.storages[node]}
        for source in node.all_input_nodes:
            touched.update(facts.storages.get(source, ()))
        for storage in touched & touching.keys():
            touching[storage].append(node)
    chains += touching.values()
    for node in (*program.inputs, *ops):
        readers = [user for user in node.users if user in place]
        uses = sum(_count_reads(user, node) for user in readers)
        if node in facts.trained and uses >= _SUM_HAS_AN_ORDER:
            chains.append(sorted(readers, key=place.__getitem__))
    return chains


def _count_reads(reader: fx.Node, node: fx.Node) -> int:
    """How often an op reads a node."""
    found = []
    fx.map_arg((reader.args, reader.kwargs), lambda one: found.append(one is node))
    return sum(found)
